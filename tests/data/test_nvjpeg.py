"""JPEG files that a GPU decodes; Pillow plays nvJPEG, since torchvision is not installed."""

import sys
from collections.abc import Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile, ImageOps
from torch import Tensor

from cliquetta.data.images import ImageError, open_image
from cliquetta.data.listing import Entry, find_listed
from cliquetta.data.loader import Loader
from cliquetta.data.nvjpeg import Jpeg, JpegDecoder, read_jpeg, resize_and_crop, turn
from cliquetta.errors import UserError
from cliquetta.inference.bulk import predict
from cliquetta.inference.ray_driver import RayCluster
from cliquetta.model.clip import CLIP
from cliquetta.model.preprocess import Preprocess
from tests._helpers.tiny import TINY_NAMES
from tests._helpers.trees import exif_of, saved

CPU = torch.device("cpu")
jpeg = partial(saved, kind="JPEG", quality=95)
LEVELS = 2  # Pillow rounds to a level between its two passes and after them


def draw(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth noise: what a resize makes of it differs everywhere."""
    generator = np.random.default_rng([seed, width, height])
    coarse = generator.integers(0, 256, (5, 7, 3), dtype=np.uint8)
    picture = Image.fromarray(coarse)
    return picture.resize((width, height), Image.Resampling.BICUBIC)


def as_tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).movedim(-1, 0)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of files in the calls of a torchvision that is in fact Pillow."""
    calls: list[int] = []

    def decode_jpeg(
        files: Sequence[Tensor], *, mode: str, device: torch.device
    ) -> list[Tensor]:
        calls.append(len(files))
        contents = [file.numpy().tobytes() for file in files]
        if any(b"refuse" in data for data in contents):
            raise RuntimeError("decode_jpeg: nvjpegDecode failed: 5")
        return [as_tensor(Image.open(BytesIO(data)).convert(mode)) for data in contents]

    io = ModuleType("torchvision.io")
    vars(io).update(decode_jpeg=decode_jpeg, ImageReadMode=SimpleNamespace(RGB="RGB"))
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.io", io)
    return calls


@pytest.mark.parametrize("resize", ["shorter", "squash"])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("rounding", ["round", "floor"])
@pytest.mark.parametrize(
    ("width", "height"), [(32, 32), (90, 61), (47, 200), (20, 33), (400, 31)]
)
def test_pictures_are_those_of_pillow(
    resize: Any, interpolation: Any, rounding: Any, width: int, height: int
) -> None:
    preprocess = Preprocess(
        32,
        interpolation=interpolation,
        resize=resize,
        crop_rounding=rounding,
    )
    image = draw(width, height)
    expected = np.asarray(preprocess.picture(image)).astype(int)
    made = resize_and_crop(as_tensor(image), preprocess).numpy().astype(int)
    assert made.shape == (32, 32, 3)
    assert np.abs(made - expected).max() <= LEVELS


@pytest.mark.parametrize("orientation", range(10))
def test_orientations_are_those_of_pillow(orientation: int) -> None:
    data = jpeg(draw(40, 30), exif=exif_of(orientation))
    assert read_jpeg(data) == (data, orientation)
    assert read_jpeg(data, exif=False) == (data, 1)
    plain = Image.open(BytesIO(data))
    expected = as_tensor(ImageOps.exif_transpose(plain))
    assert torch.equal(turn(as_tensor(plain), orientation), expected)


@pytest.mark.parametrize(
    "data",
    [
        jpeg(draw(40, 30)),
        jpeg(draw(40, 30).convert("L")),
        jpeg(draw(40, 30), progressive=True),
        jpeg(draw(40, 30)) + bytes(9),
    ],
    ids=["colours", "grey", "progressive", "zeros behind its end"],
)
def test_what_nvjpeg_reads_like_pillow_is_left_to_it(data: bytes) -> None:
    assert read_jpeg(data)


@pytest.mark.parametrize(
    "data",
    [
        saved(draw(40, 30), "PNG"),
        b"no picture",
        jpeg(draw(40, 30))[:-40],
        jpeg(draw(40, 30).convert("CMYK")),
        jpeg(draw(40, 30), keep_rgb=True),
        jpeg(draw(40, 30).resize((3000, 2))),
    ],
    ids=["PNG", "no picture", "cut off", "CMYK", "stored as RGB", "very long"],
)
def test_what_nvjpeg_would_read_otherwise_is_left_to_pillow(data: bytes) -> None:
    assert read_jpeg(data) is None


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Photographs, one turned and one grey; a CMYK, a PNG, two broken files, one missing."""
    photographs = [jpeg(draw(40 + 9 * n, 90 - 5 * n, n)) for n in range(6)]
    contents = [
        *photographs,
        jpeg(draw(70, 40), exif=exif_of(6)),
        jpeg(draw(50, 60).convert("L")),
        jpeg(draw(50, 60).convert("CMYK")),
        photographs[0][:-40],
        b"no picture",
    ]
    for number, data in enumerate(contents):
        (tmp_path / f"{number:02d}.jpg").write_bytes(data)
    draw(64, 48).save(tmp_path / "11.png")

    missing = tmp_path / "12.jpg"
    return [str(path) for path in [*sorted(tmp_path.iterdir()), missing]]


def load(paths: Sequence[str], decoder: JpegDecoder | None, workers: int) -> list[Any]:
    """The batches of five files each: positions, bytes, errors."""
    entries = [Entry(path, {}) for path in paths]
    batches = [entries[first : first + 5] for first in range(0, len(entries), 5)]
    loader = Loader(
        partial(find_listed, shorter=None),
        preprocess=Preprocess(32),
        views=(None,),
        seed=0,
        workers=workers,
        device=None,
        local=False,
        decoder=decoder,
    )
    result = []
    for loaded in loader.load(batches, len(entries)):
        positions = list(loaded.positions)
        result.append((positions, loaded.images[0], list(loaded.unreadable)))
    return result


@pytest.mark.parametrize("workers", [0, 3])
def test_batches_are_those_of_exact_decoding(
    files: list[str], decoded: list[int], workers: int
) -> None:
    exact = load(files, None, workers)
    assert not decoded
    by_gpu = load(files, JpegDecoder(Preprocess(32), CPU), workers)
    assert sum(decoded) == 8  # six photographs, the turned and the grey one
    assert len(exact) == 3
    for (positions, pixels, errors), batch in zip(exact, by_gpu, strict=True):
        gpu_positions, gpu_pixels, gpu_errors = batch
        assert gpu_positions == positions
        assert gpu_errors == errors
        assert (pixels.int() - gpu_pixels.int()).abs().max() <= LEVELS

    # the cut off file, the one that is no picture, and the missing one
    unreadable = []
    for _, _, errors in exact:
        unreadable.append([position for position, _ in errors])
    assert unreadable == [[], [4], [0, 2]]


def test_a_refused_batch_is_decoded_by_pillow(
    decoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = jpeg(draw(40, 30))
    turned = jpeg(draw(50, 40), exif=exif_of(3))
    damaged = good[:20] + bytes(380) + good[400:]
    files = {
        4: Jpeg(good),
        5: Jpeg(damaged),
        9: Jpeg(turned + b"refuse", 3),  # at which the decoder fails
    }
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", False)
    preprocess = Preprocess(32)
    pictures, unreadable = JpegDecoder(preprocess, CPU).pictures(files)
    assert sorted(pictures) == [4, 9]
    for number, data in ((4, good), (9, turned)):
        expected = preprocess.picture(open_image(data))
        assert np.array_equal(pictures[number], np.asarray(expected))

    with pytest.raises(ImageError) as error:
        open_image(damaged)
    assert unreadable == [(5, error.value.reason)]


def test_what_is_missing_is_named(
    files: list[str], tiny_clip: CLIP, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="--device cuda"):
        predict(files, TINY_NAMES, model=tiny_clip, decode="gpu")
    with pytest.raises(UserError, match="--ray"):
        predict(files, TINY_NAMES, model=tiny_clip, decode="gpu", cluster=RayCluster())
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(UserError, match=r"cliquetta\[gpu-decode\]"):
        JpegDecoder(Preprocess(32), torch.device("cuda")).check()
    with pytest.raises(UserError, match="lanczos"):
        JpegDecoder(
            Preprocess(32, interpolation="lanczos"), torch.device("cuda")
        ).check()
