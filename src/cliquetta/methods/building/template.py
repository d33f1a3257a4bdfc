"""Class texts as a function of the words that stand before the class name."""

import torch
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.methods.building.views import near_one
from cliquetta.model.clip import CLIP, l2_normalize
from cliquetta.prompts.classes import ClassPrompts


class LearnableTemplate:
    """Text classifiers under contexts that replace the words of the first template.

    A context is (M, D), shared by all classes, or (N, M, D), one per class. The feature
    of a class is its prompted template's, averaged with those of the other templates if
    there are any, or with ``mix`` the unit vector of (1 - mix) u_learn + mix u_fix,
    where u_fix is their unit mean. ``chunk`` texts are encoded at once. ``bare`` allows
    no words before the class name.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: CLIP,
        prompts: ClassPrompts,
        *,
        by: str,
        mix: float | None = None,
        chunk: int | None = None,
        bare: bool = False,
    ) -> None:
        if prompts.features is not None:
            raise UserError(
                f"{by} learns text, but these class prompts are fixed text features; give names "
                "and templates, or choose a method that works on features"
            )
        first, *others = prompts.templates
        words = first.split("{}")[0]
        self.tower = model.require_text()
        self.start = model.context(words)
        """Start context (M, D): embeddings of the template's words before the class name."""
        self.ids = model.tokenizer(prompts.texts(first)).to(model.device)  # (N, L)
        self.positions = self.tower.word_positions(len(self.start))
        wanted = torch.tensor(model.tokenizer.encode(words), device=self.ids.device)
        shared = bool((self.ids[:, self.positions] != wanted).any())
        if shared or not (bare or len(self.start)):
            raise UserError(
                f"{by} learns the words before the class name, of which {first!r} has none that "
                "stand alone; put a space between them and {}, or put a template such as "
                "'a photo of a {}.' first"
            )
        self.chunk = chunk
        self.ends = self.tower.ends(self.ids)
        self._host_ends = self.ends.cpu()
        self.order = self.ends.argsort(stable=True)  # short texts first
        self.weight = 1.0
        self.fixed: Tensor | None = None
        """Share of the other templates, added to ``weight`` times the learned feature, (N, E)."""
        if others and mix is not None:
            fixed = ClassPrompts(prompts.names, tuple(others), allow_duplicates=True)
            self.weight, self.fixed = 1 - mix, mix * model.classifier(fixed)
        elif others:
            texts = [
                model.encode_text(prompts.texts(other), normalize=True)
                for other in others
            ]
            self.fixed = torch.stack(texts).sum(dim=0)

    @property
    def classes(self) -> int:
        """N."""
        return len(self.ids)

    def combine(self, raw: Tensor, classes: Tensor | slice = slice(None)) -> Tensor:
        """Unit features (..., C, E) of the tower's output for some classes."""
        learned = l2_normalize(raw)
        if self.fixed is None:
            return learned
        return l2_normalize(self.weight * learned + self.fixed[classes])

    def features(self, contexts: Tensor) -> Tensor:
        """Unit classifiers (U, N, E) under each of U contexts, (U, M, D) or (U, N, M, D)."""
        if self.chunk is None:
            return self._encode(contexts, slice(None))
        encoded = contexts.new_empty(
            len(contexts), self.classes, self.tower.projection.shape[1]
        )
        for classes in self._chunks(len(contexts)):
            encoded[:, classes] = self._encode(contexts, classes)
        return encoded

    def gradient(self, contexts: Tensor, cotangent: Tensor) -> Tensor:
        """Gradient, shaped as ``contexts``, of a loss whose gradient by the features is given."""
        cotangent, factor = near_one(cotangent)
        total = torch.zeros_like(contexts)
        with torch.enable_grad():
            for classes in self._chunks(len(contexts)):
                leaf = contexts.detach().requires_grad_()
                features = self._encode(leaf, classes)
                total += torch.autograd.grad(features, leaf, cotangent[:, classes])[0]
        return total / factor.view(-1, *[1] * (contexts.ndim - 1))

    def _chunks(self, contexts: int) -> tuple[Tensor, ...]:
        """Classes of similar text length, as many as fit with that many contexts each."""
        return torch.split(self.order, max(1, (self.chunk or self.classes) // contexts))

    def _encode(self, contexts: Tensor, classes: Tensor | slice) -> Tensor:
        """Unit classifiers (U, C, E) of some classes."""
        U, ids = len(contexts), self.ids[classes]
        each = contexts[:, None] if contexts.ndim == 3 else contexts[:, classes]
        own = each.expand(-1, len(ids), -1, -1)
        raw = self.tower(
            ids.repeat(U, 1),
            context=own.flatten(0, 1),
            chunk=None if self.chunk is None else U * len(ids),
            ends=None if self.chunk is not None else self._host_ends.repeat(U),
        )
        return self.combine(raw.view(U, len(ids), -1), classes)
