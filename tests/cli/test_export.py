"""``cliquetta export`` and ``predict --frozen``: one result in both, and clear refusals."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from cliquetta.data.images import open_image
from cliquetta.export import METADATA
from cliquetta.model.clip import CLIP
from tests._helpers.running import Run
from tests._helpers.tolerance import FEATURE
from tests._helpers.trees import table_rows

CLASSES = "airplane,cat,frog"


@pytest.fixture
def state(run: Run, photos: Path, tiny_file: Path, tmp_path: Path) -> Path:
    """A file of what ``domain_norm`` has learned from the photos."""
    path = tmp_path / "photos.safetensors"
    words = ("--classes", CLASSES, "--model", tiny_file, "--set", "window=3")
    result = run(
        "predict", photos, *words, "--state", path, "--out", tmp_path / "learning.csv"
    )
    assert result.code == 0, result.text
    return path


def test_exported_and_frozen_predictions_agree(
    run: Run,
    state: Path,
    photos: Path,
    tiny_file: Path,
    tiny_clip: CLIP,
    tmp_path: Path,
) -> None:
    before = state.read_bytes()
    table = tmp_path / "frozen.csv"
    model = tmp_path / "model.pt2"
    words = (
        "--classes",
        CLASSES,
        "--model",
        tiny_file,
        "--set",
        "window=3",
        "--frozen",
    )
    result = run(
        "predict", photos, *words, "--state", state, "--probabilities", "--out", table
    )
    assert result.code == 0, result.text
    assert state.read_bytes() == before  # nothing was learned
    result = run(
        "export", "--state", state, "--model", tiny_file, "--out", model, "--json"
    )
    written = json.loads(result.stdout)
    assert result.code == 0 and written["bytes"] == model.stat().st_size
    assert written["metadata"]["classes"] == CLASSES.split(",")
    rows = table_rows(table)
    pixels = torch.stack(
        [tiny_clip.preprocess(open_image(row["path"])) for row in rows]
    )
    extra = {METADATA: ""}
    program = torch.export.load(model, extra_files=extra).module()
    assert json.loads(extra[METADATA]) == written["metadata"]
    logits = torch.cat(
        [program(pixels[:1]), program(pixels[1:])]
    )  # batches of any size
    frozen = [[float(row[f"p_{name}"]) for name in CLASSES.split(",")] for row in rows]
    np.testing.assert_allclose(logits.softmax(dim=1).numpy(), frozen, atol=FEATURE)


def test_other_classes_and_plain_clip_are_exported(
    run: Run, state: Path, tiny_file: Path, tmp_path: Path
) -> None:
    for number, source in enumerate((("--state", state), ("--method", "zero_shot"))):
        words = (
            "--classes",
            "cat,ship",
            "--model",
            tiny_file,
            "--out",
            tmp_path / f"{number}.pt2",
        )
        written = json.loads(run("export", *source, *words, "--json").stdout)
        assert written["metadata"]["classes"] == ["cat", "ship"]


def test_bad_input_is_one_sentence_and_writes_nothing(
    run: Run, state: Path, tiny_file: Path, tmp_path: Path
) -> None:
    half = tmp_path / "half.safetensors"
    half.write_bytes(state.read_bytes()[: state.stat().st_size // 2])
    onnx = tmp_path / "model.onnx"
    known = tmp_path / "model.pt2"
    known.write_text("mine")
    for words, out, sentence in (
        (("--state", state), tmp_path / "model.bin", "end its name in .onnx"),
        (("--state", state), state / "model.onnx", "cannot write"),
        (("--state", state), known, "--overwrite"),
        (("--state", half), onnx, "not a readable state file"),
        (("--classes", CLASSES, "--fitted", half), onnx, "not a readable state file"),
    ):
        assert run("export", *words, "--model", tiny_file, "--out", out).refuses(
            sentence
        )
    assert not [p for p in tmp_path.rglob("*") if p.suffix in (".onnx", ".tmp", ".bin")]
    assert known.read_text() == "mine"
