"""Models that are held in memory: shared weights, equal logits, honest capabilities."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from torch import Tensor, nn

from cliquetta import create_method, from_model
from cliquetta.errors import UserError
from cliquetta.model.checkpoints.local import save_model
from cliquetta.model.clip import MissingCapabilityError
from cliquetta.model.in_memory import RowTokenizer, WrappedCLIP, preprocess_from
from cliquetta.model.preprocess import Preprocess
from cliquetta.model.tokenizer import Tokenizer
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch
from tests._helpers.openai_module import OpenAIModule
from tests._helpers.tolerance import FEATURE, LOGIT, SUM
from tests._helpers.transformers_models import assert_features, tiny_siglip, tiny_transformers

pytest.importorskip("transformers", minversion="5")

PROMPTS = ClassPrompts(("cat", "frog", "truck"), ("a photo of a {}",))


@torch.no_grad()
@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("build", [tiny_transformers, tiny_siglip])
def test_models_of_transformers_become_ours(build: Any, pixels: Tensor, words: Any) -> None:
    theirs, is_siglip = build(), build is tiny_siglip
    ours = from_model(theirs, tokenizer=words if is_siglip else None)
    assert not isinstance(ours, WrappedCLIP) and "visual-prefix" in ours.capabilities
    assert (ours.config.sigmoid, ours.config.text.start_tokens) == (is_siglip, not is_siglip)
    assert ours.preprocess.resize == ("squash" if is_siglip else "shorter")
    texts = PROMPTS.texts(PROMPTS.templates[0])
    ids = ours.tokenizer(texts)
    if is_siglip:
        ids = words(texts, padding="max_length", max_length=64, return_tensors="pt").input_ids
    wanted = theirs(input_ids=ids, pixel_values=pixels).logits_per_image
    logits = create_method("zero_shot", ours, PROMPTS).predict(Batch(pixels)).logits
    assert_features(logits, wanted, LOGIT)


def test_another_vocabulary_costs_no_capability() -> None:
    theirs = tiny_transformers()
    theirs.text_model.embeddings.token_embedding = nn.Embedding(60_000, 64)
    theirs.config.text_config.vocab_size = 60_000
    assert from_model(theirs).capabilities == from_model(tiny_transformers()).capabilities


def test_weights_are_shared_and_theirs_stay_trainable() -> None:
    theirs = tiny_transformers().train()
    theirs.text_model.eval()
    ours = from_model(theirs)
    assert (theirs.training, theirs.text_model.training, ours.training) == (True, False, False)
    tower, vision = ours.require_vit(), theirs.vision_model
    for shared, own in (
        (tower.patch.weight, vision.embeddings.patch_embedding.weight),
        (tower.block(1).fc.weight, vision.encoder.layers[1].mlp.fc1.weight),
        (tower.projection, theirs.visual_projection.weight),
        (ours.text.tokens.weight, theirs.text_model.embeddings.token_embedding.weight),
    ):
        assert shared.data_ptr() == own.data_ptr()
        assert own.requires_grad and not shared.requires_grad


@torch.no_grad()
def test_half_precision_stays(pixels: Tensor) -> None:
    theirs = tiny_transformers().bfloat16()
    ours = from_model(theirs)
    assert not ours.is_wrapped and ours.dtype == torch.bfloat16
    assert ours.logit_scale.dtype == torch.float32
    wanted = theirs.get_image_features(pixel_values=pixels.bfloat16()).pooler_output.float()
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
    assert not ours.is_wrapped and ours.config.vision.activation == "quick_gelu"
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
    torch.testing.assert_close(ours.encode_image(pixels), theirs.get_image_features(pixels))


class Convolutions(nn.Module):
    """An image tower of two convolutions with a LayerNorm in between, and a bag of words."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 16, 8, 8)
        self.norm = ChannelNorm(16) if norm else nn.Identity()
        self.head = nn.Linear(16, 12)
        self.words = nn.Embedding(64, 12)
        self.text_norm = nn.LayerNorm(12)
        self.logit_scale = nn.Parameter(torch.tensor(10.0).log())

    def encode_image(self, pixels: Tensor) -> Any:
        return self.head(self.norm(self.stem(pixels)).mean(dim=(2, 3)))

    def encode_text(self, ids: Any) -> Any:
        return self.text_norm(self.words(ids).mean(dim=1))


