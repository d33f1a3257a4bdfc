"""Methods as they are asked for: name, preset, options, and a fitted file."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from cliquetta.methods.building.base import Adapter
from cliquetta.methods.building.registry import create_method, method_config
from cliquetta.methods.building.state import load_method, read_fitted_method
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts


@dataclass(frozen=True)
class MethodSpec:
    """Method in plain values that can be written, compared and sent.

    >>> str(MethodSpec.parse("scap:paper-views/lr=0.1"))
    'scap:paper-views/lr=0.1'
    """

    method: str
    preset: str | None = None
    options: tuple[tuple[str, Any], ...] = ()
    """Config fields that differ from the preset."""
    fitted: str | None = None
    """File of a few-shot method; it carries its own config."""

    @classmethod
    def parse(cls, written: str) -> "MethodSpec":
        """Read ``NAME[:PRESET][/FIELD=VALUE]...``; values are checked and converted.

        Raises:
            UserError: A name is unknown, or a value is none of its field's.

        """
        head, *pairs = written.split("/")
        name, _, preset = head.partition(":")

        options = {}
        for pair in pairs:
            field, _, value = pair.partition("=")
            options[field] = value

        spec = cls(name, preset or None)
        return spec.with_options(options)

    @classmethod
    def from_fitted(cls, path: Path | str) -> "MethodSpec":
        """Return the few-shot method that a file was fitted for."""
        return cls(read_fitted_method(path), fitted=str(path))

    def with_options(self, options: Mapping[str, Any]) -> "MethodSpec":
        """Return this method with config fields set, converted to their types."""
        usual = method_config(self.method, self.preset)
        config = method_config(self.method, self.preset, options)

        # Only what differs is kept: equal methods are written alike.
        differing = []
        for field in fields(config):
            value = getattr(config, field.name)
            if value != getattr(usual, field.name):
                differing.append((field.name, value))
        return replace(self, options=tuple(differing))

    def build(self, model: CLIP, prompts: ClassPrompts, *, seed: int = 0) -> Adapter:
        """Build the method for a model and a class list."""
        # A fitted file carries its own config.
        if self.fitted is not None:
            return load_method(self.fitted, model, prompts, seed=seed)

        config = method_config(self.method, self.preset, dict(self.options))
        return create_method(self.method, model, prompts, config, seed=seed)

    def __str__(self) -> str:
        written = self.method
        if self.preset:
            written += f":{self.preset}"
        for name, value in self.options:
            written += f"/{name}={value}"
        return written
