"""The state of a method in a file: safetensors with a JSON header."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cliquetta import tensor_file
from cliquetta.errors import UserError
from cliquetta.methods.building.base import Adapter
from cliquetta.methods.building.few_shot import FewShotAdapter
from cliquetta.methods.building.registry import create_method, get_method, method_config
from cliquetta.model.clip import CLIP
from cliquetta.model.in_memory import from_model
from cliquetta.prompts.classes import ClassPrompts, as_prompts
from cliquetta.tensor_file import pack, pack_raw, unpack

FORMAT = "cliquetta-state-1"
# Prefixes of the tensors of a file: of the method, of a few-shot fit, of the caller.
MEMORY = "memory."
FITTED = "fitted."
EXTRA = "extra."
DIFFERENCES = {
    "method": "another method",
    "model": "another model",
    "weights": "other weights of the model",
    "classes": "another class list or other templates",
    "config": "another config",
    "fitted": "another few-shot fit",
}
# Bytes that a file may have beyond the memory, for its header and what a caller adds.
ROOM = 2**28


class StateMismatchError(UserError):
    """A saved state that belongs to another method, model, class list or config."""


@dataclass(frozen=True)
class SavedState:
    """The contents of a state file beside the memory."""

    extra: Mapping[str, Tensor]
    notes: Mapping[str, Any]
    classes_changed: bool = False
    """Whether only what does not depend on the file's classes was loaded."""


def describe(adapter: Adapter) -> dict[str, Any]:
    """List the properties that a state and the adapter that loads it must share."""
    return {
        "method": adapter.name,
        "config": plain_config(adapter.config),
        "classes": adapter.prompts.fingerprint,
        "model": adapter.model.id,
        "weights": adapter.model.fingerprint,
        "fitted": fitted_fingerprint(adapter),
    }


def fitted_fingerprint(adapter: Adapter) -> str | None:
    """Hash what a few-shot method was built from; ``None`` for the others."""
    if adapter.fitted is None:
        return None
    by_name = dict(sorted(adapter.fitted.items()))
    digest = hashlib.sha256(pack_raw(by_name))
    return digest.hexdigest()[:16]


def plain_config(config: Any) -> Any:
    """Turn a config dataclass into JSON types; tuples become lists."""
    values = config
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        values = dataclasses.asdict(config)
    text = json.dumps(values, sort_keys=True, default=str)
    return json.loads(text)


def pack_state(
    adapter: Adapter,
    *,
    extra: Mapping[str, Tensor] | None = None,
    notes: Mapping[str, Any] | None = None,
    fitted: bool = False,
) -> bytes:
    """Pack memory, ``extra`` tensors, JSON ``notes`` and, if ``fitted``, the fit."""
    tensors = _prefixed(MEMORY, adapter.state_dict())
    if fitted and adapter.fitted:
        tensors |= _prefixed(FITTED, adapter.fitted)
    if extra:
        tensors |= _prefixed(EXTRA, extra)
    header = {
        "format": FORMAT,
        **describe(adapter),
        "names": list(adapter.prompts.names),
        "templates": list(adapter.prompts.templates),
        "seed": adapter.seed,
        "dtype": str(adapter.model.dtype),
        "torch": torch.__version__,
        "notes": dict(notes or {}),
    }
    return pack(tensors, header)


def read_header(path: Path | str) -> dict[str, Any]:
    """Read the header of a state file, without its tensors."""
    header = tensor_file.read_header(path, kind="state file")
    return _checked(header, str(path))


def read_fitted_method(path: Path | str) -> str:
    """Read the few-shot method that a file was fitted for; other files are refused."""
    header = read_header(path)
    if header["fitted"] is None:
        raise UserError(f"{path} was not written by `cliquetta fit`, it is a state")
    return str(header["method"])


