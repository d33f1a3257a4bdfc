"""Text features under a learned context, and their gradient with respect to it.

At the start of every clique the context is the same, so that one forward pass serves
all. Their gradients come from that pass by vector-Jacobian products or, on long
streams, through the full Jacobian, built once per class list: then each clique costs
one row of a matrix product.
"""

import torch
from torch import Tensor

from cliquetta.methods.building.template import LearnableTemplate
from cliquetta.methods.scap.composition import MEMORY
from cliquetta.model.clip import CLIP, to_float32
from cliquetta.model.text import with_context
from cliquetta.model.vjp import TextTape, chunks
from cliquetta.prompts.classes import ClassPrompts

ROWS = 16384  # Texts whose gradients are computed at once.


class PromptedText(LearnableTemplate):
    """The class texts of SCAP, with gradients at the start context in closed form."""

    @torch.no_grad()
    def __init__(self, model: CLIP, prompts: ClassPrompts, mix: float) -> None:
        super().__init__(model, prompts, by="SCAP", mix=mix, bare=True)
        self.jacobian: Tensor | None = None
        """Used for gradients if not ``None``; it rounds differently from single products."""
        self._built: Tensor | None = None
        self._raw = to_float32(self.tower(self.ids, context=self.start))
        self.start_features = self.combine(self._raw)

    # --- gradients at the start context ---------------------------------------------------------

    @torch.no_grad()
    def vjp(self, cotangents: Tensor) -> Tensor:
        """Gradients (U, N, M, D) of the start context per class; a shared one gets their sum."""
        if self.jacobian is not None:
            size = cotangents.abs().amax(dim=(1, 2), keepdim=True).clamp_min(1e-30)
            scaled = (cotangents / size).to(self.jacobian.dtype)
            back = (
                torch.einsum("une,nec->unc", scaled, self.jacobian).to(size.dtype)
                * size
            )
            return back.view(len(cotangents), self.classes, *self.start.shape)
        raw = self._through_mixing(cotangents)
        out = raw.new_zeros(len(raw), self.classes, *self.start.shape)
        for classes in self._length_groups():
            tape = self._tape(classes)
            n = len(classes)
            for part in chunks(len(raw), max(1, ROWS // n)):
                rows = raw[part][:, classes]
                index = torch.arange(n, device=rows.device).repeat(len(rows))
                back = tape.vjp(rows.flatten(0, 1), index, self._positions(len(index)))
                out[part, classes] = back.view(len(rows), n, *self.start.shape)
        return out

    @torch.no_grad()
    def vjp_shared(self, grad_logits: Tensor, query_features: Tensor) -> Tensor:
        """Gradients (U, M, D) of a shared context, from those of the queries' logits (U, N)."""
        if self.jacobian is None:
            out = []
            for part in chunks(len(grad_logits), max(1, ROWS // self.classes)):
                cotangents = (
                    grad_logits[part][:, :, None] * query_features[part][:, None]
                )
                out.append(self.vjp(cotangents).sum(dim=1))
            return torch.cat(out)
        size = grad_logits.abs().amax(dim=1, keepdim=True).clamp_min(1e-30)
        dtype, flat, out = self.jacobian.dtype, self.jacobian.flatten(0, 1), []
        for part in chunks(len(grad_logits), max(1, 2**28 // len(flat))):
            left = (grad_logits[part] / size[part]).to(dtype)
            outer = left[:, :, None] * query_features[part].to(dtype)[:, None]
            out.append((outer.flatten(1) @ flat).to(size.dtype) * size[part])
        return torch.cat(out).view(len(grad_logits), *self.start.shape)

    @torch.no_grad()
    def build_jacobian(self) -> None:
        """Use the Jacobian (N, E, M D) at the start context, mixing included; built only once."""
        if self._built is not None:
            self.jacobian = self._built
            return
        N, E = self.start_features.shape
        dtype, device = self.tower.projection.dtype, self.ids.device
        jacobian = torch.empty(N, E, self.start.numel(), dtype=dtype, device=device)
        directions = torch.eye(E, device=device, dtype=self.start_features.dtype)
        for group in self._length_groups():
            for classes in torch.split(group, max(1, ROWS // E)):
                tape, n = self._tape(classes), len(classes)
                rows = self._through_mixing(
                    directions[:, None].expand(-1, n, -1), classes
                )
                index = torch.arange(n, device=rows.device).repeat(E)
                back = tape.vjp(rows.flatten(0, 1), index, self._positions(len(index)))
                jacobian[classes] = back.view(E, n, -1).transpose(0, 1).to(dtype)
        self.jacobian = self._built = jacobian

    def choose_gradient(self, sets_learned: int) -> None:
        """Use the Jacobian once the products that it saves would have cost as much.

        The tally is part of the method's state: a resumed stream changes over at the
        same batch.
        """
        self.jacobian = None
        size = self.start_features.numel() * self.start.numel()
        budget = MEMORY.get(self.ids.device.type, MEMORY["cpu"])
        affordable = size * self.tower.projection.element_size() <= budget
        if sets_learned > self.start_features.shape[1] and affordable:
            self.build_jacobian()

    def _through_mixing(
        self, cotangents: Tensor, classes: Tensor | None = None
    ) -> Tensor:
        """Cotangents of the tower's output from those (..., n, E) of the mixed unit features."""
        raw = self._raw if classes is None else self._raw[classes]
        size: Tensor = torch.linalg.vector_norm(raw, dim=-1, keepdim=True)
        learned = raw / size
        if self.fixed is not None:
            fixed = self.fixed if classes is None else self.fixed[classes]
            cotangents = self.weight * _through_unit(
                self.weight * learned + fixed, cotangents
            )
        return _through_unit(learned, cotangents) / size

    def _positions(self, rows: int) -> Tensor:
        return self.positions.expand(rows, -1)

    def _tape(self, classes: Tensor) -> TextTape:
        """The forward pass of some classes at the start context, cut at their longest end."""
        ends = self.ends[classes]
        tokens = self.tower.tokens(self.ids[classes, : int(ends.max()) + 1])
        tokens = with_context(tokens, self.start, self._positions(len(classes)))
        return TextTape(self.tower, tokens, ends)

    def _length_groups(self) -> list[Tensor]:
        """Classes with equally long texts, so that none is padded."""
        return [(self.ends == end).nonzero()[:, 0] for end in torch.unique(self.ends)]


def _through_unit(x: Tensor, cotangents: Tensor) -> Tensor:
    """Cotangents of x from those of x / |x|."""
    size: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    direction = x / size
    radial = (cotangents * direction).sum(dim=-1, keepdim=True)
    return (cotangents - radial * direction) / size
