"""Adapting the LayerNorms of a tower without modifying it: Tent and the methods after it.

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

from cliquetta.methods.base import Adapter, BatchDependence
from cliquetta.methods.building.adam import AdamState
from cliquetta.methods.building.config import Decay, MethodConfig, Positive
from cliquetta.model.clip import FrozenModel, to_float32
from cliquetta.model.vision import VisionTower
from cliquetta.types import Batch, Prediction


class Float32LayerNorm(nn.Module):
    """LayerNorm in the precision of its gain: steps of 1e-3 are below bfloat16's resolution."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.shape = norm.normalized_shape
        self.eps = norm.eps
        self.weight = norm.weight
        self.bias = norm.bias

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension; gain and bias are (D,) or one per image, (B, D)."""
        wide = x.to(self.weight.dtype)
        if self.weight.ndim == 1:
            normed = F.layer_norm(wide, self.shape, self.weight, self.bias, self.eps)
        else:
            gain, bias = (
                p.view(len(p), *[1] * (x.ndim - 2), -1)
                for p in (self.weight, self.bias)
            )
            normed = F.layer_norm(wide, self.shape, eps=self.eps) * gain + bias
        return normed.to(x.dtype)


class LayerNormTower:
    """A tower as a function of its LayerNorm parameters; all other weights are shared with it."""

    def __init__(self, tower: nn.Module, *, precise: bool = True) -> None:
        """Wrap a tower; its ``layer_norms``, if it has some, name those that are passed in.

        Without ``precise`` they have the tower's precision: faster, but half rounds
        steps away.
        """
        self._tower = _copy_sharing_weights(tower)
        self._parameters: list[tuple[str, torch.Size, torch.dtype | None]] = []
        start, chosen = [], getattr(tower, "layer_norms", None)
        for name, module in list(self._tower.named_modules()):
            if not isinstance(module, nn.LayerNorm) or (
                chosen is not None and name not in chosen
            ):
                continue
            # One that other libraries made their own keeps its forward pass and its
            # precision.
            is_plain = precise and type(module).forward is nn.LayerNorm.forward
            if is_plain:
                self._tower.set_submodule(name, Float32LayerNorm(module))
            for kind, value in (("weight", module.weight), ("bias", module.bias)):
                if value is not None:
                    dtype = None if is_plain else value.dtype
                    self._parameters.append((f"{name}.{kind}", value.shape, dtype))
                    start.append(to_float32(value.detach()).flatten())
        self.start = torch.cat(
            start
        )  # (P,) the parameters as loaded, at least float32.

    def early(self) -> Tensor:
        """(P,) 1 for parameters before the last quarter of the blocks, 0 from there on."""
        # a name's first number is its block's; what has none stands before the blocks
        # or after them
        numbers = [re.search(r"(?:^|\.)(\d+)\.", name) for name, *_ in self._parameters]
        blocks = [int(match[1]) if match else None for match in numbers]
        depth = 1 + max((block for block in blocks if block is not None), default=-1)
        first = next(
            (i for i, block in enumerate(blocks) if block is not None), len(blocks)
        )
        parts = []
        for i, (block, (_, shape, _)) in enumerate(
            zip(blocks, self._parameters, strict=True)
        ):
            is_early = i < first if block is None else block < depth - depth // 4
            parts.append(self.start.new_full((shape.numel(),), float(is_early)))
        return torch.cat(parts)

    def __call__(self, parameters: Tensor, inputs: Tensor) -> Tensor:
        """Features, at least float32, under flat parameters (P,), or (B, P) for each input."""
        features: Tensor = functional_call(
            self._tower, self.named(parameters), (inputs,)
        )
        return to_float32(features)

    def frozen(self, parameters: Tensor) -> nn.Module:
        """A tower with flat LayerNorm ``parameters`` (P,) built in; other weights are shared."""
        tower = _copy_sharing_weights(self._tower)
        for name, value in self.named(parameters.detach()).items():
            owner, _, kind = name.rpartition(".")
            setattr(
                tower.get_submodule(owner),
                kind,
                nn.Parameter(value, requires_grad=False),
            )
        return tower

    def named(self, parameters: Tensor) -> dict[str, Tensor]:
        """Gains and biases by name, of flat parameters."""
        sizes = [shape.numel() for _, shape, _ in self._parameters]
        parts = torch.split(parameters, sizes, dim=-1)
        return {
            name: part.view(*parameters.shape[:-1], *shape).to(dtype or part.dtype)
            for part, (name, shape, dtype) in zip(parts, self._parameters, strict=True)
        }


def _copy_sharing_weights(tower: nn.Module) -> nn.Module:
    """A copy of the module whose parameters and buffers are those of ``tower``."""
    shared: dict[int, Any] = {id(p): p for p in [*tower.parameters(), *tower.buffers()]}
    return copy.deepcopy(tower, shared)


class LateBlocks(nn.Module):
    """The blocks of a ViT from one on, and its pooling: features (B, E) of hidden states."""

    def __init__(self, tower: VisionTower, start: int) -> None:
        super().__init__()
        self.tower, self.start = tower, start
        blocks = range(start, len(tower.blocks))
        self.layer_norms = {
            f"tower.blocks.{i}.{ln}" for i in blocks for ln in ("ln_1", "ln_2")
        }
        """Norms of the blocks; the final one is left alone."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Features, not normalised, of states (B, T, D) at the input of block ``start``."""
        return self.tower.pool(self.tower.run(hidden, self.start))


