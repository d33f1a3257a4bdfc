"""SigLIP: our towers, tokens and logits against ``transformers.SiglipModel``."""

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from cliquetta import from_model
from cliquetta.errors import UserError
from cliquetta.methods.building.base import Adapter
from cliquetta.methods.building.fit import fit_method
from cliquetta.methods.building.registry import create_method, get_method
from cliquetta.model.attention import prompted_maps
from cliquetta.model.checkpoints.local import save_model
from cliquetta.model.checkpoints.state import CheckpointError
from cliquetta.model.clip import CAPABILITIES
from cliquetta.model.factory import create_model
from cliquetta.model.processors import preprocess_from
from cliquetta.model.tokenizer import PretrainedTokenizer
from cliquetta.model.vision import TokenPrompts
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch
from tests._helpers.separable import TWO, make_examples
from tests._helpers.tolerance import FEATURE
from tests._helpers.transformers_models import (
    assert_features,
    rewrite,
    save_siglip,
    tiny_siglip,
    word_tokenizer,
)

pytest.importorskip("transformers", minversion="5")

NAMES = ("airplane", "cat", "frog", "ship", "truck")
close = partial(assert_features, atol=1e-5)
TEXTS = ["a photo of a cat", "the frog", "a sketch of a green truck"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Any:
    theirs = tiny_siglip()
    folder = save_siglip(theirs, tmp_path_factory.mktemp("siglip"))
    return create_model(f"hf:{folder}"), theirs


@torch.no_grad()
@pytest.mark.parametrize("position", ["after-class", "end"])
def test_prompt_tokens_stand_beside_the_patches(
    pair: Any, pixels: Tensor, position: Any
) -> None:
    ours, theirs = pair
    vision = theirs.vision_model
    prompt = torch.randn(2, 64, generator=torch.Generator().manual_seed(3))
    actual = ours.encode_image(pixels, tokens=TokenPrompts([prompt], position))

    patches = vision.embeddings(pixels)
    tokens = prompt.expand(3, -1, -1)
    both = [tokens, patches] if position == "after-class" else [patches, tokens]
    states = vision.encoder(torch.cat(both, dim=1)).last_hidden_state
    expected = vision.head(vision.post_layernorm(states))
    close(actual, expected)

    plain = ours.encode_image(pixels)
    assert (actual - plain).abs().max() > 1e-3


def test_gradients_of_text_context(pair: Any) -> None:
    ours, theirs = (copy.deepcopy(model).double() for model in pair)
    context = ours.context("a photo of a")
    our_context = context.clone().requires_grad_()
    actual = ours.encode_text(["a photo of a frog"], context=our_context)

    # theirs, in whose tokens the context replaces the first four
    text = theirs.text_model
    their_context = context.clone().requires_grad_()
    ids = ours.tokenizer(["a photo of a frog"])
    embedded = text.embeddings.token_embedding(ids)
    embedded = torch.cat([their_context[None], embedded[:, 4:]], dim=1)
    states = embedded + text.embeddings.position_embedding.weight
    states = text.encoder(states).last_hidden_state
    expected = text.head(text.final_layer_norm(states)[:, -1])
    close(actual, expected)

    weights = torch.randn(actual.shape, generator=torch.Generator().manual_seed(4))
    (our_gradient,) = torch.autograd.grad((actual * weights).sum(), our_context)
    (their_gradient,) = torch.autograd.grad((expected * weights).sum(), their_context)
    torch.testing.assert_close(our_gradient, their_gradient, atol=FEATURE, rtol=FEATURE)


METHODS = "scap domain_norm tent tpt ctpt dart batclip clipartt watt tda dmn mta transclip zero"


@pytest.mark.parametrize("method", METHODS.split())
def test_methods_run(pair: Any, method: str) -> None:
    model, _ = pair
    prompts = ClassPrompts(NAMES, ("a photo of a {}", "a sketch of a {}"))
    adapter = create_method(method, model, prompts)
    generator = torch.Generator().manual_seed(5)
    for _ in range(2):
        batch = torch.randn(4, 3, 32, 32, generator=generator)
        logits = adapter.predict(batch).logits
        assert logits.shape == (4, 5)
        assert logits.isfinite().all()


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("coop", {"context_init": "a photo of a", "epochs": 20, "lr": 0.1}),
        (
            "coop",
            {"context_length": 3, "class_position": "middle", "epochs": 20, "lr": 0.1},
        ),
        ("cocoop", {"epochs": 20, "lr": 0.05, "batch_size": 4}),
        ("maple", {"epochs": 10, "lr": 0.05}),
        ("tip_adapter", {}),
    ],
)
def test_few_shot_methods_learn(
    tmp_path: Path, method: str, options: dict[str, Any]
) -> None:
    model = create_model(save_siglip(tiny_siglip(sharpness=3), tmp_path))
    config = replace(get_method(method).config(), crop_scale=(0.6, 1.0), **options)
    examples = make_examples()
    fitted = fit_method(method, model, TWO, examples, config).fitted

    def loss(adapter: Adapter) -> Tensor:
        logits = adapter.predict(Batch(examples.images)).logits
        return torch.nn.functional.cross_entropy(logits, examples.labels)

    adapter = create_method(method, model, TWO, config, fitted=fitted)
    assert loss(adapter) < 0.998 * loss(create_method("zero_shot", model, TWO))


