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
PRODUCTS = 2**28  # Entries of the outer products that meet the Jacobian at once.
# Cotangents are divided by their largest entry, or this, so that halves do not underflow.
TINY = 1e-30


class PromptedText(LearnableTemplate):
    """The class texts of SCAP, with gradients at the start context in closed form."""

    @torch.no_grad()
    def __init__(self, model: CLIP, prompts: ClassPrompts, mix: float) -> None:
        super().__init__(model, prompts, by="SCAP", mix=mix, bare=True)
        self.jacobian: Tensor | None = None
        """Used for gradients if there is one; it rounds differently from products."""
        self._built: Tensor | None = None

        # The tower's output at the start context, (N, E), and the mixed unit features.
        raw = self.tower(self.ids, context=self.start)
        self._raw = to_float32(raw)
        self.start_features = self.combine(self._raw)

    # --- gradients at the start context -----------------------------------------------

    @torch.no_grad()
    def vjp(self, cotangents: Tensor) -> Tensor:
        """Pull cotangents (U, N, E) of the text features back to the start context.

        Returns:
            Gradients (U, N, M, D), one per class; those of a shared context are their
            sum.

        """
        U, N, _ = cotangents.shape
        M, D = self.start.shape
        if self.jacobian is not None:
            # Scaled to one, so that the product in half precision does not underflow.
            largest = cotangents.abs().amax(dim=(1, 2), keepdim=True)
            largest = largest.clamp_min(TINY)
            scaled = (cotangents / largest).to(self.jacobian.dtype)
            back = torch.einsum("une,nec->unc", scaled, self.jacobian)
            back = back.to(largest.dtype) * largest
            return back.view(U, N, M, D)

        # Without it, through the recorded pass of each group of classes.
        raw = self._through_mixing(cotangents)
        gradients = raw.new_zeros(U, N, M, D)
        for classes in self._length_groups():
            n = len(classes)
            tape = self._tape(classes)
            for part in chunks(U, max(1, ROWS // n)):
                rows = raw[part][:, classes]
                back = self._pull(tape, rows)
                gradients[part, classes] = back.view(len(rows), n, M, D)
        return gradients

    @torch.no_grad()
    def vjp_shared(self, grad_cosines: Tensor, query_features: Tensor) -> Tensor:
        """Pull gradients of cosines back to a start context that all classes share.

        The cosine of query u and class n is an inner product, so that the cotangent of
        the feature of class n is ``grad_cosines[u, n] * query_features[u]``.

        Args:
            grad_cosines: Gradients (U, N) by the queries' cosines with the classes.
            query_features: Unit features (U, E) of the queries.

        Returns:
            Gradients (U, M, D).

        """
        U = len(grad_cosines)
        M, D = self.start.shape
        gradients = []
        if self.jacobian is None:
            for part in chunks(U, max(1, ROWS // self.classes)):
                cotangents = _outer(grad_cosines[part], query_features[part])
                by_class = self.vjp(cotangents)
                gradients.append(by_class.sum(dim=1))
            return torch.cat(gradients)

        # One matrix product of the cotangents (U, N E) and the Jacobian (N E, M D).
        flat = self.jacobian.flatten(0, 1)
        largest = grad_cosines.abs().amax(dim=1, keepdim=True)
        largest = largest.clamp_min(TINY)
        at_once = max(1, PRODUCTS // len(flat))
        for part in chunks(U, at_once):
            size = largest[part]
            scaled = grad_cosines[part] / size
            scaled = scaled.to(flat.dtype)
            features = query_features[part].to(flat.dtype)
            cotangents = _outer(scaled, features)
            back = cotangents.flatten(1) @ flat
            gradients.append(back.to(size.dtype) * size)
        return torch.cat(gradients).view(U, M, D)

    @torch.no_grad()
    def build_jacobian(self) -> None:
        """Use the Jacobian (N, E, M D) at the start context; it is built once."""
        if self._built is not None:
            self.jacobian = self._built
            return
        N, E = self.start_features.shape
        dtype = self.tower.projection.dtype
        device = self.ids.device
        entries = self.start.numel()
        jacobian = torch.empty(N, E, entries, dtype=dtype, device=device)
        directions = torch.eye(E, device=device, dtype=self.start_features.dtype)

        # At most `ROWS` cotangents at once, all of classes with equally long texts.
        for group in self._length_groups():
            at_once = max(1, ROWS // E)
            for classes in torch.split(group, at_once):
                n = len(classes)
                tape = self._tape(classes)

                # One cotangent per direction of the feature and class, (E, n, E).
                cotangents = directions[:, None].expand(-1, n, -1)
                raw = self._through_mixing(cotangents, classes)
                back = self._pull(tape, raw)
                by_class = back.view(E, n, -1).transpose(0, 1)
                jacobian[classes] = by_class.to(dtype)
        self.jacobian = self._built = jacobian

    def choose_gradient(self, sets_learned: int) -> None:
        """Use the Jacobian once the products that it saves would have cost as much.

        The tally is part of the method's state: a resumed stream changes over at the
        same batch.
        """
        self.jacobian = None
        N, E = self.start_features.shape
        entry = self.tower.projection.element_size()
        size = N * E * self.start.numel() * entry
        budget = MEMORY.get(self.ids.device.type, MEMORY["cpu"])
        # The Jacobian takes E products per class, a learned set one.
        if sets_learned > E and size <= budget:
            self.build_jacobian()

    def _pull(self, tape: TextTape, cotangents: Tensor) -> Tensor:
        """Pull cotangents (U, n, E) of the tower's output back: (U n, M, D)."""
        U, n, _ = cotangents.shape
        # Cotangent (u, class) belongs to the recorded row of the class.
        recorded_row = torch.arange(n, device=cotangents.device)
        recorded_row = recorded_row.repeat(U)
        rows = cotangents.flatten(0, 1)
        return tape.vjp(rows, recorded_row, self._positions(U * n))

    def _through_mixing(
        self, cotangents: Tensor, classes: Tensor | None = None
    ) -> Tensor:
        """Pull cotangents (..., n, E) of mixed features back to the tower's output."""
        raw = self._raw
        fixed = self.fixed
        if classes is not None:
            raw = raw[classes]
            fixed = None if fixed is None else fixed[classes]

        length: Tensor = torch.linalg.vector_norm(raw, dim=-1, keepdim=True)
        learned = raw / length  # u_learn
        if fixed is not None:
            # f^T = unit vector of (1 - rho) u_learn + rho u_fix
            mixed = self.weight * learned + fixed
            back = _through_unit(mixed, cotangents)
            cotangents = self.weight * back
        return _through_unit(learned, cotangents) / length

    def _positions(self, rows: int) -> Tensor:
        return self.positions.expand(rows, -1)

    def _tape(self, classes: Tensor) -> TextTape:
        """Record the pass of some classes, cut at their longest end."""
        # Nothing behind a text's end changes its feature.
        ends = self.ends[classes]
        length = int(ends.max()) + 1
        ids = self.ids[classes, :length]

        positions = self._positions(len(classes))
        tokens = self.tower.tokens(ids)
        tokens = with_context(tokens, self.start, positions)
        return TextTape(self.tower, tokens, ends)

    def _length_groups(self) -> list[Tensor]:
        """Group the classes with equally long texts, so that none is padded."""
        return [(self.ends == end).nonzero()[:, 0] for end in torch.unique(self.ends)]


def _outer(left: Tensor, right: Tensor) -> Tensor:
    """Multiply rows (U, N) and (U, E) to matrices (U, N, E)."""
    return left[:, :, None] * right[:, None]


def _through_unit(x: Tensor, cotangents: Tensor) -> Tensor:
    """Pull cotangents of x / |x| back to x."""
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    direction = x / length
    # What points along x changes its length only.
    along = cotangents * direction
    radial = along.sum(dim=-1, keepdim=True)
    return (cotangents - radial * direction) / length
