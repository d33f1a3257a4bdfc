"""LayerNorms of a tower that is not modified: Tent and the methods after it.

The gains and biases of all LayerNorms of a tower are one flat vector, passed to the
tower at every call. A method learns that vector, stored in its memory or dropped after
the batch, not the model.
"""

import copy
import re
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from cliquetta.methods.building.adam import AdamState
from cliquetta.methods.building.base import Adapter, BatchDependence
from cliquetta.methods.building.config import Decay, MethodConfig, Positive
from cliquetta.model.clip import FrozenModel, to_float32
from cliquetta.model.vision import VisionTower
from cliquetta.types import Batch, Prediction


class Float32LayerNorm(nn.Module):
    """LayerNorm in its gain's precision: bfloat16 would round steps of 1e-3 away."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.shape = norm.normalized_shape
        self.eps = norm.eps
        self.weight = norm.weight
        self.bias = norm.bias

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension; gain and bias are (D,), or (B, D)."""
        gain: Tensor = self.weight
        bias: Tensor = self.bias
        wide = x.to(gain.dtype)
        if gain.ndim == 1:
            normed = F.layer_norm(wide, self.shape, gain, bias, self.eps)
            return normed.to(x.dtype)

        # (B, 1, ..., D): those of an image for all its tokens.
        per_image = [len(gain)] + [1] * (x.ndim - 2) + [-1]
        gain = gain.view(per_image)
        bias = bias.view(per_image)
        normed = F.layer_norm(wide, self.shape, eps=self.eps)
        normed = normed * gain + bias
        return normed.to(x.dtype)


class LayerNormTower:
    """Tower as a function of its LayerNorm parameters; other weights are shared."""

    def __init__(self, tower: nn.Module, *, precise: bool = True) -> None:
        """Wrap a tower; its ``layer_norms``, if any, name those that are passed in.

        Without ``precise`` they have the tower's precision: faster, but half rounds
        steps away.
        """
        self._tower = _copy_sharing_weights(tower)
        self._parameters: list[tuple[str, torch.Size, torch.dtype | None]] = []
        start = []
        chosen = getattr(tower, "layer_norms", None)
        for name, module in list(self._tower.named_modules()):
            is_chosen = chosen is None or name in chosen
            if not isinstance(module, nn.LayerNorm) or not is_chosen:
                continue
            # One that other libraries made their own keeps its forward pass and its
            # precision.
            is_plain = precise and type(module).forward is nn.LayerNorm.forward
            if is_plain:
                self._tower.set_submodule(name, Float32LayerNorm(module))

            # Gain and bias, of which other libraries may leave one out.
            for kind in ("weight", "bias"):
                value = getattr(module, kind)
                if value is not None:
                    dtype = None if is_plain else value.dtype
                    self._parameters.append((f"{name}.{kind}", value.shape, dtype))
                    start.append(to_float32(value.detach()).flatten())
        # (P,): the parameters as loaded, at least float32.
        self.start = torch.cat(start)

    def early(self) -> Tensor:
        """Mark parameters (P,): 1 before the last quarter of the blocks, else 0."""
        # A name's first number is its block's; what has none stands before the blocks
        # or after them.
        blocks: list[int | None] = []
        for name, _, _ in self._parameters:
            number = re.search(r"(?:^|\.)(\d+)\.", name)
            blocks.append(int(number[1]) if number else None)
        numbers = [block for block in blocks if block is not None]
        depth = 1 + max(numbers, default=-1)
        late = depth - depth // 4

        parts = []
        is_before_blocks = True
        for block, (_, shape, _) in zip(blocks, self._parameters, strict=True):
            if block is None:
                is_early = is_before_blocks
            else:
                is_before_blocks = False
                is_early = block < late
            size = (shape.numel(),)
            parts.append(self.start.new_full(size, float(is_early)))
        return torch.cat(parts)

    def __call__(self, parameters: Tensor, inputs: Tensor) -> Tensor:
        """Encode inputs, in float32 or more, under flat parameters (P,) or (B, P)."""
        named = self.named(parameters)
        features: Tensor = functional_call(self._tower, named, (inputs,))
        return to_float32(features)

    def frozen(self, parameters: Tensor) -> nn.Module:
        """Build a tower with flat parameters (P,); other weights are shared."""
        tower = _copy_sharing_weights(self._tower)
        named = self.named(parameters.detach())

        for name, value in named.items():
            owner, _, kind = name.rpartition(".")
            parameter = nn.Parameter(value, requires_grad=False)
            setattr(tower.get_submodule(owner), kind, parameter)
        return tower

    def named(self, parameters: Tensor) -> dict[str, Tensor]:
        """Split flat parameters into gains and biases by name."""
        images = parameters.shape[:-1]  # (), or (B,).
        sizes = [shape.numel() for _, shape, _ in self._parameters]
        parts = torch.split(parameters, sizes, dim=-1)

        # Norms of other libraries keep their precision (``dtype``).
        named = {}
        for part, (name, shape, dtype) in zip(parts, self._parameters, strict=True):
            value = part.view(images + shape)
            named[name] = value.to(dtype or part.dtype)
        return named