@torch.no_grad()
def test_attention_maps(pair: Any, pixels: Tensor) -> None:
    model, _ = pair
    tower = model.require_vit()
    # a row with no prompt, and one with both
    prompts = torch.randn(2, 1, 2, 2, 64, generator=torch.Generator().manual_seed(6))
    chosen = torch.tensor([[False, False], [True, True]])
    maps = prompted_maps(tower, pixels[0], prompts, (1,), chosen)
    for actual in maps.values():
        assert actual.shape == (2, 2 + 16)
        torch.testing.assert_close(actual.sum(dim=1), torch.ones(2))
        of_class_token = actual[:, 1]
        assert (of_class_token == 0).all()  # there is none
    assert maps["rollout"][0, 0] == 0
    assert maps["rollout"][1, 0] > 0

    # the pooling head stands behind the three blocks
    attention = tower.attention(pixels[:1], [3])
    head = attention[3].mean(dim=1)[0, 0]
    torch.testing.assert_close(maps["class"][0, 2:], head)


def test_siglip_can_do_everything(pair: Any) -> None:
    model, _ = pair
    assert model.capabilities == CAPABILITIES.keys()


@torch.no_grad()
def test_positions_interpolate_without_a_class_token(pair: Any, tmp_path: Path) -> None:
    folder = save_siglip(tiny_siglip(), tmp_path)
    large = create_model(folder, image_size=64)
    assert large.require_vit().position.shape == (64, 64)
    assert large.encode_image(torch.zeros(1, 3, 64, 64)).shape == (1, 64)


@pytest.mark.parametrize("resample", [2, 3], ids=["bilinear", "bicubic"])
def test_preprocessing_of_a_folder(tmp_path: Path, resample: int) -> None:
    save_siglip(tiny_siglip(), tmp_path)
    processor = transformers.SiglipImageProcessorPil(
        size={"height": 32, "width": 32},
        resample=resample,
    )
    processor.save_pretrained(tmp_path)
    assert create_model(tmp_path).preprocess == preprocess_from(processor)


def test_a_folder_without_preprocessing_has_siglips(tmp_path: Path) -> None:
    save_siglip(tiny_siglip(), tmp_path)
    plain = create_model(tmp_path).preprocess
    assert plain.mean == (0.5, 0.5, 0.5)
    assert plain.std == (0.5, 0.5, 0.5)
    assert plain.resize == "squash"


def test_a_folder_without_its_tokenizer(tmp_path: Path, pixels: Tensor) -> None:
    save_siglip(tiny_siglip(), tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    model = create_model(tmp_path)
    for ours in (model, from_model(tiny_siglip())):
        with pytest.raises(UserError, match="from_model"):
            ours.encode_text(["a cat"])
    prompts = ClassPrompts(("x", "y"), features=torch.randn(2, 64))
    assert create_method("zero_shot", model, prompts).predict(
        Batch(pixels)
    ).logits.shape == (3, 2)


@pytest.mark.parametrize("size", [200, 3000])
def test_a_tokenizer_of_another_vocabulary(size: int, tmp_path: Path) -> None:
    save_siglip(tiny_siglip(vocab_size=size), tmp_path)
    word_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match=f"{size}"):
        create_model(tmp_path)


@pytest.fixture(scope="module")
def sentencepiece_file(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A small SentencePiece model with the special tokens of SigLIP's vocabularies."""
    sentencepiece = pytest.importorskip("sentencepiece")
    path = tmp_path_factory.mktemp("pieces") / "spiece.model"
    texts = [
        f"a {kind} of a {name}" for name in NAMES for kind in ("photo", "big sketch")
    ] * 20
    special = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    how = {"vocab_size": 60, "hard_vocab_limit": False, "minloglevel": 2, **special}
    with path.open("wb") as file:
        train = sentencepiece.SentencePieceTrainer.train
        train(sentence_iterator=iter(texts), model_writer=file, **how)
    return path


def test_sentencepiece_ids_are_those_of_transformers(
    sentencepiece_file: Any, pair: Any
) -> None:
    pytest.importorskip("google.protobuf")
    theirs = transformers.SiglipTokenizer(str(sentencepiece_file))
    ours = PretrainedTokenizer(sentencepiece_file, pair[0].config.text)
    texts = ["A photo, of a cat!", "ship", "a  big (sketch) of a truck.", "zebra"]
    wanted = theirs(
        texts, padding="max_length", max_length=64, return_tensors="pt"
    ).input_ids
    assert torch.equal(ours(texts), wanted)
    assert ours(["ship"])[0, -1] == 1  # padded with the end token
    again = copy.deepcopy(ours)
    assert torch.equal(again(texts), wanted)


@torch.no_grad()
def test_a_folder_with_a_sentencepiece_model(
    sentencepiece_file: Any, tmp_path: Path
) -> None:
    theirs = tiny_siglip()
    theirs.save_pretrained(tmp_path)
    (tmp_path / "spiece.model").write_bytes(sentencepiece_file.read_bytes())
    ours = create_model(tmp_path)
    ids = ours.tokenizer(["a photo of a cat"])
    close(
        ours.encode_text(["a photo of a cat"]),
        theirs.get_text_features(ids).pooler_output,
    )
    (tmp_path / "spiece.model").write_bytes(sentencepiece_file.read_bytes()[:200])
    with pytest.raises(UserError, match="readable"):
        create_model(tmp_path)


def test_an_image_tower_without_its_head(tmp_path: Path) -> None:
    save_siglip(tiny_siglip(), tmp_path)
    rewrite(tmp_path, vision_config__vision_use_head=False)
    with pytest.raises(CheckpointError):
        create_model(tmp_path)


def test_our_own_file_keeps_weights_and_lacks_the_tokenizer(
    pair: Any, tmp_path: Path
) -> None:
    ours, _ = pair
    save_model(ours, tmp_path / "m.safetensors")
    again = create_model(tmp_path / "m.safetensors")
    assert again.fingerprint == ours.fingerprint
    assert again.bias == ours.bias
    with pytest.raises(UserError, match="vocabulary"):
        again.encode_text(["a cat"])
