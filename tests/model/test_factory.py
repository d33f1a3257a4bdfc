"""Names, devices and dtypes: every wrong one is refused in one sentence."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from cliquetta.data.bundled import load_bundled
from cliquetta.errors import UnknownNameError
from cliquetta.model import factory
from cliquetta.model.checkpoints.hub import DownloadError, Fetcher
from cliquetta.model.checkpoints.local import save_model
from cliquetta.model.clip import CLIP
from cliquetta.model.factory import create_model, pick_device, pick_dtype
from cliquetta.model.names import MICRO_NOTE


def test_the_bundled_model_says_once_what_it_is_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    factory._note_micro.cache_clear()
    for _ in range(2):
        create_model("micro")
    assert [record.getMessage() for record in caplog.records] == [MICRO_NOTE]


def test_micro_is_bundled_and_works() -> None:
    model = create_model("micro")
    assert model.id == "micro"
    assert model.image_size == 32
    assert model.capabilities >= {"text", "visual-prefix"}

    # every 20th bundled image
    bundled = load_bundled()
    pixels = model.preprocess.pixels(bundled.images[::20])
    images = model.encode_image(pixels, normalize=True)
    prompts = [f"a photo of a {name}." for name in bundled.names]
    texts = model.encode_text(prompts, normalize=True)
    best = (images @ texts.T).argmax(dim=1)
    assert (best == bundled.labels[::20]).float().mean() > 0.75


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("micr", "micro"),
        ("ViT-B/17", "ViT-B/16"),
        ("openai:ViT-B16", "ViT-B/16"),
        ("open_clip:ViT-B-17/openai", "ViT-B-16"),
        ("open_clip:ViT-B-16/laion2b_s34b", "laion2b_s34b_b88k"),
    ],
)
def test_unknown_names(name: str, nearest: str) -> None:
    with pytest.raises(UnknownNameError, match=f"'{nearest}'"):
        create_model(name)


def test_devices_and_dtypes(tiny_clip: CLIP, tmp_path: Path) -> None:
    save_model(tiny_clip, tmp_path / "m.safetensors")
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_dtype("bf16") is torch.bfloat16
    assert pick_dtype(torch.float16) is torch.float16
    model = create_model(tmp_path / "m.safetensors", device="cpu", dtype="fp16")
    assert model.dtype == torch.float16
    assert model.device.type == "cpu"
    assert model.logit_scale.dtype == torch.float32
    with pytest.raises(UnknownNameError, match="bf16"):
        create_model("micro", dtype="bf1")
    with pytest.raises(UnknownNameError, match="gelu"):
        create_model("micro", activation="gelo")  # type: ignore[arg-type]
    other = create_model(tmp_path / "m.safetensors", activation="gelu")
    assert other.config.vision.activation == other.config.text.activation == "gelu"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_missing_half_precision_is_warned_of(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factory, "computes_in", lambda kind: kind is torch.float32)
    with pytest.warns(UserWarning, match="float16"):
        create_model("micro", dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        create_model("micro")


def test_half_precision_of_a_cpu_limited_to_avx2() -> None:
    """In a process of its own: torch asks for the instructions once."""
    program = "import torch; from cliquetta.model.factory import computes_in as c; "
    program += "print(c(torch.float32), c(torch.bfloat16), c(torch.float16))"
    limited = {
        **os.environ,
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=limited, capture_output=True
    )
    assert done.stdout.decode().split() == ["True", "False", "False"], (
        done.stderr.decode()
    )


@pytest.mark.parametrize(("has_mps", "device"), [(True, "mps"), (False, "cpu")])
def test_without_cuda_the_device_is_apples_if_there_is_one(
    has_mps: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: has_mps)
    assert pick_device("auto").type == device


@pytest.mark.parametrize(("name", "revision"), [("a/b@v2", "v2"), ("a/b", None)])
def test_a_revision_of_a_repository_is_asked_for(
    name: str, revision: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None]] = []

    def ask(
        fetcher: Fetcher, repo: str, file: str, revision: str | None = None
    ) -> Path | None:
        asked.append((repo, revision))
        raise DownloadError("there is no network here")

    monkeypatch.setattr(Fetcher, "hub_file", ask)
    with pytest.raises(DownloadError):
        create_model(f"hf:{name}")
    assert asked == [("a/b", revision)]


def test_a_local_file_of_openais_is_read_without_a_network(
    tiny_clip: CLIP, tmp_path: Path
) -> None:
    save_model(tiny_clip, tmp_path / "tiny.safetensors")
    model = create_model(f"openai:{tmp_path / 'tiny.safetensors'}", offline=True)
    assert model.embed_dim == tiny_clip.embed_dim
