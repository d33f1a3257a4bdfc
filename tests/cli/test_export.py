"""``cliquetta export`` and ``predict --frozen``: one result in both, and clear refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from cliquetta.data.images import open_image
from cliquetta.model.clip import CLIP
from tests._helpers.running import Result, Run
from tests._helpers.tolerance import FEATURE
from tests._helpers.trees import table_rows

CLASSES = "airplane,cat,frog"


@pytest.fixture
def state(run: Run, photos: Path, tiny_file: Path, tmp_path: Path) -> Path:
    """What ``domain_norm`` has learned from the photos."""
    path = tmp_path / "photos.safetensors"
    words = ("--classes", CLASSES, "--model", tiny_file, "--set", "step_every=3")
    result = run("predict", photos, *words, "--state", path, "--out", tmp_path / "learning.csv")
    assert result.code == 0, result.text
    return path


def test_exported_and_frozen_predictions_agree(
    run: Run, state: Path, photos: Path, tiny_file: Path, tiny_clip: CLIP, tmp_path: Path
) -> None:
    before = state.read_bytes()
    table, model = tmp_path / "frozen.csv", tmp_path / "model.pt2"
    words = ("--classes", CLASSES, "--model", tiny_file, "--set", "step_every=3", "--frozen")
    result = run("predict", photos, *words, "--state", state, "--probabilities", "--out", table)
    assert result.code == 0, result.text
    assert state.read_bytes() == before  # nothing was learned
    result = run("export", "--state", state, "--model", tiny_file, "--out", model, "--json")
    written = json.loads(result.stdout)
    assert result.code == 0 and written["bytes"] == model.stat().st_size
    assert written["metadata"]["classes"] == CLASSES.split(",")
    rows = table_rows(table)
    pixels = torch.stack([tiny_clip.preprocess(open_image(row["path"])) for row in rows])
    logits = torch.export.load(model).module()(pixels)
    frozen = [[float(row[f"p_{name}"]) for name in CLASSES.split(",")] for row in rows]
    np.testing.assert_allclose(logits.softmax(dim=1).numpy(), frozen, atol=FEATURE)


def refused(result: Result, sentence: str, folder: Path) -> bool:
    """Whether a command ended with this sentence and wrote no model."""
    written = [path for path in folder.rglob("*") if path.suffix in (".onnx", ".pt2", ".tmp")]
    return result.code == 2 and sentence in " ".join(result.stderr.split()) and not written


def test_bad_input_is_one_sentence_and_writes_nothing(
    run: Run, state: Path, tiny_file: Path, tmp_path: Path
) -> None:
    model = ("--model", tiny_file)
    out = ("--out", tmp_path / "model.onnx")
    result = run("export", "--method", "tda", "--classes", CLASSES, *model, *out)
    assert refused(result, "tda has nothing to freeze or export", tmp_path)
    result = run("export", "--state", state, *model, "--out", tmp_path / "model.bin")
    assert refused(result, "the suffix says the format", tmp_path)
    result = run("export", "--state", state, *model, "--out", state / "model.onnx")
    assert refused(result, "cannot write", tmp_path)
    half = tmp_path / "half.safetensors"
    half.write_bytes(state.read_bytes()[: state.stat().st_size // 2])
    assert refused(
        run("export", "--state", half, *model, *out), "not a readable state file", tmp_path
    )
    result = run("export", "--classes", CLASSES, "--fitted", half, *model, *out)
    assert refused(result, "not a readable state file", tmp_path)


def test_an_existing_file_is_not_replaced(
    run: Run, state: Path, tiny_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "model.pt2"
    out.write_text("mine")
    result = run("export", "--state", state, "--model", tiny_file, "--out", out)
    assert result.code == 2 and "--overwrite" in result.stderr and out.read_text() == "mine"


def test_frozen_needs_what_was_learned(run: Run, photos: Path, tiny_file: Path) -> None:
    words = ("predict", photos, "--classes", CLASSES, "--model", tiny_file, "--out", "-")
    result = run(*words, "--frozen")
    assert result.code == 2 and "give --state" in result.stderr
    result = run(*words, "--frozen", "--method", "tda")
    assert result.code == 2
    result = run(*words, "--frozen", "--method", "tent,zero_shot")
    assert result.code == 2 and "one method" in result.stderr
    assert run(*words, "--frozen", "--method", "zero_shot").code == 0
