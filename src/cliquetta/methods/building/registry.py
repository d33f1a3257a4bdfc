"""The list of methods: adding one is one file with one ``@register`` line.

A package of yours adds methods, too: its ``pyproject.toml`` names the module that
    registers them.

.. code-block:: toml

    [project.entry-points."cliquetta.methods"]
    my_method = "my_package.my_method"

A file of yours adds methods without a package: ``--plugin my_method.py`` on the command
line, or import it before you name the method.
"""

import dataclasses
import importlib.util
import inspect
import pkgutil
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from typing import Any, TypeVar, get_type_hints

from torch import Tensor, nn

from cliquetta.errors import UserError, look_up
from cliquetta.methods.building.allocation import AllocationLimit, half_of_memory
from cliquetta.methods.building.base import Adapter
from cliquetta.methods.building.config import field_types, parse
from cliquetta.methods.building.feature_level import FeatureLevel
from cliquetta.methods.building.index import PLUG_INS, plug_in_files
from cliquetta.model.clip import CLIP, MissingCapabilityError
from cliquetta.model.in_memory import from_model
from cliquetta.model.wrapped import FeaturesOnly
from cliquetta.prompts.classes import ClassPrompts, as_prompts

DEFAULT_METHOD = "domain_norm"  # The method wherever naming one is optional.

A = TypeVar("A", bound=type[Adapter])


@dataclass(frozen=True)
class MethodEntry:
    """One registered method: how to build it, with which config, and what it is."""

    name: str
    adapter: type[Adapter]
    config: type[Any]
    summary: str
    paper: str
    presets: Mapping[str, Any] = field(default_factory=dict)
    tuned_by_authors: frozenset[str] = frozenset()
    """Presets of constants chosen per dataset."""
    fit: Callable[..., Mapping[str, Any]] | None = None
    """Learns what a few-shot method is made of."""
    setting: str = ""  # What the defaults are its authors' setting for.
    for_batches: bool = False
    """It compares the images of a batch: single ones are not its use."""


_ENTRIES: dict[str, MethodEntry] = {}


def register(
    name: str,
    *,
    config: type[Any] | None = None,
    summary: str = "",
    paper: str = "",
    presets: Mapping[str, Any] | None = None,
    tuned: Mapping[str, Any] | None = None,
    fit: Callable[..., Mapping[str, Any]] | None = None,
    setting: str = "",
    for_batches: bool = False,
) -> Callable[[A], A]:
    """Make a class decorator that enters an adapter under ``name``.

    Args:
        name: The word for commands and :func:`cliquetta.create_method`.
        config: The class of its settings; by default what the class annotates as
            ``config``.
        summary: One line for lists; by default the first line of the class's docstring.
        paper: The citation; by default what begins the second paragraph of the module's
            docstring, up to the year.
        presets: Settings by name.
        tuned: Presets whose constants the authors chose per dataset.
        fit: What a few-shot method learns from labelled images; see :class:`FewShot`.
        setting: Data that the defaults are its authors' setting for, such as
            ``ImageNet``.
        for_batches: Whether it is made for batches of several images.

    Returns:
        The decorator, which returns the class as it is.

    Raises:
        UserError: When it is used: the name is taken.

    """

    def enter(adapter: A) -> A:
        if name in _ENTRIES:
            raise UserError(f"a method named {name!r} is registered already")
        settings = config or get_type_hints(adapter).get("config")
        if settings is None:
            raise TypeError(
                f"{adapter.__name__} names no config: annotate `config: ItsConfig`"
            )
        docstring = adapter.__doc__ or ""
        first_line, _, _ = docstring.partition("\n")
        _ENTRIES[name] = MethodEntry(
            name=name,
            adapter=adapter,
            config=settings,
            summary=summary or first_line.removesuffix("."),
            paper=paper or _citation(adapter),
            presets={**(tuned or {}), **(presets or {})},
            tuned_by_authors=frozenset(tuned or ()),
            fit=fit,
            setting=setting,
            for_batches=for_batches,
        )
        adapter.name = name
        return adapter

    return enter


def _citation(adapter: type[Adapter]) -> str:
    """Read authors, title, venue and year where a module's second paragraph starts."""
    module = inspect.getdoc(inspect.getmodule(adapter)) or ""
    _, _, rest = module.partition("\n\n")
    second, _, _ = rest.partition("\n\n")
    paragraph = " ".join(second.split())

    # One author, two, or the first and "et al.", up to the first year of this century.
    citation = re.match(r"[^.,]+( et al\.| and [^.,]+), .*?\b20\d\d\b", paragraph)
    return citation[0] if citation else ""


