"""CoCoOp against a literal loop over images and classes, and what it is good for."""

from typing import Any

import torch
from torch import Tensor

from cliquetta.methods.cocoop import CoCoOpConfig, cocoop_logits, initial_parameters
from cliquetta.methods.coop import prompt_tokens
from cliquetta.methods.fit import fit_method
from cliquetta.methods.registry import create_method
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch
from tests._helpers.literal_features import cross_entropy, text_feature
from tests._helpers.separable import FULL_IMAGE, make_examples, make_images
from tests._helpers.tiny import build_tiny_clip
from tests._helpers.tiny_world import TINY, TINY_PROMPTS
from tests._helpers.tolerance import DOUBLE, FEATURE, LOGIT, STEP


def literal_logits(
    model: CLIP, prompts: ClassPrompts, learned: dict[str, Tensor], features: Tensor
) -> Tensor:
    tokenizer: Any = model.tokenizer
    embed = model.text.tokens.weight
    rows = []
    for feature in features:
        hidden = (learned["down.weight"] @ feature + learned["down.bias"]).clamp(min=0)
        shift = learned["up.weight"] @ hidden + learned["up.bias"]
        context = [token + shift for token in learned["context"]]
        row = []
        for name in prompts.names:
            own = [embed[i] for i in tokenizer.encode(f"{name}.")]
            sequence = [embed[tokenizer.start], *context, *own, embed[tokenizer.end]]
            row.append(model.scale * feature @ text_feature(model, torch.stack(sequence)))
        rows.append(torch.stack(row))
    return torch.stack(rows)


def test_logits_and_gradients_are_those_of_the_literal_loop() -> None:
    model = build_tiny_clip().double()
    start = initial_parameters(model, CoCoOpConfig(hidden_dim=6), torch.Generator().manual_seed(1))
    fast = {name: value.double().requires_grad_() for name, value in start.items()}
    slow = {name: value.double().requires_grad_() for name, value in start.items()}
    images, labels = make_images(2, seed=0)
    features = model.encode_image(images.double(), normalize=True)
    tokens = prompt_tokens(model, TINY_PROMPTS, len(start["context"]))
    logits = cocoop_logits(model, fast, tokens, features, chunk=7)
    torch.nn.functional.cross_entropy(logits, labels).backward()
    expected = literal_logits(model, TINY_PROMPTS, slow, features)
    cross_entropy(expected, labels).backward()
    torch.testing.assert_close(logits, expected, atol=STEP, rtol=DOUBLE)
    for name in start:
        torch.testing.assert_close(fast[name].grad, slow[name].grad, atol=STEP, rtol=STEP)
        assert slow[name].grad.abs().max() > 1e-6, name


def test_the_first_step_of_a_fit_is_sgd() -> None:
    examples = make_examples(2)
    config = CoCoOpConfig(epochs=1, warmup_epochs=0, lr=0.1, batch_size=4, crop_scale=FULL_IMAGE)
    fitted = fit_method("cocoop", TINY, TINY_PROMPTS, examples, config, seed=4).fitted
    start = initial_parameters(TINY, config, torch.Generator().manual_seed(4))
    learned = {name: value.requires_grad_() for name, value in start.items()}
    features = TINY.encode_image(examples.images, normalize=True)
    loss = cross_entropy(literal_logits(TINY, TINY_PROMPTS, learned, features), examples.labels)
    loss.backward()
    for name, value in learned.items():
        step = value.grad + config.weight_decay * value.detach()
        expected = value.detach() - 0.1 * step
        torch.testing.assert_close(fitted[name], expected, atol=FEATURE, rtol=LOGIT)


def test_few_rows_at_a_time_change_nothing() -> None:
    fitted = initial_parameters(TINY, CoCoOpConfig(), torch.Generator().manual_seed(0))
    images = Batch(make_images(2, seed=0)[0])
    predictions = [
        create_method("cocoop", TINY, TINY_PROMPTS, CoCoOpConfig(text_chunk=rows), fitted=fitted)
        .predict(images)
        .logits
        for rows in (1, 12, 2048)
    ]
    for prediction in predictions[:2]:
        torch.testing.assert_close(prediction, predictions[2], atol=LOGIT, rtol=LOGIT)