def load_state(
    adapter: Adapter, path: Path | str, *, other_classes: bool = False
) -> SavedState:
    """Let an adapter continue from a file of :meth:`Adapter.save`."""
    path = Path(path)
    size = path.stat().st_size
    names = read_header(path).get("names", ())

    # The file may be of a longer class list, and its memory in proportion.
    memory = sum(adapter.memory[name].nbytes for name in adapter.memory)
    times = len(names) // len(adapter.prompts) + 1
    largest = memory * times + ROOM
    if size > largest:
        raise UserError(
            f"{path} has {size:,} bytes, where a state of {adapter.name} has at most "
            f"{largest:,}: it is damaged, or was not written by Adapter.save"
        )
    return unpack_state(
        adapter, path.read_bytes(), source=str(path), other_classes=other_classes
    )


def load_method(
    path: Path | str,
    model: CLIP | nn.Module,
    classes: ClassPrompts | Sequence[str] | None = None,
    *,
    seed: int | None = None,
) -> Adapter:
    """Build the adapter that a file was saved from, with what it had learned.

    >>> from cliquetta import create_method, create_model
    >>> model = create_model("micro")
    >>> create_method("tda", model, ["cat", "dog"]).save("tda.safetensors")
    >>> load_method("tda.safetensors", model).prompts.names
    ('cat', 'dog')

    Args:
        path: A file of :meth:`Adapter.save`, ``cliquetta predict --state`` or
            ``cliquetta fit``.
        model: The model that it was saved with.
        classes: Class names; those of the file if not given. Others suit methods with
            memory that does not depend on the classes, and few-shot methods; of those,
            Tip-Adapter and class-specific CoOp need a selection of the file's.
        seed: Of the method's own random draws; that of the file if not given.

    Returns:
        An adapter that continues from the file.

    Raises:
        UserError: No such file, another model, or classes that the method does not
            know.

    """
    model = from_model(model)
    header = read_header(path)
    name = header["method"]

    # Classes, config and seed are the file's, unless others are asked for.
    names = tuple(header["names"])
    if classes is None:
        templates = tuple(header["templates"])
        classes = ClassPrompts(names, templates, allow_duplicates=True)
    prompts = as_prompts(classes)
    _refuse_other_settings(header, get_method(name).config, path)
    config = method_config(name, options=header["config"])
    seed = header["seed"] if seed is None else seed

    # A stream's state goes into an adapter; a fit is what one is built from.
    if header["fitted"] is None:
        adapter = create_method(name, model, prompts, config, seed=seed)
        load_state(adapter, path, other_classes=True)
        return adapter

    _refuse_other_model(header, model, path)
    tensors, _ = unpack(Path(path).read_bytes(), source=str(path), kind="state file")
    few_shot = get_method(name).adapter
    assert issubclass(few_shot, FewShotAdapter)  # no other is fitted
    fitted = few_shot.for_classes(_named(tensors, FITTED), names, prompts.names)
    return create_method(name, model, prompts, config, seed=seed, fitted=fitted)


def _refuse_other_settings(
    header: Mapping[str, Any], config: type[Any], path: Path | str
) -> None:
    """Refuse a file whose settings the method no longer has: its memory is another one."""
    known = {field.name for field in dataclasses.fields(config)}
    gone = sorted(set(header["config"]) - known)
    if gone:
        first = ", ".join(gone[:3])
        more = f" and {len(gone) - 3} more" if len(gone) > 3 else ""
        raise StateMismatchError(
            f"{path} was saved by another version of cliquetta: {header['method']} no "
            f"longer has the settings {first}{more}; start a new state, or read the "
            "file with the version that wrote it"
        )


def _refuse_other_model(
    header: Mapping[str, Any], model: CLIP, path: Path | str
) -> None:
    """Refuse what was fitted on another model."""
    # Weights of another dtype hash differently although they are the same model's.
    is_same_type = header["dtype"] == str(model.dtype)
    has_other_weights = is_same_type and header["weights"] != model.fingerprint
    if header["model"] != model.id or has_other_weights:
        raise StateMismatchError(
            f"{path} was fitted on {header['model']} (weights {header['weights']}), this is "
            f"{model.id} ({model.fingerprint}): what was learned means nothing there; fit again"
        )


