"""Text embeddings by class name, from files."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from cliquetta.errors import UnknownNameError, UserError
from cliquetta.prompts.features import as_text_features

NAMES = ["cat", "dog", "sea horse"]
EMBEDDINGS = np.arange(12, dtype=np.float16).reshape(3, 4)


@pytest.fixture(params=["npz", "safetensors"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / f"text.{request.param}"
    if request.param == "npz":
        np.savez(path, names=np.array(NAMES), embeddings=EMBEDDINGS)
    else:
        tensors = {"embeddings": torch.from_numpy(EMBEDDINGS)}
        save_file(tensors, path, metadata={"names": json.dumps(NAMES), "format": "pt"})
    return path


def test_rows_are_selected_by_name(path: Path) -> None:
    result = as_text_features(path).select(["sea horse", "cat"])
    assert result.dtype == torch.float32
    assert result.tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]


def test_a_name_that_the_file_lacks_is_refused(path: Path) -> None:
    features = as_text_features(path)
    with pytest.raises(UnknownNameError, match="dog"):
        features.select(["dogg"])


def test_files_of_another_form_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "bare.npz", names=np.array(NAMES))
    np.savez(tmp_path / "twice.npz", names=np.array(["cat"] * 3), embeddings=EMBEDDINGS)
    save_file({"embeddings": torch.ones(3, 4)}, tmp_path / "bare.safetensors")
    for name, word in (
        ("bare.npz", "text"),
        ("bare.safetensors", "names"),
        ("twice.npz", "once"),
    ):
        with pytest.raises(UserError, match=word):
            as_text_features(tmp_path / name).select(["cat"])
