"""Few-shot methods: an adapter made from fitted tensors, and one SGD loop."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.methods.building.base import Adapter, BatchDependence
from cliquetta.methods.building.config import (
    Count,
    CropScale,
    Decay,
    MethodConfig,
    NonNegative,
    NonNegativeCount,
    Positive,
)
from cliquetta.methods.building.memory import all_finite
from cliquetta.methods.building.support_set import FewShot, Rows, crop_features
from cliquetta.model.clip import CLIP, l2_normalize
from cliquetta.prompts.classes import ClassPrompts

Own = TypeVar("Own", bound="FewShotAdapter")


class FewShotAdapter(Adapter):
    """Classifier made from fitted tensors, which learns nothing more."""

    batch_dependence = BatchDependence.INDEPENDENT
    fitted: Mapping[str, Tensor]

    def __init__(
        self,
        model: CLIP,
        prompts: ClassPrompts,
        config: Any,
        *,
        seed: int = 0,
        fitted: Mapping[str, Tensor],
    ) -> None:
        refuse_fixed_text(type(self), prompts)
        if not all_finite(fitted.values()):
            raise UserError(
                f"fitted tensors of {self.name} hold numbers that are not finite: fit "
                "again with a lower learning rate"
            )
        self.fitted = {
            name: value.detach().to(model.device) for name, value in fitted.items()
        }
        super().__init__(model, prompts, config, seed=seed)

    def _rebuild(self: Own, prompts: ClassPrompts) -> Own:
        fitted = self.for_classes(self.fitted, self.prompts.names, prompts.names)
        return type(self)(
            self.model, prompts, self.config, seed=self.seed, fitted=fitted
        )

    def tensor(self, name: str, *shape: int | None) -> Tensor:
        """Return a fitted tensor of some shape; ``None`` stands for any size."""
        if name not in self.fitted:
            raise UserError(
                f"fitted tensors of {self.name} lack {name!r}: of another method?"
            )
        value = self.fitted[name]
        pairs = zip(shape, value.shape, strict=False)
        fits = all(wanted in (None, size) for wanted, size in pairs)
        if value.ndim != len(shape) or not fits:
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise UserError(
                f"fitted {name!r} is {tuple(value.shape)}, {self.model.id} with these classes and "
                f"this config takes ({wanted}): fit again for them"
            )
        return value

    @classmethod
    def for_classes(
        cls, fitted: Mapping[str, Tensor], known: Sequence[str], wanted: Sequence[str]
    ) -> dict[str, Tensor]:
        """Choose tensors for ``wanted`` classes from those fitted on ``known`` ones."""
        del known, wanted
        return dict(fitted)

    @staticmethod
    def indices_of(
        known: Sequence[str], wanted: Sequence[str], *, by: str
    ) -> list[int]:
        """Find each ``wanted`` class, once, among the ``known`` ones."""
        if tuple(known) == tuple(wanted):
            return list(range(len(known)))
        strange = [name for name in wanted if name not in known]
        if strange:
            raise UserError(
                f"{by} was fitted on {len(known)} classes without {strange[0]!r} and can only tell "
                "those apart, or some of them: fit it again with the new class list"
            )
        if len(set(wanted)) != len(wanted):
            raise UserError(
                f"class names must differ for {by} to pick from the fitted ones"
            )
        return [list(known).index(name) for name in wanted]


def refuse_fixed_text(adapter: type[Adapter], prompts: ClassPrompts) -> None:
    """Refuse text features from outside for a method that learns text."""
    if "text-prompts" in adapter.needs and prompts.features is not None:
        raise UserError(
            f"{adapter.name} learns text: give class names, not fixed text features"
        )


@dataclass(frozen=True)
class SGDTraining(MethodConfig):
    """Training of the prompt learners; the defaults are those of CoOp."""

    epochs: Count | None = None
    """Passes over the examples; ``None``: 200 from 8 shots on, 100 from 2 on, 50 for one."""
    batch_size: Count = 32
    """Images per step; a shorter last batch of an epoch is dropped."""
    lr: Positive = 2e-3
    """Learning rate at the start of the cosine, stepped once per epoch."""
    momentum: Decay = 0.9  # Momentum of SGD.
    weight_decay: NonNegative = 5e-4  # Weight decay of SGD.
    warmup_epochs: NonNegativeCount = 1
    """Epochs at ``warmup_lr`` before the cosine starts."""
    warmup_lr: NonNegative = 1e-5  # Constant learning rate of the warm-up.
    crop_scale: CropScale = (0.08, 1.0)
    """Fraction of the image that a random training crop covers."""

    def epochs_for(self, shots: int) -> int:
        """Choose the number of epochs for that many images per class."""
        if self.epochs is not None:
            return self.epochs
        if shots >= 8:
            return 200
        return 100 if shots >= 2 else 50

    def lr_at(self, epoch: int, epochs: int) -> float:
        """Compute the learning rate: a cosine that starts after the warm-up."""
        if epoch < self.warmup_epochs:
            return self.warmup_lr
        after_warmup = epoch - self.warmup_epochs
        phase = math.pi * after_warmup / epochs
        return self.lr * (1 + math.cos(phase)) / 2


@dataclass(frozen=True)
class TextTraining(SGDTraining):
    """Training of learners that leave the image tower as it is."""

    crop_pool: Count | None = None
    """Number of crops per image that are encoded before training, which then draws from
    them: many epochs become cheap. ``None``: fresh crops at every step, as the
    authors."""


@dataclass(frozen=True)
class FitStep:
    """Progress of a fit after a step."""

    step: int
    steps: int
    epoch: int
    loss: float
    lr: float


OnStep = Callable[[FitStep], None]


@dataclass(frozen=True)
class FitTask:
    """The model, classes and examples that a few-shot method is fitted on."""

    model: CLIP
    prompts: ClassPrompts
    few_shot: FewShot
    seed: int = 0
    on_step: OnStep | None = None

    def report(self, step: FitStep) -> None:
        """Tell the caller about a step; refuse a loss that is not finite."""
        if not math.isfinite(step.loss):
            raise ArithmeticError(
                f"the loss is {step.loss} at step {step.step}: lower lr, or fit in float32"
            )
        if self.on_step is not None:
            self.on_step(step)


Draw = Callable[[Rows, np.random.Generator], Tensor]
"""Rows of the examples -> what the loss sees of them."""
Logits = Callable[[Mapping[str, Tensor], Tensor], Tensor]
"""Parameters, pixels (B, 3, S, S) or unit features (B, E) -> logits (B, N)."""


def epoch_batches(
    count: int, size: int, generator: np.random.Generator, *, drop_last: bool
) -> Iterator[Rows]:
    """Shuffle examples into batches.

    With ``drop_last`` a short last one is left out, unless it is the only one.
    """
    order = generator.permutation(count)
    stop = count
    if drop_last and count >= size:
        stop -= count % size
    for first in range(0, stop, size):
        end = min(first + size, stop)
        yield order[first:end]


def learn(
    start: Mapping[str, Tensor], logits: Logits, task: FitTask, config: SGDTraining
) -> dict[str, Tensor]:
    """Run SGD down the cross-entropy of the logits of crops, or their features.

    Args:
        start: The parameters before.
        logits: Computes logits from parameters and crops.
        task: The examples, and who is told of each step.
        config: The training.

    Returns:
        The parameters after it.

    """
    few_shot = task.few_shot
    draw = example_draw(task, config)
    learned = {
        name: value.detach().clone().requires_grad_() for name, value in start.items()
    }
    parameters = list(learned.values())
    optimiser = torch.optim.SGD(
        parameters,
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
    )
    n = len(few_shot)
    size = config.batch_size
    epochs = config.epochs_for(few_shot.shots)
    steps = epochs * max(1, n // size)

    generator = np.random.default_rng([task.seed, 0xC0])
    step = 0
    for epoch in range(epochs):
        # The learning rate is stepped once per epoch.
        lr = config.lr_at(epoch, epochs)
        optimiser.param_groups[0]["lr"] = lr

        for rows in epoch_batches(n, size, generator, drop_last=True):
            crops = draw(rows, generator)
            labels = few_shot.labels[torch.from_numpy(rows)]
            labels = labels.to(task.model.device)

            with torch.enable_grad():
                loss = F.cross_entropy(logits(learned, crops), labels)
                gradients = torch.autograd.grad(loss, parameters)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            optimiser.step()
            step += 1
            task.report(FitStep(step, steps, epoch, float(loss.detach()), lr))
    return {name: value.detach() for name, value in learned.items()}


def example_draw(task: FitTask, config: SGDTraining) -> Draw:
    """Make the function that draws a crop (B, 3, S, S) of each image.

    For texts it gives the crop's unit features (B, E).
    """
    few_shot = task.few_shot
    model = task.model
    scale = config.crop_scale
    pool_size = config.crop_pool if isinstance(config, TextTraining) else None
    if pool_size is not None:
        first = np.random.default_rng([task.seed, 0xF0])
        raw = crop_features(model, few_shot, first, scale=scale, count=pool_size)
        pool = l2_normalize(raw)  # (n, pool_size, E)

        def pooled(rows: Rows, generator: np.random.Generator) -> Tensor:
            picks = generator.integers(pool_size, size=len(rows))
            return pool[torch.from_numpy(rows), torch.from_numpy(picks)]

        return pooled

    def fresh(rows: Rows, generator: np.random.Generator) -> Tensor:
        pixels = few_shot.crops(rows, model, generator, scale=scale)[:, 0]
        if not isinstance(config, TextTraining):
            return pixels
        with torch.no_grad():
            return model.encode_image(pixels, normalize=True)

    return fresh
