"""Frozen methods against the methods themselves, and their files against them in other runtimes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.export import export_model
from cliquetta.methods.building.base import Adapter
from cliquetta.methods.building.frozen import FrozenAdapter
from cliquetta.methods.building.layernorm import LateBlocks, LayerNormTower
from cliquetta.methods.building.registry import (
    create_method,
    get_method,
    method_entries,
)
from cliquetta.methods.domain_norm import DomainNorm, DomainNormConfig
from cliquetta.methods.domain_norm.prior import class_prior
from cliquetta.model.clip import CLIP, l2_normalize
from cliquetta.model.in_memory import from_model
from cliquetta.model.preprocess import Preprocess
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch
from tests._helpers.building import build_adapter
from tests._helpers.scenes import NAMES, build_model, make_batches
from tests._helpers.tolerance import (
    BLOCK_STORES,
    FEATURE,
    LOGIT,
    SUM,
    TINY_SCALE,
    rounding,
)
from tests._helpers.transformers_models import tiny_siglip

BEFORE_STEP = (
    "zero_shot",
    "tent",
    "deyo",
    "sar",
    "batclip",
    "coop",
    "maple",
    "tip_adapter",
)
"""Methods that predict with what they learned from earlier batches."""
EXPORTABLE = (*BEFORE_STEP, "tip_adapter_f", "cliptta", "subtta", "domain_norm")


def learned(name: str, model: CLIP, prompts: ClassPrompts, images: Tensor) -> Adapter:
    """A method that has seen some batches."""
    adapter = build_adapter(get_method(name), model, prompts)
    if name == "domain_norm":  # defaults would wait for 64 images
        adapter = DomainNorm(model, prompts, DomainNormConfig(window=5))
    for rows in (slice(0, 5), slice(5, 10)):
        adapter.predict(Batch(images[rows]))
    return adapter


def run_onnx(path: Path, pixels: Tensor) -> Tensor:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(["logits"], {"pixels": pixels.numpy()})[0])


@pytest.mark.parametrize("entry", method_entries(), ids=lambda entry: entry.name)
def test_every_method_is_frozen_as_a_function_of_one_image_or_refuses(
    entry: Any, tiny_clip: CLIP, tiny_prompts: ClassPrompts, tiny_images: Tensor
) -> None:
    adapter = build_adapter(entry, tiny_clip, tiny_prompts)
    if entry.name not in EXPORTABLE:
        with pytest.raises(UserError, match="nothing"):
            adapter.frozen_model()
        return
    adapter = learned(entry.name, tiny_clip, tiny_prompts, tiny_images)
    frozen = FrozenAdapter(adapter)
    together = frozen.predict(Batch(tiny_images)).logits
    alone = torch.cat(
        [frozen.predict(Batch(image[None])).logits for image in tiny_images]
    )
    torch.testing.assert_close(together, alone, atol=FEATURE, rtol=0)
    following = adapter.predict(Batch(tiny_images)).logits
    if entry.name in BEFORE_STEP:
        torch.testing.assert_close(together, following, atol=FEATURE, rtol=0)
    # and they stay, whatever the method has learned since
    assert frozen.predict(Batch(tiny_images)).logits.equal(together)


def domain_norm(**options: Any) -> tuple[DomainNorm, Tensor]:
    """``domain_norm`` after some batches, and images that it has not seen."""
    config = replace(DomainNormConfig(window=8), **options)
    adapter = DomainNorm(build_model(0), ClassPrompts(NAMES), config)
    *batches, fresh = make_batches(4, 5, 8)
    for batch in batches:
        adapter.predict(Batch(batch))
    assert max(int(domain.norms.steps) for domain in adapter.state.domains) > 0
    return adapter, fresh


def test_frozen_domain_is_the_next_single_image_of_the_method() -> None:
    # with all classes equally frequent, since counting the image itself moves their
    # frequencies
    adapter, fresh = domain_norm(prior="uniform", domains=1)
    frozen = adapter.frozen_model()
    state = adapter.state_dict()
    for image in fresh:
        adapter.load_state_dict(state)
        expected = adapter.predict(Batch(image[None])).logits
        torch.testing.assert_close(
            frozen(image[None]).float(), expected, atol=FEATURE, rtol=0
        )


def test_frozen_domain_weighs_as_written() -> None:
    """Eq. 13 without a burst: the softmax at the domain's temperature, times the class prior."""
    adapter, fresh = domain_norm()
    network = adapter.network
    domain = adapter.state.in_use()
    assert float(domain.temperature) != 1
    prior = class_prior(domain.counts, replace(adapter.config, recent_images=0.0)).prior
    tower = LayerNormTower(LateBlocks(network.tower, network.start), precise=False)
    actual = adapter.frozen_model()(fresh)
    for image, logits in zip(fresh, actual, strict=True):
        hidden = network.tower.run(network.tower.embed(image[None]), 0, network.start)
        feature = l2_normalize(tower(domain.norms.values, hidden))[0]
        scaled = network.scale * network.text @ feature / domain.temperature
        weighed = scaled.softmax(dim=0) * prior
        expected = (weighed / weighed.sum()).log()
        torch.testing.assert_close(logits, expected, atol=FEATURE, rtol=0)


def test_fresh_domain_is_zero_shot() -> None:
    model = build_model(0)
    images = make_batches(4, 1, 8)[0]
    plain, fresh = (
        create_method(name, model, NAMES).frozen_model()(images).softmax(dim=-1)
        for name in ("zero_shot", "domain_norm")
    )
    torch.testing.assert_close(fresh, plain, atol=SUM, rtol=0)


@pytest.mark.parametrize(
    "name",
    [
        "domain_norm",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("tent", "maple", "tip_adapter")
        ),
    ],
)
def test_onnxruntime_gives_the_frozen_logits(
    name: str,
    tmp_path: Path,
    tiny_clip: CLIP,
    tiny_prompts: ClassPrompts,
    tiny_images: Tensor,
) -> None:
    adapter = learned(name, tiny_clip, tiny_prompts, tiny_images)
    path = tmp_path / "model.onnx"
    written = export_model(adapter, path)
    expected = FrozenAdapter(adapter).predict(Batch(tiny_images)).logits
    for count in (1, 7, 10):
        actual = run_onnx(path, tiny_images[:count])
        torch.testing.assert_close(actual, expected[:count], atol=LOGIT, rtol=0)
    model = onnx.load(path)
    onnx.checker.check_model(model)
    facts = {entry.key: entry.value for entry in model.metadata_props}
    assert json.loads(facts["classes"]) == list(tiny_prompts.names)
    assert json.loads(facts["preprocess"]) == tiny_clip.preprocess.to_dict()
    assert facts["method"] == name and facts["precision"] == "float32"
    assert (
        written.opset == model.opset_import[0].version
        and written.bytes == path.stat().st_size
    )
    text = {
        entry.name: onnx.numpy_helper.to_array(entry)
        for entry in model.graph.initializer
    }
    np.testing.assert_array_equal(text["text"], adapter.frozen_model().text.numpy())


@pytest.mark.slow
def test_half_precision_is_stored_and_leaves_the_model_as_it_is(
    tmp_path: Path, tiny_clip: CLIP, tiny_prompts: ClassPrompts, tiny_images: Tensor
) -> None:
    adapter = learned("domain_norm", tiny_clip, tiny_prompts, tiny_images)
    path = tmp_path / "model.onnx"
    assert export_model(adapter, path, half=True).bytes == path.stat().st_size
    weights = sorted(
        onnx.load(path).graph.initializer, key=lambda entry: np.prod(entry.dims)
    )
    assert {entry.data_type for entry in weights[-4:]} == {onnx.TensorProto.FLOAT16}
    assert adapter.model.dtype == torch.float32  # the tower was copied, not changed
    actual = run_onnx(path, tiny_images)
    half = (
        rounding(torch.float16, 2 * BLOCK_STORES, TINY_SCALE) / 2
    )  # one side is float32
    torch.testing.assert_close(
        actual, adapter.frozen_model()(tiny_images), atol=half, rtol=0
    )


def test_sigmoid_models_keep_their_bias() -> None:
    model = from_model(tiny_siglip(), preprocess=Preprocess.openai(32))
    names = ("cat", "dog", "frog")
    adapter = create_method(
        "zero_shot", model, ClassPrompts(names, features=torch.eye(3, 64))
    )
    pixels = torch.randn(2, 3, model.image_size, model.image_size)
    expected = adapter.predict(Batch(pixels)).logits
    torch.testing.assert_close(
        adapter.frozen_model()(pixels), expected, atol=LOGIT, rtol=0
    )


def test_a_model_beyond_protobuf_is_refused_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_clip: CLIP
) -> None:
    monkeypatch.setattr("cliquetta.export.LARGEST_ONNX", 1000)
    with pytest.raises(UserError, match="--half"):
        export_model(create_method("zero_shot", tiny_clip, NAMES), tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())