class ChannelNorm(nn.LayerNorm):
    """Over channels that come first, as in ConvNeXt: not the forward pass of its base class."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def test_a_wrapped_model_has_what_it_has(pixels: Tensor, words: Any) -> None:
    theirs = Convolutions().eval()
    ours = from_model(theirs, preprocess=Preprocess(32), tokenizer=words, id="conv")
    assert ours.is_wrapped and ours.capabilities == {"text", "norm"}
    assert (ours.embed_dim, ours.id, ours.bias) == (12, "conv", 0)
    assert ours.scale == pytest.approx(10)
    logits = create_method("zero_shot", ours, PROMPTS).predict(Batch(pixels)).logits
    ids = ours.tokenizer(PROMPTS.texts(PROMPTS.templates[0]))
    images, texts = map(F.normalize, (theirs.encode_image(pixels), theirs.encode_text(ids)))
    torch.testing.assert_close(logits, (10 * images @ texts.T).detach(), atol=LOGIT, rtol=FEATURE)
    for method in ("tda", "mta", "transclip"):
        adapter = create_method(method, ours, PROMPTS)
        images = [np.zeros((32, 32, 3), np.uint8) + 40 * i for i in range(4)]  # type: ignore[assignment]
        assert adapter.predict(images).logits.isfinite().all()
    with pytest.raises(MissingCapabilityError):
        create_method("domain_norm", ours, PROMPTS)
    with pytest.raises(MissingCapabilityError):
        create_method("tpt", ours, PROMPTS)
    with pytest.raises(UserError, match="wrapped"):
        save_model(ours, "nowhere.safetensors")


def test_tent_learns_the_layernorms_of_a_wrapped_image_tower(pixels: Tensor, words: Any) -> None:
    theirs = Convolutions().eval()
    before = copy.deepcopy(theirs.state_dict())
    ours = from_model(theirs, preprocess=Preprocess(32), tokenizer=words)
    adapter: Any = create_method("tent", ours, PROMPTS)
    assert adapter.tower.start.numel() == 2 * 16
    first, second = (adapter.predict(Batch(pixels)).logits for _ in range(2))
    # One step of Adam by hand on a copy of the module gives what the second batch sees.
    copied = Convolutions()
    copied.load_state_dict(before)
    values: list[Any] = [copied.norm.weight, copied.norm.bias]
    texts = F.normalize(ours.encode_text(PROMPTS.texts(PROMPTS.templates[0])))

    def logits() -> Any:
        return 10 * F.normalize(copied.encode_image(pixels)) @ texts.detach().T

    torch.testing.assert_close(first, logits().detach(), atol=FEATURE, rtol=FEATURE)
    p = logits().softmax(dim=1)
    loss = -(p * p.log()).sum(dim=1).mean()
    gradients = torch.autograd.grad(loss, values)
    with torch.no_grad():
        for value, gradient in zip(values, gradients, strict=True):
            value -= 1e-3 * gradient / (gradient.abs() + 1e-8)
    torch.testing.assert_close(second, logits().detach(), atol=LOGIT, rtol=LOGIT)
    assert (first - second).abs().max() > 1e-5
    torch.testing.assert_close(theirs.state_dict(), before, rtol=0, atol=0)


def test_a_wrapped_model_without_norms_or_tokenizer(pixels: Tensor) -> None:
    theirs = Convolutions(norm=False)
    with pytest.warns(UserWarning, match="training"):
        ours = from_model(theirs, preprocess=Preprocess(32))
    assert not theirs.training and ours.capabilities == frozenset()
    with pytest.raises(MissingCapabilityError, match="tokenizer"):
        create_method("zero_shot", ours, PROMPTS)
    fixed = ClassPrompts(("x", "y"), features=torch.randn(2, 12))
    assert create_method("zero_shot", ours, fixed).predict(Batch(pixels)).logits.shape == (3, 2)


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
)
def test_models_and_options_that_do_not_fit_are_refused(build: Any, options: Any) -> None:
    with pytest.raises(UserError) as error:
        from_model(build(), **options)
    assert "\n" not in str(error.value)


def test_rows_of_another_tokenizer(words: Any) -> None:
    rows = RowTokenizer(words, 64, 64)
    assert rows.encode("the cat") == [14, 9] and rows.pad == 0
    same = RowTokenizer(Tokenizer(77), 77, 49408)
    assert (same.prefix, same.suffix) == ((49406,), (49407,))
    assert same.encode("a photo") == Tokenizer(77).encode("a photo")
    assert isinstance(same.simplest(), Tokenizer)
    with pytest.raises(UserError, match="65 tokens"):
        rows(["cat " * 65])


@pytest.mark.parametrize("resample", [2, 3])
@pytest.mark.parametrize("kind", ["CLIPImageProcessorPil", "SiglipImageProcessorPil"])
def test_image_processors(kind: str, resample: int) -> None:
    size = {"shortest_edge": 48} if kind.startswith("CLIP") else {"height": 48, "width": 48}
    options = {"crop_size": {"height": 48, "width": 48}} if kind.startswith("CLIP") else {}
    processor = getattr(transformers, kind)(size=size, resample=resample, **options)
    ours = preprocess_from(processor)
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (80, 61, 3), dtype=np.uint8))
    wanted = processor(image, return_tensors="pt").pixel_values[0]
    torch.testing.assert_close(ours(image), wanted, atol=SUM, rtol=0)
