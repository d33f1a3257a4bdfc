"""Bad input ends with one sentence that names the remedy, exit code 2 and no trace."""

import json
from pathlib import Path

import pytest
import torch

from cliquetta.cli.command import read_settings, split_list
from tests._helpers.running import Run

TINY = ("--model", "tiny.safetensors")
PREDICT = ("predict", "photos", *TINY)
TWO = (*PREDICT, "--classes", "a,b", "--method", "zero_shot")
MICRO = ("--classes", "a,b", "--model", "micro")
EVALUATE = ("evaluate", "--dataset", "bundled@fog:3", "--method", "zero_shot", *TINY)
ABLATE = (
    "ablate",
    "--dataset",
    "bundled",
    "--method",
    "scap",
    "--field",
    "threshold",
    *TINY,
)


@pytest.fixture
def folder(tiny_file: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with photos, a model, and what is none."""
    folder = photos.parent
    (folder / "tiny.safetensors").symlink_to(tiny_file)
    (folder / "broken.safetensors").write_bytes(b"no header")
    (folder / "names.txt").write_text("\n\n")
    (folder / "empty").mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("predict", "empty", *MICRO), "no images in"),
        (("predict", "gone", *MICRO), "no such file or folder"),
        (("predict", "photos", *MICRO, "--out", "empty"), "is a folder"),
        ((*TWO, "--out", "photos/image0.png/out.csv"), "cannot write"),  # below a file
        (PREDICT, "no class names"),
        ((*PREDICT, "--classes", ","), "no class names"),
        ((*PREDICT, "--classes", "names.txt"), "write one per line"),
        ((*PREDICT, "--classes", "names.text"), "no file names.text"),
        ((*PREDICT, "--classes", "cat", "--state", "state"), "at least two"),
        ((*TWO, "--method", "zero_shott"), "did you mean 'zero_shot'"),
        ((*TWO, "--set", "temprature=2"), "did you mean 'temperature'"),
        ((*TWO, "--preset", "best"), "preset"),
        ((*TWO, "--templates", "openai-8O"), "openai-80"),
        ((*TWO, "--dtype", "fp8"), "bf16"),
        ((*TWO, "--device", "gpu"), "no device 'gpu'"),
        ((*TWO, "--shard", "3"), "--shard takes I/N"),
        ((*TWO, "--format", "xls"), "unknown file format 'xls'"),
        ((*TWO, "--model", "broken.safetensors"), "broken.safetensors"),
        ((*TWO, "--method", "zero_shot,tda", "--set", "x=1"), "for one method"),
        ((*TWO, "--out", "-", "--json"), "leave out"),
        ((*TWO, "--out", "-", "--page", "page.html"), "--page shows images"),
        ((*TWO, "--reject", "0.5"), "at least three, got 2"),
        ((*TWO, "--classes", "a,b,c", "--reject", "1"), "got 1.0: 0.9 is a good start"),
        ((*PREDICT, "--classes", "a,b", "--out", "-", "--frozen"), "give --state"),
        ((*TWO, "--frozen", "--method", "tda"), "give --state"),
        ((*TWO, "--frozen", "--method", "tent,zero_shot"), "one method"),
        ((*EVALUATE, "--seeds", "one"), "whole numbers"),
        ((*EVALUATE, "--dataset", "pets"), "--root"),
        ((*EVALUATE, "--order", "keff", "--present", "some"), "a range such as 1-4"),
        ((*EVALUATE, "--ray-gpus", "0.5"), "--ray-gpus is for --ray"),
        (("evaluate", "--grid", "odd"), "did you mean 'ood'"),
        ((*ABLATE, "--values", "1", "--field", "treshold"), "'threshold'"),
        (
            ("fit", "--method", "tda", "--dataset", "bundled-fewshot", "--out", "x"),
            "no fitting",
        ),
        (("compare", "nowhere"), "no such folder"),
        (("data", "doctor", "gone"), "no folder"),
        (
            ("export", "--method", "tda", *MICRO, "--out", "m.onnx"),
            "tda has nothing to freeze",
        ),
        (("methods", "scapp"), "unknown method 'scapp'"),
        (("models", "nothing-like-this"), "no model matches"),
        (("demo", "--shifts", "smoke:3"), "unknown shift 'smoke'"),
        (("demo", "--method", "scap,tent,scap"), "names scap twice"),
        (("predict", "--clases", "a,b"), ""),
        (("pedict",), ""),
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(
    run: Run, folder: Path, words: tuple[str, ...], sentence: str
) -> None:
    before = set(folder.rglob("*"))
    assert run(*words).refuses(sentence)
    assert set(folder.rglob("*")) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.usefixtures("folder")
def test_a_gpu_that_is_missing(run: Run) -> None:
    result = run(*TWO, "--device", "cuda")
    assert result.refuses("no device cuda") and "try cpu" in result.text


def test_no_network_is_one_sentence(
    run: Run, photos: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CLIQUETTA_OFFLINE", "1")
    monkeypatch.setenv("CLIQUETTA_CACHE", str(tmp_path / "cache"))
    result = run("predict", photos, "--classes", "a,b", "--model", "openai:ViT-B/16")
    assert (
        result.code == 1 and "Traceback" not in result.text and "cache" in result.text
    )


def test_json_says_the_error_too_and_debug_where(run: Run, tmp_path: Path) -> None:
    result = run("predict", tmp_path / "gone", *MICRO, "--json")
    document = json.loads(result.stdout)
    assert document["exit_code"] == 2 and "no such file" in document["error"]
    result = run("predict", tmp_path / "gone", *MICRO, "--debug")
    assert (
        result.code == 2
        and "Traceback" in result.text
        and "check_sources" in result.text
    )


@pytest.mark.parametrize("kind", [MemoryError, RuntimeError])
def test_failure_on_the_way_is_code_1(
    run: Run, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def fail() -> None:
        raise kind("something")

    monkeypatch.setattr("cliquetta.methods.building.registry.method_entries", fail)
    result = run("methods")
    assert result.code == 1 and "Traceback" not in result.text


def test_settings_are_pairs_and_lists_lose_repeats_and_blanks() -> None:
    assert read_settings(["steps=2", "text=a=b"]) == {"steps": "2", "text": "a=b"}
    with pytest.raises(ValueError, match="key=value"):
        read_settings(["=2"])
    assert split_list("a, b,,a", "things") == ["a", "b"]
    with pytest.raises(ValueError, match="things"):
        split_list(" ,", "things")


@pytest.mark.skipif(
    not Path("/proc/self").exists(), reason="needs a folder that nobody can write"
)
@pytest.mark.usefixtures("folder")
def test_an_output_that_cannot_be_written_is_named_and_no_temporary_file(
    run: Run,
) -> None:
    result = run(*TWO, "--out", "/proc/x.csv")
    assert (
        result.refuses("cannot write /proc/x.csv: ") and result.text.count("/proc") == 1
    )
