"""Bad input ends with one sentence that names the remedy, exit code 2 and no trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests._helpers.running import Run


def refused(answer: Any, *words: str) -> bool:
    """Fails with what is wrong, so that a test may simply assert it."""
    assert answer.code == 2
    assert "Traceback" not in answer.text
    for word in words:
        assert word in answer.text
    return True


def test_empty_folder(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert refused(
        run("predict", tmp_path / "empty", "--classes", "a,b", "--model", "micro"),
        "no images in",
        ".jpg",
    )


def test_no_such_path(run: Run, tmp_path: Path) -> None:
    assert refused(
        run("predict", tmp_path / "gone", "--classes", "a,b", "--model", "micro"),
        "no such file or folder",
    )


def test_no_classes(run: Run, photos: Path, tmp_path: Path) -> None:
    assert refused(run("predict", photos), "no class names", "--classes")
    assert refused(run("predict", photos, "--classes", ""), "no class names")
    assert refused(run("predict", photos, "--classes", ","), "no class names")
    (tmp_path / "names.txt").write_text("\n\n")
    assert refused(
        run("predict", photos, "--classes", tmp_path / "names.txt"), "write one per line"
    )
    assert refused(run("predict", photos, "--classes", "names.text"), "no file names.text")


def test_duplicate_classes(run: Run, photos: Path) -> None:
    assert refused(run("predict", photos, "--classes", "cat,dog,cat"), "must differ", "cat")


def test_class_name_of_200_words(run: Run, photos: Path, tiny_file: Path) -> None:
    name = " ".join(f"word{i}" for i in range(200))
    answer = run("predict", photos, "--classes", f"{name},cat", "--model", tiny_file)
    assert refused(answer, "word0 word1", "shorten the class name")
    answer = run("predict", photos, "--classes", name, "--model", tiny_file)
    assert refused(answer, "one class", "at least two")


def test_unknown_names_come_with_the_nearest(run: Run, photos: Path, tiny_file: Path) -> None:
    ask = ("predict", photos, "--classes", "a,b", "--model", tiny_file, "--method", "zero_shot")
    assert refused(run(*ask, "--method", "zero_shott"), "did you mean 'zero_shot'")
    assert refused(run(*ask, "--set", "temprature=2"), "did you mean 'temperature'")
    assert refused(run(*ask, "--set", "temperature"), "key=value")
    assert refused(run(*ask, "--set", "temperature=warm"), "temperature", "'warm' is not")
    assert refused(run(*ask, "--set", "temperature=0"), "above 0")
    assert refused(run(*ask, "--preset", "best"), "preset")
    assert refused(run(*ask, "--templates", "openai-8O"), "no template set", "openai-80")
    assert refused(run(*ask, "--dtype", "fp8"), "dtype", "bf16")
    assert refused(run(*ask, "--device", "gpu"), "no device 'gpu'", "cuda")
    if not torch.cuda.is_available():
        assert refused(run(*ask, "--device", "cuda"), "no device cuda", "try cpu")
    assert refused(run(*ask, "--shard", "3"), "--shard takes I/N")
    assert refused(run(*ask, "--format", "xls"), "unknown file format 'xls'")
    assert refused(
        run("predict", photos, "--classes", "a,b", "--model", "mikro"), "did you mean 'micro'"
    )
    assert refused(
        run("predict", photos, "--classes", "a,b", "--model", "x.safetensors"), "no such file"
    )
    assert refused(run("methods", "scapp"), "unknown method 'scapp'")
    assert refused(run("models", "nothing-like-this"), "no model matches")
    assert refused(run("demo", "--shifts", "smoke:3"), "unknown shift 'smoke'")
    assert refused(run("demo", "--shifts", "fog:9"), "1 to 5")
    assert refused(run("demo", "--method", "scap,tend"), "unknown method 'tend'", "'tent'")
    assert refused(run("demo", "--method", "scap,tent,scap"), "names scap twice")
    assert refused(run("demo", "--method", ","), "no methods given")


def test_unknown_option_and_command(run: Run) -> None:
    assert run("predict", "--clases", "a,b").code == 2
    assert run("pedict").code == 2


def test_model_file_that_is_none(run: Run, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.safetensors").write_bytes(b"no header")
    answer = run("predict", photos, "--classes", "a,b", "--model", tmp_path / "broken.safetensors")
    assert refused(answer, "broken.safetensors")


def test_output_that_is_a_folder(run: Run, photos: Path, tmp_path: Path) -> None:
    answer = run("predict", photos, "--classes", "a,b", "--out", tmp_path, "--model", "micro")
    assert refused(answer, "is a folder")


def test_output_that_cannot_be_written(run: Run, photos: Path, tiny_file: Path) -> None:
    out = photos / "image0.png" / "out.csv"  # below a file
    answer = run("predict", photos, "--classes", "a,b", "--model", tiny_file, "--out", out)
    assert refused(answer, "cannot write", "image0.png")


def test_no_network_is_one_sentence(
    run: Run, photos: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CLIQUETTA_OFFLINE", "1")
    monkeypatch.setenv("CLIQUETTA_CACHE", str(tmp_path / "cache"))
    answer = run("predict", photos, "--classes", "a,b", "--model", "openai:ViT-B/16")
    assert answer.code == 1
    assert "Traceback" not in answer.text and "cache" in answer.text


def test_json_says_the_error_too(run: Run, tmp_path: Path) -> None:
    answer = run("predict", tmp_path / "gone", "--classes", "a,b", "--model", "micro", "--json")
    document = json.loads(answer.stdout)
    assert document["exit_code"] == 2 and "no such file" in document["error"]


def test_debug_shows_where(run: Run, tmp_path: Path) -> None:
    answer = run("predict", tmp_path / "gone", "--classes", "a,b", "--model", "micro", "--debug")
    assert answer.code == 2
    assert "Traceback" in answer.text and "_expand" in answer.text


@pytest.mark.parametrize("kind", [MemoryError, RuntimeError])
def test_failure_on_the_way_is_code_1(
    run: Run, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def fail() -> None:
        raise kind("something")

    monkeypatch.setattr("cliquetta.methods.registry.method_entries", fail)
    answer = run("methods")
    assert answer.code == 1
    assert "Traceback" not in answer.text


def test_half_a_checkpoint_and_one_class_write_nothing(
    run: Run, photos: Path, tiny_file: Path, tmp_path: Path
) -> None:
    whole, half, out = tiny_file.read_bytes(), tmp_path / "half.safetensors", tmp_path / "out.csv"
    half.write_bytes(whole[: len(whole) // 2])
    ask = ("predict", photos, "--out", out, "--state", tmp_path / "state.safetensors")
    assert refused(run(*ask, "--classes", "cat,dog", "--model", half), "half.safetensors")
    assert refused(run(*ask, "--classes", "cat", "--model", tiny_file), "one class", "at least two")
    assert {path.name for path in tmp_path.iterdir()} == {"photos", half.name}
