"""OpenAI's and open_clip's files: read without running code, in the right activation and shape."""

from __future__ import annotations

import io
import json
import os
import pickle
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from cliquetta.errors import UnknownNameError
from cliquetta.model.checkpoints.open_clip_zoo import activation_of, repository
from cliquetta.model.checkpoints.state import CheckpointError
from cliquetta.model.factory import create_model
from tests._helpers.openai_module import OpenAIModule, bare_state
from tests._helpers.tolerance import FEATURE

TEXTS = ["cat", "a photo of a frog", "the ship."]


@pytest.fixture(scope="module")
def module() -> Any:
    return OpenAIModule()


@pytest.fixture(scope="module")
def gelu_module() -> Any:
    return OpenAIModule(activation="gelu")


@pytest.fixture(scope="module")
def pixels() -> Any:
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def archive(module: Any, pixels: Tensor, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A TorchScript archive, as OpenAI publishes its models."""
    path = tmp_path_factory.mktemp("openai") / "model.pt"
    ids = torch.tensor([[49406, 320, 49407]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(module, (pixels[:1], ids), check_trace=False).save(str(path))
    return path


def assert_same(model: Any, module: Any, pixels: Tensor) -> None:
    images, texts = module(pixels, model.tokenizer(TEXTS))
    torch.testing.assert_close(model.encode_image(pixels), images, atol=FEATURE, rtol=FEATURE)
    torch.testing.assert_close(model.encode_text(TEXTS), texts, atol=FEATURE, rtol=FEATURE)
    assert model.scale == pytest.approx(20)


@pytest.fixture
def no_warnings() -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


@pytest.mark.usefixtures("no_warnings")
def test_torchscript_archive(
    archive: Path, module: Any, pixels: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the archive's code must not be loaded")

    monkeypatch.setattr(torch.jit, "load", refuse)
    model = create_model(archive)
    assert_same(model, module, pixels)
    vision = model.config.vision
    assert (vision.width, vision.layers, vision.heads, vision.patch_size) == (128, 2, 2, 8)
    assert vision.activation == "quick_gelu" and vision.image_size == 32
    assert_same(create_model(f"openai:{archive}"), module, pixels)


@pytest.mark.usefixtures("no_warnings")
def test_half_precision_archive_becomes_float32(
    module: Any, pixels: Tensor, tmp_path: Path
) -> None:
    class Wrapped(torch.nn.Module):
        """Only holds what is saved; nothing needs to run in half precision."""

        def __init__(self) -> None:
            super().__init__()
            self.visual = OpenAIModule().half().visual

        def forward(self, x: Tensor) -> Any:
            return x

    torch.jit.trace(Wrapped(), torch.ones(1), check_trace=False).save(str(tmp_path / "half.pt"))
    model = create_model(tmp_path / "half.pt")
    assert model.dtype == torch.float32 and model.text is None
    wanted = OpenAIModule().half().float().visual(pixels)
    torch.testing.assert_close(model.encode_image(pixels), wanted, atol=FEATURE, rtol=FEATURE)


@pytest.mark.usefixtures("no_warnings")
def test_state_dict_with_settings_is_openai(module: Any, pixels: Tensor, tmp_path: Path) -> None:
    torch.save(module.state_dict(), tmp_path / "state.pt")
    assert_same(create_model(tmp_path / "state.pt"), module, pixels)


def test_training_checkpoint(gelu_module: Any, pixels: Tensor, tmp_path: Path) -> None:
    """open_clip's own training files: nested, with a prefix of the parallel wrapper."""
    state = {f"module.{key}": value for key, value in bare_state(gelu_module).items()}
    torch.save({"epoch": 3, "state_dict": state, "optimizer": {"lr": 0.1}}, tmp_path / "e3.pt")
    with pytest.warns(UserWarning, match="QuickGELU is assumed"):
        create_model(tmp_path / "e3.pt")
    assert_same(create_model(tmp_path / "e3.pt", activation="gelu"), gelu_module, pixels)


@pytest.mark.usefixtures("no_warnings")
@pytest.mark.parametrize("custom_text", [False, True])
def test_open_clip_folder(
    gelu_module: Any, pixels: Tensor, tmp_path: Path, custom_text: bool
) -> None:
    state = bare_state(gelu_module)
    if custom_text:
        state = {
            k if k.startswith(("visual.", "logit_scale")) else f"text.{k}": v
            for k, v in state.items()
        }
    save_file(state, tmp_path / "open_clip_model.safetensors")
    config = {
        "model_cfg": {
            "embed_dim": 24,
            "vision_cfg": {"image_size": 32, "layers": 2, "width": 128, "patch_size": 8},
            "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 1},
        },
        "preprocess_cfg": {
            "mean": [0.5, 0.5, 0.5],
            "std": [0.2, 0.2, 0.2],
            "resize_mode": "squash",
        },
    }
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    model = create_model(tmp_path)
    assert_same(model, gelu_module, pixels)
    assert model.preprocess.mean == (0.5, 0.5, 0.5) and model.preprocess.resize == "squash"
    config["model_cfg"]["quick_gelu"] = True
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    assert create_model(tmp_path).config.vision.activation == "quick_gelu"
    config["model_cfg"]["vision_cfg"]["head_width"] = 32
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    assert create_model(tmp_path).config.vision.heads == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_cfg": {"timm_model_name": "vit_base"}}, "vision_cfg.timm_model_name"),
        ({"text_cfg": {"hf_model_name": "roberta-base"}}, "text_cfg.hf_model_name"),
        ({"multimodal_cfg": {"width": 8}}, "model_cfg.multimodal_cfg"),
        ({"embed_dim": 25}, "another shape.*embed_dim = 25"),
    ],
)
def test_open_clip_configs_of_other_models(
    gelu_module: Any, tmp_path: Path, change: Any, message: str
) -> None:
    save_file(bare_state(gelu_module), tmp_path / "open_clip_model.safetensors")
    config = {"model_cfg": {"embed_dim": 24, "vision_cfg": {}, "text_cfg": {}} | change}
    config["model_cfg"]["vision_cfg"] |= {"width": 128}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        create_model(tmp_path)