def _copy_sharing_weights(tower: nn.Module) -> nn.Module:
    """Copy the module; parameters and buffers are those of ``tower``."""
    shared: dict[int, Any] = {id(p): p for p in [*tower.parameters(), *tower.buffers()]}
    return copy.deepcopy(tower, shared)


class LateBlocks(nn.Module):
    """Blocks of a ViT from one on, and its pooling."""

    def __init__(self, tower: VisionTower, start: int) -> None:
        super().__init__()
        self.tower = tower
        self.start = start
        self.layer_norms = {
            f"tower.blocks.{block}.{norm}"
            for block in range(start, len(tower.blocks))
            for norm in ("ln_1", "ln_2")
        }
        """Norms of the blocks; the final one is left alone."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Encode states (B, T, D) at the input of block ``start``; not normalised."""
        return self.tower.pool(self.tower.run(hidden, self.start))


class LayerNormAdapter(Adapter):
    """Base of methods that learn the LayerNorms of the image tower."""

    batch_dependence = BatchDependence.JOINT
    needs = frozenset({"norm"})
    class_free = AdamState.names("norms") | {"generator"}

    def _setup(self) -> None:
        model = self.model
        self.classifier = model.classifier(self.prompts)  # (N, E)
        self.scale = model.scale
        self.tower = LayerNormTower(model.visual)

    def features(self, norms: Tensor, images: Tensor) -> Tensor:
        """Encode images under flat LayerNorm parameters: unit features (B, E)."""
        return self.model.unit_image(self.tower(norms, images))

    def logits(self, norms: Tensor, images: Tensor) -> Tensor:
        """Score images under flat LayerNorm parameters: logits (B, N)."""
        features = self.features(norms, images)
        return self.scale * features @ self.classifier.T

    @property
    def learned(self) -> Tensor | None:
        """Flat LayerNorm parameters learned so far, where those outlive a batch."""
        for name in ("norms.values", "norms"):
            if name in self.memory:
                return self.memory[name]
        return None

    def frozen_model(self) -> FrozenModel:
        """Freeze the tower under the norms learned, where they outlive a batch."""
        if self.learned is None:
            return super().frozen_model()
        visual = self.tower.frozen(self.learned)
        return FrozenModel(self.model, self.classifier, visual=visual)


class EpisodicLayerNormAdapter(LayerNormAdapter):
    """Base of those that adapt to every batch anew and remember nothing."""

    needs = frozenset({"norm", "text"})

    def _predict(self, batch: Batch) -> Prediction:
        norms = self.adapt(batch.images)
        with torch.no_grad():
            logits = self.logits(norms, batch.images)
        return Prediction(logits.float())

    @abstractmethod
    def adapt(self, images: Tensor) -> Tensor:
        """Learn flat LayerNorm parameters for a batch of images."""


@dataclass(frozen=True)
class MomentumConfig(MethodConfig):
    """Base of the configs of methods that take SGD steps with momentum."""

    lr: Positive = 1e-3
    """Learning rate of SGD at batches of 64: in proportion to the batch, doubled for one image."""
    momentum: Decay = 0.9  # Momentum of SGD.


class MomentumAdapter(LayerNormAdapter):
    """Base of those that learn all but the last quarter of the blocks by such steps."""

    class_free = frozenset({"norms", "velocity", "generator"})
    scaled_cosines = True
    config: MomentumConfig

    def _setup(self) -> None:
        super()._setup()
        start = self.tower.start
        self.mask = self.tower.early()
        self.memory.declare("norms", start)
        self.memory.declare("velocity", torch.zeros_like(start))

    def step(self, gradient: Tensor, images: int) -> None:
        """Step down a gradient (P,) of so many images."""
        # In proportion to the batch; doubled for one image.
        rate = self.config.lr * images / 64
        if images == 1:
            rate *= 2

        # v <- m v + g, then norms <- norms - rate v.
        velocity = self.memory["velocity"]
        velocity = self.config.momentum * velocity + gradient * self.mask
        norms = self.memory["norms"]
        self.memory["velocity"] = velocity
        self.memory["norms"] = norms - rate * velocity