class LayerNormAdapter(Adapter):
    """A method that learns the LayerNorms of the image tower; class texts stay as they are."""

    batch_dependence = BatchDependence.JOINT
    needs = frozenset({"norm"})
    class_free = AdamState.names("norms") | {"generator"}

    def _setup(self) -> None:
        self.classifier = self.model.classifier(self.prompts)  # (N, E)
        self.scale = self.model.scale
        self.tower = LayerNormTower(self.model.visual)

    def features(self, norms: Tensor, images: Tensor) -> Tensor:
        """Unit image features (B, E) under flat LayerNorm parameters ``norms``."""
        return self.model.unit_image(self.tower(norms, images))

    def logits(self, norms: Tensor, images: Tensor) -> Tensor:
        """Logits (B, N) under flat LayerNorm parameters ``norms``."""
        return self.scale * self.features(norms, images) @ self.classifier.T

    @property
    def learned(self) -> Tensor | None:
        """Flat LayerNorm parameters learned so far, where those outlive a batch."""
        name = next(
            (name for name in ("norms.values", "norms") if name in self.memory), None
        )
        return None if name is None else self.memory[name]

    def frozen_model(self) -> FrozenModel:
        """The tower under the norms learned so far, where those outlive a batch."""
        if self.learned is None:
            return super().frozen_model()
        visual = self.tower.frozen(self.learned)
        return FrozenModel(self.model, self.classifier, visual=visual)


class EpisodicLayerNormAdapter(LayerNormAdapter):
    """One that adapts to every batch from the loaded LayerNorms and remembers nothing."""

    needs = frozenset({"norm", "text"})

    def _predict(self, batch: Batch) -> Prediction:
        norms = self.adapt(batch.images)
        with torch.no_grad():
            return Prediction(self.logits(norms, batch.images).float())

    @abstractmethod
    def adapt(self, images: Tensor) -> Tensor:
        """Flat LayerNorm parameters for a batch of images."""


@dataclass(frozen=True)
class MomentumConfig(MethodConfig):
    """Base of the configs of methods that take SGD steps with momentum on LayerNorms."""

    lr: Positive = 1e-3
    """Learning rate of SGD at batches of 64: in proportion to the batch, doubled for one image."""
    momentum: Decay = 0.9  # Momentum of SGD.


class MomentumAdapter(LayerNormAdapter):
    """One that learns the LayerNorms before the last quarter of the blocks by such steps."""

    class_free = frozenset({"norms", "velocity", "generator"})
    scaled_cosines = True
    config: MomentumConfig

    def _setup(self) -> None:
        super()._setup()
        self.mask = self.tower.early()
        self.memory.declare("norms", self.tower.start)
        self.memory.declare("velocity", torch.zeros_like(self.tower.start))

    def step(self, gradient: Tensor, images: int) -> None:
        """Step down a gradient (P,) of so many images."""
        rate = self.config.lr * images / 64 * (2 if images == 1 else 1)
        velocity = self.config.momentum * self.memory["velocity"] + gradient * self.mask
        self.memory["velocity"] = velocity
        self.memory["norms"] = self.memory["norms"] - rate * velocity