def test_a_known_architecture_settles_activation_and_checks_the_file(
    gelu_module: Any, tmp_path: Path
) -> None:
    save_file(bare_state(gelu_module), tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match="another shape: ViT-B-16 is 768 wide"):
        create_model(f"open_clip:ViT-B-16/{tmp_path}/w.safetensors")


def test_activation_of_open_clip_releases() -> None:
    assert activation_of("ViT-B-16", "laion2b_s34b_b88k", None) == "gelu"
    assert activation_of("ViT-B-16", "openai", None) == "quick_gelu"
    assert activation_of("ViT-B-16-quickgelu", "laion400m_e32", None) == "quick_gelu"
    assert activation_of("ViT-B-32", "laion400m_e32", None) == "quick_gelu"
    assert activation_of("ViT-L-14", "dfn2b", None) == "quick_gelu"
    assert activation_of("ViT-L-14", "dfn2b_s39b", None) == "gelu"
    assert activation_of("ViT-H-14", None, {"model_cfg": {"quick_gelu": True}}) == "quick_gelu"
    with pytest.raises(UnknownNameError, match="laion2b_s34b_b88k"):
        repository("ViT-B-16", "laion2b_s34b_b8k")


@pytest.mark.usefixtures("no_warnings")
def test_header_or_name_settles_the_activation(module: Any, pixels: Tensor, tmp_path: Path) -> None:
    save_file(bare_state(module), tmp_path / "a.safetensors", metadata={"model": "OpenAI CLIP"})
    assert_same(create_model(tmp_path / "a.safetensors"), module, pixels)
    save_file(bare_state(module), tmp_path / "b-quickgelu.safetensors")
    assert_same(create_model(str(tmp_path / "b*.safetensors")), module, pixels)


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_pickle_that_would_run_code_is_refused(module: Any, tmp_path: Path, legacy: bool) -> None:
    trap = tmp_path / "ran"
    state = dict(bare_state(module)) | {"extra": Payload(trap)}
    torch.save(state, tmp_path / "evil.pt", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(CheckpointError, match=r"refused.*could run code"):
        create_model(tmp_path / "evil.pt")
    assert not trap.exists()
    torch.load(tmp_path / "evil.pt", weights_only=False)
    assert trap.exists()  # the trap works: it is our reader that did not spring it


def test_a_poisoned_torchscript_archive_is_refused(archive: Path, tmp_path: Path) -> None:
    trap = tmp_path / "ran"
    evil = tmp_path / "evil.pt"
    with zipfile.ZipFile(archive) as source, zipfile.ZipFile(evil, "w") as target:
        for name in source.namelist():
            data = pickle.dumps(Payload(trap), protocol=2) if name.endswith("/data.pkl") else None
            target.writestr(name, source.read(name) if data is None else data)
    with pytest.raises(CheckpointError, match=r"refused.*(posix|nt|os).system"):
        create_model(evil)
    assert not trap.exists()


def zipped(pickled: bytes, *, script: bool = False, packing: int = zipfile.ZIP_STORED) -> bytes:
    """A ``.pt`` file whose content is ``pickled``."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", packing) as archive:
        archive.writestr("a/data.pkl", pickled)
        archive.writestr("a/version", "3\n")
        if script:
            archive.writestr("a/constants.pkl", b"\x80\x02).")
    return buffer.getvalue()


def shared_records(levels: int) -> bytes:
    """A module that holds the same module twice, and so on down: 2 ** levels in all."""
    record = b"c__torch__\nX\n)\x81}"
    pickled = b"\x80\x02" + record + b"bq\x00"
    for level in range(levels):
        child = b"h" + bytes([level])
        both = b"X\x01\x00\x00\x00a" + child + b"X\x01\x00\x00\x00b" + child
        pickled += b"0" + record + b"(" + both + b"ubq" + bytes([level + 1])
    return pickled + b"."


def nested_key(levels: int) -> bytes:
    """A dict whose key is a tuple of the same tuple twice, and so on: its hash never ends."""
    pickled = b"\x80\x02}K\x01"
    for _ in range(levels):
        pickled += b"q\x00h\x00\x86"
    return pickled + b"K\x01s."


def stretched() -> bytes:
    """A state dict with one tensor of 4 TB over one number."""
    buffer = io.BytesIO()
    torch.save({"visual.proj": torch.zeros(1).expand(10**6, 10**6)}, buffer)
    return buffer.getvalue()


BOMBS = {
    "modules in modules": zipped(shared_records(60), script=True),
    "module in itself": zipped(
        b"\x80\x02c__torch__\nX\n)\x81q\x00}(X\x01\0\0\0ah\0ub.", script=True
    ),
    "dict in itself": zipped(b"\x80\x02}q\x00X\x05\x00\x00\x00modelh\x00s."),
    "key in a script": zipped(nested_key(60), script=True),
    "key in a state dict": zipped(nested_key(60)),
    "key in a bare pickle": pickle.dumps(0x1950A86A20F9469CFC6C, 2) + nested_key(60),
    "memo of two billion": zipped(b"\x80\x02]r\xff\xff\xff\x7f.", script=True),
    "zeros, compressed": zipped(b"\0" * 10**7, packing=zipfile.ZIP_DEFLATED),
    "tensor over one number": stretched(),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_small_files_that_ask_for_much_are_refused_at_once(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "bomb.pt"
    path.write_bytes(BOMBS[kind])
    assert len(BOMBS[kind]) < 12_000
    with pytest.raises(CheckpointError, match=r"refused|not a readable|no tensors"):
        create_model(path)


def test_views_outside_their_storage_are_refused(tmp_path: Path) -> None:
    """Sizes in the archive are not trusted either."""
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, protocol=2)
    pickler.dump(None)
    body = (
        b"\x80\x02c__torch__\nM\n)\x81}X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n"
        b"((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
        b"K\x04tQK\x00(M\xe8\x03t(K\x01t\x89}tRsb."
    )
    with zipfile.ZipFile(tmp_path / "wide.pt", "w") as target:
        target.writestr("m/data.pkl", body)
        target.writestr("m/constants.pkl", stream.getvalue())
        target.writestr("m/data/0", bytes(16))
    with pytest.raises(CheckpointError, match="not a readable checkpoint"):
        create_model(tmp_path / "wide.pt")


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 broken zip"])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_damaged_files(tmp_path: Path, content: bytes, suffix: str) -> None:
    path = tmp_path / f"broken{suffix}"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"not a readable|refused"):
        create_model(path)


def test_checkpoints_of_another_shape(module: Any, tmp_path: Path) -> None:
    state = bare_state(module)
    state["visual.transformer.resblocks.1.mlp.c_fc.weight"] = torch.zeros(7, 128)
    save_file(state, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"another shape.*fc.weight is \(7, 128\), expected"):
        create_model(tmp_path / "a.safetensors", activation="gelu")
    state = bare_state(module)
    del state["visual.ln_post.bias"]
    save_file(state, tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match=r"ln_post.bias is missing"):
        create_model(tmp_path / "b.safetensors", activation="gelu")
    save_file({"layer.weight": torch.zeros(2, 2)}, tmp_path / "c.safetensors")
    with pytest.raises(CheckpointError, match=r"no image tower of a CLIP.*layer"):
        create_model(tmp_path / "c.safetensors", activation="gelu")
    state = bare_state(module) | {"token_embedding.weight": torch.zeros(1000, 64)}
    save_file(state, tmp_path / "d.safetensors")
    with pytest.raises(CheckpointError, match="1000 words"):
        create_model(tmp_path / "d.safetensors", activation="gelu")


@pytest.mark.parametrize(
    ("key", "what"),
    [
        ("text_decoder.x", "CoCa"),
        ("visual.trunk.blocks.0.w", "timm image tower"),
        ("text.transformer.embeddings.w", "Hugging Face text tower"),
        ("visual.transformer.resblocks.0.ls_1.gamma", "layer scale"),
    ],
)
def test_other_families_are_named(module: Any, tmp_path: Path, key: str, what: str) -> None:
    save_file(bare_state(module) | {key: torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=f"not supported: .*{what}"):
        create_model(tmp_path / "x.safetensors", activation="gelu")


def test_positions_interpolate(module: Any, pixels: Tensor, tmp_path: Path) -> None:
    torch.save(module.state_dict(), tmp_path / "state.pt")
    small = create_model(tmp_path / "state.pt")
    large = create_model(tmp_path / "state.pt", image_size=64)
    assert large.image_size == large.preprocess.size == 64
    assert large.encode_image(torch.zeros(1, 3, 64, 64)).shape == (1, 24)
    a, b = (m.require_vit().position for m in (small, large))
    assert torch.equal(a[0], b[0])  # the class position stays
    for channel in (0, 77):  # Pillow's bicubic, on one channel of the grid as a picture
        picture = Image.fromarray(a[1:, channel].view(4, 4).numpy())
        wanted = np.asarray(picture.resize((8, 8), Image.Resampling.BICUBIC))
        np.testing.assert_allclose(b[1:, channel].view(8, 8).numpy(), wanted, atol=FEATURE)
    same = create_model(tmp_path / "state.pt", image_size=32)
    assert same.fingerprint == small.fingerprint
    with pytest.raises(ValueError, match="multiple of 8"):
        create_model(tmp_path / "state.pt", image_size=60)
