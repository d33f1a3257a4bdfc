"""Parity with open_clip and torchvision: run in an environment of its own.

    make test-parity
    PYTHONPATH=src pytest tests/parity -m parity

Where open_clip is not installed nothing in this folder is collected. The wheel of
torchvision is linked against CUDA; declaring two of its operators lets it import next
to a CPU build of torch.
"""

import importlib.util

import torch

if importlib.util.find_spec("open_clip") is None:
    collect_ignore_glob = ["test_*.py"]
elif torch.version.cuda is None:
    _library = torch.library.Library(
        "torchvision", "FRAGMENT"
    )  # declared while this lives
    for _operator in ("nms", "qnms"):
        _library.define(
            f"{_operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )
