"""Models that are held in memory: shared weights, equal logits, honest capabilities."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from cliquetta import create_method, from_model
from cliquetta.errors import UserError
from cliquetta.model.preprocess import Preprocess
from cliquetta.model.tokenizer import Tokenizer
from cliquetta.model.wrapped import WrappedCLIP
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch
from tests._helpers.convolutions import Convolutions
from tests._helpers.openai_module import OpenAIModule
from tests._helpers.tolerance import LOGIT
from tests._helpers.transformers_models import (
    assert_features,
    tiny_siglip,
    tiny_transformers,
)

pytest.importorskip("transformers", minversion="5")

PROMPTS = ClassPrompts(("cat", "frog", "truck"), ("a photo of a {}",))


@torch.no_grad()
@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("build", [tiny_transformers, tiny_siglip])
def test_models_of_transformers_become_ours(
    build: Any, pixels: Tensor, words: Any
) -> None:
    theirs = build()
    is_siglip = build is tiny_siglip
    ours = from_model(theirs, tokenizer=words if is_siglip else None)
    assert not isinstance(ours, WrappedCLIP)
    assert "visual-prefix" in ours.capabilities
    assert ours.config.sigmoid == is_siglip
    assert ours.config.text.start_tokens == (not is_siglip)
    assert ours.preprocess.resize == ("squash" if is_siglip else "shorter")

    texts = PROMPTS.texts(PROMPTS.templates[0])
    ids = ours.tokenizer(texts)
    if is_siglip:
        ids = words(
            texts,
            padding="max_length",
            max_length=64,
            return_tensors="pt",
        ).input_ids
    wanted = theirs(input_ids=ids, pixel_values=pixels).logits_per_image
    adapter = create_method("zero_shot", ours, PROMPTS)
    logits = adapter.predict(Batch(pixels)).logits
    assert_features(logits, wanted, LOGIT)


def test_another_vocabulary_costs_no_capability() -> None:
    theirs = tiny_transformers()
    theirs.text_model.embeddings.token_embedding = nn.Embedding(60_000, 64)
    theirs.config.text_config.vocab_size = 60_000
    usual = from_model(tiny_transformers())
    assert from_model(theirs).capabilities == usual.capabilities


def test_weights_are_shared_and_theirs_stay_trainable() -> None:
    theirs = tiny_transformers().train()
    theirs.text_model.eval()
    ours = from_model(theirs)
    assert theirs.training
    assert not theirs.text_model.training
    assert not ours.training

    tower = ours.require_vit()
    vision = theirs.vision_model
    for shared, own in (
        (tower.patch.weight, vision.embeddings.patch_embedding.weight),
        (tower.block(1).fc.weight, vision.encoder.layers[1].mlp.fc1.weight),
        (tower.projection, theirs.visual_projection.weight),
        (ours.text.tokens.weight, theirs.text_model.embeddings.token_embedding.weight),
    ):
        assert shared.data_ptr() == own.data_ptr()
        assert own.requires_grad
        assert not shared.requires_grad


@torch.no_grad()
def test_half_precision_stays(pixels: Tensor) -> None:
    theirs = tiny_transformers().bfloat16()
    ours = from_model(theirs)
    assert not ours.is_wrapped
    assert ours.dtype == torch.bfloat16
    assert ours.logit_scale.dtype == torch.float32
    wanted = theirs.get_image_features(
        pixel_values=pixels.bfloat16()
    ).pooler_output.float()
    cosine = torch.nn.functional.cosine_similarity(ours.encode_image(pixels), wanted)
    assert cosine.min() > 0.99


@pytest.mark.filterwarnings("error::UserWarning")
def test_openais_module_becomes_ours(pixels: Tensor) -> None:
    class WithFunctions(OpenAIModule):
        def encode_image(self, x: Tensor) -> Any:
            return self.visual(x)

        def encode_text(self, ids: Any) -> Any:
            return self(torch.zeros(1, 3, 32, 32), ids)[1]

    theirs = WithFunctions()
    ours = from_model(theirs)
    assert not ours.is_wrapped
    assert ours.config.vision.activation == "quick_gelu"
    assert_features(ours.encode_image(pixels), theirs.visual(pixels))
    assert from_model(ours) is ours


def test_a_model_that_computes_something_else_is_wrapped(pixels: Tensor) -> None:
    """The weights of a CLIP, but another forward pass: the comparison finds out."""

    class Halved(transformers.CLIPModel):
        def get_image_features(self, pixel_values: Any) -> Any:
            return super().get_image_features(pixel_values).pooler_output.flip(1)

    theirs = Halved(tiny_transformers().config).eval()
    with pytest.warns(UserWarning, match="wrapped"):
        ours = from_model(theirs, preprocess=Preprocess(32))
    assert ours.is_wrapped
    torch.testing.assert_close(
        ours.encode_image(pixels), theirs.get_image_features(pixels)
    )


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (lambda: nn.Linear(2, 2), {}),
        (Convolutions, {}),
        (Convolutions, {"preprocess": object()}),
        (Convolutions, {"preprocess": Preprocess(4)}),
        (tiny_transformers, {"preprocess": Preprocess(64)}),
        (tiny_siglip, {"tokenizer": Tokenizer(64)}),
        (tiny_siglip, {"tokenizer": lambda texts: [1]}),
    ],
    ids=[
        "no image tower",
        "no preprocessing",
        "preprocessing of another kind",
        "convolutions at another size",
        "positions at another size",
        "a tokenizer of another length",
        "a tokenizer without rows",
    ],
)
def test_models_and_options_that_do_not_fit_are_refused(
    build: Any, options: Any
) -> None:
    with pytest.raises(UserError) as error:
        from_model(build(), **options)
    assert "\n" not in str(error.value)