def unpack_state(
    adapter: Adapter,
    data: bytes,
    *,
    source: str = "the state",
    other_classes: bool = False,
) -> SavedState:
    """Let an adapter continue from the bytes of :func:`pack_state`.

    Bytes of any origin may come in: nothing is executed, and the adapter is as it was
    if they are refused. ``source`` names them in errors. With ``other_classes`` the
    ``class_free`` memory of another class list is loaded.
    """
    tensors, header = unpack(data, source=source, kind="state file")
    header = _checked(header, source)

    # The adapter must be built as that of the file was.
    mine = describe(adapter)
    if header["method"] == adapter.name:
        _refuse_other_settings(header, type(adapter.config), source)
    differing = [field for field in DIFFERENCES if header.get(field) != mine[field]]
    classes_changed = (
        "classes" in differing and other_classes and adapter.outlives_classes
    )
    if classes_changed:
        differing.remove("classes")
    if differing:
        field = differing[0]
        remedy = "build the adapter as it was"
        if field == "classes" and other_classes:
            remedy = (
                f"{adapter.name} learns about its classes only, so give it that list"
            )
        raise StateMismatchError(
            f"{source} was saved with {DIFFERENCES[field]} "
            f"({_difference(header.get(field), mine[field])}); {remedy}, or start without the state"
        )

    # Of another class list, only what does not depend on the classes.
    memory = _named(tensors, MEMORY)
    if classes_changed:
        adapter.reset()
        start = adapter.state_dict()
        shared = {name: memory[name] for name in memory if name in adapter.class_free}
        memory = {**start, **shared}
    adapter.load_state_dict(memory)
    return SavedState(_named(tensors, EXTRA), header["notes"], classes_changed)


def merge_states(
    adapter: Adapter,
    states: Sequence[Path | str | bytes],
    start: Path | str | bytes | None = None,
) -> None:
    """Let ``adapter`` continue from what several equally built ones learned.

    Each of them saw a part of a stream: the shards of a list, or the actors of a
    cluster. TDA's and DMN's caches become those of one adapter that saw all parts;
    learned parameters are averaged. One state alone is loaded as it is.

    Args:
        adapter: Built like those that learned.
        states: Files of :meth:`Adapter.save`, or bytes of :func:`pack_state`.
        start: The same of the state that all of them began with, if they did not begin
            anew.

    Raises:
        StateMismatchError: A state belongs to another method, model, class list or
            config.
        UserError: The method cannot join states.

    """
    # The adapter reads every state, and so refuses those of others.
    memories = []
    for state in states if start is None else [start, *states]:
        if isinstance(state, bytes):
            unpack_state(adapter, state)
        else:
            load_state(adapter, state)
        memories.append(adapter.state_dict())
    shared = None if start is None else memories.pop(0)
    if len(memories) > 1:
        adapter.load_state_dict(adapter.merge(memories, shared))


def _prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Put a prefix before the names."""
    return {prefix + name: value for name, value in tensors.items()}


def _named(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Select the tensors with a prefix, by their names without it."""
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }


def _checked(header: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the header; one that is not ours is refused."""
    if header.get("format") != FORMAT or "notes" not in header:
        raise UserError(
            f"{source} is not a state of a method: it was not written by Adapter.save"
        )
    return {key: value for key, value in header.items() if key != "format"}


def _difference(saved: Any, mine: Any) -> str:
    """Write both values; of two configs only the fields that differ."""
    if not (isinstance(saved, dict) and isinstance(mine, dict)):
        return f"{saved!r} there, {mine!r} here"

    parts = []
    for field in sorted(saved.keys() | mine.keys()):
        there = saved.get(field)
        here = mine.get(field)
        if there != here:
            parts.append(f"{field}: {there!r} there, {here!r} here")
    return ", ".join(parts)
