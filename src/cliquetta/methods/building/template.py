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
        """Start context (M, D): embeddings of the words before the class name."""
        self.ids = model.tokenizer(prompts.texts(first)).to(model.device)  # (N, L)
        self.positions = self.tower.word_positions(len(self.start))
        wanted = torch.tensor(model.tokenizer.encode(words), device=self.ids.device)
        has_other_words = bool((self.ids[:, self.positions] != wanted).any())
        if has_other_words or not (bare or len(self.start)):
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
        """Part of the other templates, added to ``weight`` u_learn, (N, E)."""
        if others and mix is not None:
            fixed = ClassPrompts(prompts.names, tuple(others), allow_duplicates=True)
            self.weight = 1 - mix
            self.fixed = mix * model.classifier(fixed)
        elif others:
            texts = [
                model.encode_text(prompts.texts(other), normalize=True)
                for other in others
            ]
            self.fixed = torch.stack(texts).sum(dim=0)

    @property
    def classes(self) -> int:
        """Number of classes, N."""
        return len(self.ids)

    def combine(self, raw: Tensor, classes: Tensor | slice = slice(None)) -> Tensor:
        """Mix the output for some classes with ``fixed``: unit features (..., C, E)."""
        learned = l2_normalize(raw)
        if self.fixed is None:
            return learned
        mixed = self.weight * learned + self.fixed[classes]
        return l2_normalize(mixed)

    def features(self, contexts: Tensor) -> Tensor:
        """Encode the classes (U, N, E) under U contexts, (U, M, D) or (U, N, M, D)."""
        if self.chunk is None:
            return self._encode(contexts, slice(None))
        U = len(contexts)
        E = self.tower.projection.shape[1]
        encoded = contexts.new_empty(U, self.classes, E)
        for classes in self._chunks(U):
            encoded[:, classes] = self._encode(contexts, classes)
        return encoded

    def gradient(self, contexts: Tensor, cotangent: Tensor) -> Tensor:
        """Pull a loss's gradient by the features back to the contexts."""
        cotangent, factor = near_one(cotangent)

        # Class by class, or many at once: the gradients add up.
        total = torch.zeros_like(contexts)
        with torch.enable_grad():
            for classes in self._chunks(len(contexts)):
                leaf = contexts.detach().requires_grad_()
                features = self._encode(leaf, classes)
                (part,) = torch.autograd.grad(features, leaf, cotangent[:, classes])
                total += part
        one_per_context = [-1] + [1] * (contexts.ndim - 1)
        return total / factor.view(one_per_context)

    def _chunks(self, contexts: int) -> tuple[Tensor, ...]:
        """Group classes of similar text length, as many as fit."""
        texts = self.chunk or self.classes
        return torch.split(self.order, max(1, texts // contexts))

    def _encode(self, contexts: Tensor, classes: Tensor | slice) -> Tensor:
        """Encode some classes under every context: unit features (U, C, E)."""
        U = len(contexts)
        ids = self.ids[classes]
        C = len(ids)

        # The context of every class, (U, C, M, D), which a shared one is for all.
        each = contexts[:, None] if contexts.ndim == 3 else contexts[:, classes]
        by_class = each.expand(-1, C, -1, -1)

        is_whole = self.chunk is None
        raw = self.tower(
            ids.repeat(U, 1),
            context=by_class.flatten(0, 1),
            chunk=None if is_whole else U * C,
            ends=self._host_ends.repeat(U) if is_whole else None,
        )
        return self.combine(raw.view(U, C, -1), classes)
