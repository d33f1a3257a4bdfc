"""Starts servers quickly: everything is imported once, each server is a fork.

``python zygote.py MODEL FOLDER PORT SMALLEST`` starts, for every line on its standard input, a new
server and prints ``PID``; the server before it must have been killed. It ends with its input.
Memories of SMALLEST bytes and more are written as changes; if that is 0, more than two sessions
stay in memory (one that is restored is written whole).
"""

import os
import sys

import torch

from cliquetta.model.factory import create_model
from cliquetta.serve import changes
from cliquetta.serve.server import serve
from cliquetta.serve.settings import Limits, Settings, load_models


def main() -> None:
    torch.set_num_threads(1)
    path, folder, port, smallest = sys.argv[1:]
    changes.SMALLEST = int(smallest)
    settings = Settings(
        models=load_models({"tiny": path}, create_model),
        limits=Limits(rate=1e6, burst=10**6, resident_sessions=2 if changes.SMALLEST else 8),
        workers=2,
    )
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            serve(settings, folder, host="127.0.0.1", port=int(port))
            os._exit(0)
        print(child, flush=True)
        os.waitpid(child, 0)
        print("gone", flush=True)


if __name__ == "__main__":
    main()
