"""What the pages for services show is run: the FastAPI program, and the job of every night."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cliquetta import create_method, create_model, get_dataset
from docs.hooks import DOCS
from tests._helpers.running import COMMAND, child_environment
from tests._helpers.trees import table_rows

CLASSES = ("cat", "dog", "ship")
Night = Callable[..., subprocess.CompletedProcess[str]]


def block(page: str, language: str, containing: str) -> str:
    text = (DOCS / page).read_text(encoding="utf-8")
    blocks = re.findall(rf"^```{language}\n(.*?)^```", text, re.S | re.M)
    (found,) = [one for one in blocks if containing in one]
    return found


def save_images(folder: Path, numbers: range, named: str = "{}.png") -> list[Path]:
    """Some images of the bundled set."""
    folder.mkdir(parents=True, exist_ok=True)
    dataset = get_dataset("bundled")
    paths = [folder / named.format(number) for number in numbers]
    for number, path in zip(numbers, paths, strict=True):
        dataset.load(number).save(path)
    return paths


def test_the_fastapi_program_answers_row_by_row(tmp_path: Path) -> None:
    from fastapi.testclient import TestClient

    variables: dict[str, Any] = {}
    exec(compile(block("embed.md", "python", "FastAPI()"), "app.py", "exec"), variables)
    paths = save_images(tmp_path, range(3))
    (tmp_path / "broken.jpg").write_bytes(b"no picture")
    sent = [
        ("images", (p.name, p.read_bytes())) for p in [*paths, tmp_path / "broken.jpg"]
    ]
    answers = TestClient(variables["app"]).post("/predict", files=sent).json()
    method = create_method(
        "domain_norm", create_model("micro"), ["cat", "dog", "horse"]
    )
    expected = method.predict([path.read_bytes() for path in paths])
    assert [answer["name"] for answer in answers] == [
        *(p.name for p in paths),
        "broken.jpg",
    ]
    assert [answer["best"][0][0] for answer in answers[:3]] == expected.labels
    assert answers[3]["best"] == [] and "not an image" in answers[3]["error"]


def test_opencvs_images_are_those_of_the_files(tmp_path: Path) -> None:
    cv2 = pytest.importorskip("cv2")
    paths = save_images(tmp_path, range(4))
    method = create_method("zero_shot", create_model("micro"), CLASSES)
    frames = [cv2.imread(str(path)) for path in paths]
    expected = method.predict(paths).logits
    assert method.predict(frames, channel_order="bgr").logits.equal(expected)
    assert not method.predict(frames).logits.equal(expected)


@pytest.fixture
def night(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Night:
    """A folder with the job, a class list and labelled images; ``night(DAY)`` runs it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "night.sh").write_text(block("nightly.md", "sh", "night.sh"))
    (tmp_path / "names.txt").write_text("\n".join(CLASSES))
    programs = tmp_path / "bin"
    programs.mkdir()
    call = " ".join(f"'{word}'" for word in COMMAND)
    (programs / "cliquetta").write_text(f'#!/bin/sh\nexec {call} "$@"\n')
    (programs / "python3").symlink_to(sys.executable)
    for program in programs.iterdir():
        if not program.is_symlink():
            program.chmod(0o755)
    for number, name in enumerate(CLASSES):
        save_images(tmp_path / "check" / name, range(4 * number, 4 * number + 4))
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"

    def run(day: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**child_environment(), "PATH": path, **variables}
        words = ["sh", "night.sh", day]
        return subprocess.run(words, env=environment, capture_output=True, text=True)

    return run


@pytest.mark.slow
def test_the_job_of_a_night_keeps_the_last_good_state(
    night: Night, tmp_path: Path
) -> None:
    """A good night, one with a broken image, one whose check fails, and wrong input."""
    good = tmp_path / "states/good.safetensors"
    save_images(tmp_path / "photos/monday", range(20, 30))
    first = night("monday", LEAST="0")
    assert first.returncode == 0, first.stderr
    assert len(table_rows(tmp_path / "out/monday.csv")) == 10
    assert "accuracy" in first.stdout and good.exists()
    after_monday = good.read_bytes()

    again = night("monday", LEAST="0")  # done: nothing happens
    assert (again.returncode, again.stdout, good.read_bytes()) == (0, "", after_monday)

    save_images(tmp_path / "photos/tuesday", range(30, 40))
    (tmp_path / "photos/tuesday/broken.png").write_bytes(b"no picture")
    assert night("tuesday", LEAST="0").returncode == 3
    after_tuesday = good.read_bytes()
    assert after_tuesday != after_monday

    save_images(tmp_path / "photos/wednesday", range(40, 50))
    assert night("wednesday", LEAST="101").returncode == 4
    assert good.read_bytes() == after_tuesday
    assert (tmp_path / "out/wednesday.csv").exists()
    assert (tmp_path / "states/wednesday.safetensors").read_bytes() != after_tuesday

    assert night("nowhere").returncode == 2
    assert good.read_bytes() == after_tuesday
