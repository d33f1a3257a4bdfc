"""What is misspelt is answered before torch is imported, and without a default model."""

import subprocess
import sys
from pathlib import Path

import pytest

from cliquetta.cli.checks import check_methods
from cliquetta.errors import UserError
from tests._helpers.running import Run, child_environment

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # an import of it raises ImportError
from cliquetta.cli.main import main
main()
"""
PHOTOS = ("predict", "photos", "--classes", "a,b", "--model", "micro")
EVALUATE = ("evaluate", "--dataset", "bundled@fog:3")
OWN = "folder:photos"


@pytest.fixture
def folder(photos: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with photos, without class folders."""
    monkeypatch.chdir(photos.parent)
    return photos.parent


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("predict", "gone", "--classes", "a,b", "--model", "micro"),
            "no such file or folder",
        ),
        (
            ("predict", "photos", "--classes", "none.txt", "--model", "micro"),
            "no file none.txt",
        ),
        ((*PHOTOS, "--model", "ViT-B/17"), "did you mean 'ViT-B/16'"),
        ((*PHOTOS, "--model", "none.pt"), "no such file or folder: none.pt"),
        ((*PHOTOS, "--method", "scapp"), "did you mean 'scap'"),
        ((*PHOTOS, "--method", "tda", "--set", "positve_alpha=2"), "'positive_alpha'"),
        ((*PHOTOS, "--method", "tda", "--preset", "pet"), "did you mean 'pets'"),
        ((*PHOTOS, "--fitted", "none.safetensors"), "no such file"),
        ((*PHOTOS, "--state", "."), "--state . is a folder"),
        ((*PHOTOS, "--page", "no/page.html"), "there is no folder no"),
        ((*PHOTOS, "--device", "gpu"), "no device 'gpu'"),
        ((*PHOTOS, "--dtype", "fp8"), "unknown dtype"),
        ((*PHOTOS, "--plugin", "none.py"), "no plug-in none.py"),
        ((*EVALUATE, "--method", "tda/positve_alpha=2"), "'positive_alpha'"),
        ((*EVALUATE, "--order", "shufled"), "did you mean 'shuffled'"),
        (("evaluate", "--dataset", "bundled@fgo:3"), "did you mean 'fog'"),
        (("evaluate", "--dataset", "pets"), "--root"),
        (
            ("evaluate", "--dataset", "folder:gone", "--model", "micro"),
            "no such file or folder",
        ),
        (("evaluate", "--grid", "odd"), "did you mean 'ood'"),
        (("fit", "--method", "coop", "--dataset", "bundld", "--out", "x"), "'bundled'"),
        (
            (
                "ablate",
                "--method",
                "scap",
                "--field",
                "x",
                "--values",
                "1",
                "--dataset",
                "bundled",
            ),
            "unknown option of scap",
        ),
        (("export", "--state", "none.safetensors", "--out", "x.onnx"), "no such file"),
        (("serve", "--model", "micr"), "did you mean 'micro'"),
        (("serve", "--model", "micro", "--log-format", "xml"), "unknown log format"),
        (("app", "--model", "micro", "--method", "tdaa"), "did you mean 'tda'"),
        (("demo", "--shifts", "smoke:3"), "unknown shift 'smoke'"),
        (("compare", "gone"), "no such folder"),
        (("compare", ".", "--metric", "top2"), "unknown metric"),
        (("report", "gone"), "no such folder"),
        (("methods", "scapp"), "did you mean 'scap'"),
        (("models", "none*"), "no model matches"),
        (("data", "doctor", "gone"), "gone"),
        (("sessions", "list", "--sessions", "gone"), "no sessions in gone"),
    ],
)
def test_wrong_arguments_are_answered_without_torch(
    words: tuple[str, ...], sentence: str
) -> None:
    program = [sys.executable, "-c", WITHOUT_TORCH, *words]
    run = subprocess.run(
        program, env=child_environment(), capture_output=True, text=True
    )
    assert run.returncode == 2 and "Traceback" not in run.stderr, run.stderr
    assert sentence in run.stderr and len(run.stderr.splitlines()) == 1


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "words",
    [
        ("evaluate", "--dataset", OWN, "--method", "zero_shot"),
        ("evaluate", "--dataset", "bundled", "--unknown", OWN),
        ("fit", "--method", "coop", "--dataset", OWN, "--out", "x.safetensors"),
        (
            "fit",
            "--method",
            "coop",
            "--dataset",
            "bundled",
            "--validation",
            OWN,
            "--out",
            "x",
        ),
        (
            "ablate",
            "--method",
            "scap",
            "--field",
            "lr",
            "--values",
            "1",
            "--dataset",
            OWN,
        ),
        ("export", "--method", "zero_shot", "--classes", "a,b", "--out", "x.onnx"),
        ("predict", "photos", "--classes", "a,b"),
        ("serve",),
        ("app",),
    ],
)
def test_no_model_is_chosen_for_images_of_ones_own(
    run: Run, words: tuple[str, ...]
) -> None:
    result = run(*words)
    assert result.refuses("no model: name one, such as ViT-B/16 for photographs")
    assert len(result.stderr.splitlines()) == 1


def test_a_grid_file_must_name_the_model_of_images_of_ones_own(
    run: Run, folder: Path
) -> None:
    (folder / "grid.json").write_text(
        f'[{{"datasets": ["{OWN}"], "methods": ["zero_shot"]}}]'
    )
    assert run("evaluate", "--grid", "grid.json").refuses("no model: name one")


def test_options_of_a_known_method_pass_whatever_their_value() -> None:
    check_methods("tda:pets/views=8,zero_shot")
    check_methods("tda", preset="pets", settings=["positive_alpha=2"])
    with pytest.raises(UserError, match="for one method"):
        check_methods("tda,tent", settings=["lr=1"])
