"""A class list with the templates that turn it into text."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cliquetta.errors import UserError

if TYPE_CHECKING:  # arguments are checked before torch is imported
    from torch import Tensor

DEFAULT_TEMPLATE = "a photo of a {}."


@dataclass(frozen=True, eq=False)
class ClassPrompts:
    """Class names with templates; immutable, equal and hashed by content.

    ``features`` (N, E) replaces the text tower where only embeddings are available;
    text then stays fixed, and methods that learn text refuse to run. Names must differ
    unless ``allow_duplicates`` is set (the curated ImageNet list holds two names
    twice).
    """

    names: tuple[str, ...]
    templates: tuple[str, ...] = (DEFAULT_TEMPLATE,)
    features: Tensor | None = None
    allow_duplicates: bool = False

    def __post_init__(self) -> None:
        argument: object = self.names
        is_list = not isinstance(argument, str)
        names = tuple(self.names) if is_list else ()
        if not is_list or not all(isinstance(name, str) for name in names):
            raise UserError(
                f"class names are a list such as ['cat', 'dog'], got {argument!r}"
            )
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "templates", tuple(self.templates))
        if not self.names:
            raise UserError("no class names: give at least one")
        blank = [i for i, name in enumerate(self.names) if not name.strip()]
        if blank:
            raise UserError(f"class name {blank[0]} is empty; remove the empty line")
        twice = [name for name, count in Counter(self.names).items() if count > 1]
        if twice and not self.allow_duplicates:
            raise UserError(
                f"class names must differ, given twice: {', '.join(twice[:5])}"
            )
        if not self.templates:
            raise UserError(
                f"no templates: give at least one, such as {DEFAULT_TEMPLATE!r}"
            )
        for template in self.templates:
            if template.count("{}") != 1:
                raise UserError(
                    f"a template holds {{}} once for the class name, got {template!r}"
                )
        if self.features is not None and self.features.shape[0] != len(self.names):
            message = f"{self.features.shape[0]} text features for {len(self.names)} class names"
            raise UserError(message)

    def __len__(self) -> int:
        return len(self.names)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClassPrompts) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def texts(self, template: str) -> list[str]:
        """Write every class in one template; underscores in names become spaces."""
        return [template.replace("{}", name.replace("_", " ")) for name in self.names]

    @property
    def fingerprint(self) -> str:
        """Hash of names, templates and fixed features."""
        # Features count as well: the same names may stand for other ones.
        text = json.dumps([self.names, self.templates])
        digest = hashlib.sha256(text.encode())
        if self.features is not None:
            features = self.features.detach()
            features = features.float().cpu()
            digest.update(features.numpy().tobytes())
        return digest.hexdigest()[:16]


def as_prompts(classes: ClassPrompts | Sequence[str]) -> ClassPrompts:
    """Give class names the default template; prompts stay as they are."""
    if isinstance(classes, ClassPrompts):
        return classes
    return ClassPrompts(classes)  # type: ignore[arg-type]  # made a tuple there