@cache
def _load_all() -> None:
    """Import all methods once, which registers them: ours, then plug-ins."""
    import cliquetta.methods as package

    for module in pkgutil.iter_modules(package.__path__):
        if not module.name.startswith("_"):
            importlib.import_module(f"{package.__name__}.{module.name}")
    for plug_in in entry_points(group=PLUG_INS):
        # One that is broken must not take the others with it.
        try:
            plug_in.load()
        except Exception as error:
            warnings.warn(
                f"plug-in {plug_in.name!r} ({plug_in.value}) could not be loaded and is left out: "
                f"{type(error).__name__}: {error}",
                stacklevel=1,
            )


def _load_files() -> None:
    """Import the files of methods that the environment names, each once."""
    for file in plug_in_files():
        name = f"cliquetta_plugin_{file.stem}"
        if name in sys.modules:
            continue
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise UserError(f"{file} is no Python file")
        module = importlib.util.module_from_spec(spec)
        # dataclasses and pickle look a class's module up there
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            raise UserError(
                f"plug-in {file}: {type(error).__name__}: {error}"
            ) from error


def list_methods() -> list[str]:
    """List the names of all methods."""
    _load_all()
    _load_files()
    return sorted(_ENTRIES)


def method_entries() -> list[MethodEntry]:
    """List the entries of all methods, by name."""
    return [_ENTRIES[name] for name in list_methods()]


def get_method(name: str) -> MethodEntry:
    """Find the entry of a name; an error for another suggests the nearest."""
    _load_all()
    _load_files()
    return look_up("method", name, _ENTRIES)


def require_features_only(
    adapter: type[Adapter], name: str, *, towers: bool = False
) -> None:
    """Raise unless features, or with ``towers`` the model, are all that is needed."""
    if issubclass(adapter, FeatureLevel) and (towers or not adapter.needs):
        return
    names = []
    for entry in method_entries():
        needs_more = entry.adapter.needs or entry.fit
        if issubclass(entry.adapter, FeatureLevel) and not needs_more:
            names.append(entry.name)
    raise MissingCapabilityError(
        f"{name} needs images and a model, not features alone; methods that run on features are "
        f"{', '.join(names)}"
    )


def method_config(
    name: str, preset: str | None = None, options: Mapping[str, Any] | None = None
) -> Any:
    """Build the config of a method: defaults or a preset, with options replaced.

    Options may be strings (as typed on a command line); they are converted to the
    field's type.
    """
    entry = get_method(name)
    if preset is None:
        config = entry.config()
    else:
        config = look_up(f"preset of {name}", preset, entry.presets)

    # Values typed on a command line get the type of their field.
    kinds = field_types(entry.config)
    changes = {}
    for option, value in (options or {}).items():
        kind = look_up(f"option of {name}", option, kinds)
        changes[option] = parse(f"{name}.{option}", value, kind)
    return dataclasses.replace(config, **changes)


def own_config(entry: MethodEntry, config: Any) -> Any:
    """Return the config of a method, by default its own; that of another is refused."""
    if config is None:
        return entry.config()
    if not isinstance(config, entry.config):
        expected = entry.config.__name__
        actual = type(config).__name__
        raise TypeError(f"{entry.name} takes a {expected}, got {actual}")
    return config


def create_method(
    name: str,
    model: CLIP | nn.Module,
    classes: ClassPrompts | Sequence[str],
    config: Any = None,
    *,
    seed: int = 0,
    fitted: Mapping[str, Tensor] | None = None,
) -> Adapter:
    """Build a method by name.

    >>> from cliquetta import create_model
    >>> method = create_method("zero_shot", create_model("micro"), ["cat", "dog"])

    Args:
        name: One of :func:`list_methods`.
        model: The CLIP to adapt, or a module that :func:`cliquetta.from_model` takes.
        classes: Class names, or a :class:`ClassPrompts` with templates.
        config: The method's config; its defaults if not given.
        seed: Of the method's own random draws and of the views it asks for.
        fitted: What the ``fit`` of a few-shot method learned for these classes; needed
            there and refused elsewhere.

    Returns:
        An adapter that has seen nothing yet.

    Raises:
        UserError: An unknown name, unusable class names, a model that lacks what is
            needed, or a memory of more than half of this machine's.

    """
    prompts = as_prompts(classes)
    entry = get_method(name)
    model = from_model(model)
    config = own_config(entry, config)
    if isinstance(model, FeaturesOnly):
        require_features_only(entry.adapter, name)

    # A method that learns while it predicts.
    if entry.fit is None:
        if fitted is not None:
            raise UserError(
                f"{name} is not fitted on labelled images: build it without `fitted`"
            )
        with AllocationLimit(half_of_memory()):
            return entry.adapter(model, prompts, config, seed=seed)

    # A few-shot method.
    if fitted is None:
        raise UserError(
            f"{name} learns from labelled images first: fit it with `cliquetta fit --method {name} "
            "--shots 16 --dataset ... --out FILE` and use that file, or give `fitted`"
        )
    few_shot: Callable[..., Adapter] = entry.adapter
    return few_shot(model, prompts, config, seed=seed, fitted=fitted)
