"""Text embeddings by class name, for towers that come without their text half."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cliquetta.errors import UnknownNameError, UserError


def read_text_features(path: Path | str, names: Sequence[str]) -> Tensor:
    """Embeddings (N, E) of class names.

    Args:
        path: An ``.npz`` file with arrays ``names`` (M,) and ``embeddings`` (M, E); or a
            ``.safetensors`` file with a tensor ``embeddings`` and its names, a JSON list, under
            ``names`` in the header.
        names: The classes, in the order wanted; the file may hold more.

    Raises:
        UserError: If the file is not of that form, or does not hold a name.

    """
    path = Path(path)
    try:
        if path.suffix == ".npz":
            with np.load(path) as file:
                known = [str(name) for name in file["names"]]
                embeddings = torch.from_numpy(file["embeddings"]).float()
        else:
            with safe_open(path, framework="pt") as file:
                known = list(json.loads((file.metadata() or {})["names"]))
                embeddings = file.get_tensor("embeddings").float()
    except (KeyError, ValueError, SafetensorError) as error:
        raise UserError(
            f"{path} holds no text features: arrays `names` and `embeddings` are needed ({error})"
        ) from None
    if embeddings.ndim != 2 or len(known) != len(embeddings) or len(set(known)) != len(known):
        raise UserError(f"{path} must hold one embedding per name, each name once")
    place = {name: row for row, name in enumerate(known)}
    for name in names:
        if name not in place:
            raise UnknownNameError(f"class of {path.name}", name, known)
    return embeddings[[place[name] for name in names]]
