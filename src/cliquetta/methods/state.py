"""The state of a method in a file: safetensors with a JSON header."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cliquetta import tensor_file
from cliquetta.atomic import write_atomically
from cliquetta.errors import UserError
from cliquetta.methods.base import Adapter
from cliquetta.methods.building.config import current_names
from cliquetta.methods.registry import create_method, method_config
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.tensor_file import pack, pack_raw, unpack

FORMAT = "cliquetta-state-1"
MEMORY, EXTRA = "memory.", "extra."
"""Prefixes of the tensors of a file: of the method, of the caller."""
ROOM = 2**28
"""Bytes that a file may have beyond the method's memory, for its header and what a caller adds."""


class StateMismatchError(UserError):
    """A saved state that belongs to another method, model, class list or config."""


@dataclass(frozen=True)
class SavedState:
    """What a state file holds beside the memory."""

    header: Mapping[str, Any]
    extra: Mapping[str, Tensor]
    notes: Mapping[str, Any]
    classes_changed: bool = False
    """The file is of another class list: only what does not depend on the classes was taken."""


def describe(adapter: Adapter) -> dict[str, Any]:
    """What a state must agree on with the adapter that takes it up."""
    return {
        "method": adapter.name,
        "config": plain_config(adapter.config),
        "classes": adapter.prompts.fingerprint,
        "model": adapter.model.id,
        "weights": adapter.model.fingerprint,
        "fitted": fitted_fingerprint(adapter),
    }


def fitted_fingerprint(adapter: Adapter) -> str | None:
    """Hash of what a few-shot method was built from; ``None`` for the others."""
    if adapter.fitted is None:
        return None
    return hashlib.sha256(pack_raw(dict(sorted(adapter.fitted.items())))).hexdigest()[:16]


def plain_config(config: Any) -> Any:
    """A config dataclass as JSON types; tuples become lists."""
    is_config = dataclasses.is_dataclass(config) and not isinstance(config, type)
    values = dataclasses.asdict(config) if is_config else config
    return json.loads(json.dumps(values, sort_keys=True, default=str))


def save_state(
    adapter: Adapter,
    path: Path | str,
    *,
    extra: Mapping[str, Tensor] | None = None,
    notes: Mapping[str, Any] | None = None,
) -> None:
    """Write the adapter's memory; the file at ``path`` is replaced as a whole or not at all.

    ``extra`` tensors and ``notes`` (JSON types) of the caller are kept beside it.
    """
    write_atomically(Path(path), pack_state(adapter, extra=extra, notes=notes))


def pack_state(
    adapter: Adapter,
    *,
    extra: Mapping[str, Tensor] | None = None,
    notes: Mapping[str, Any] | None = None,
) -> bytes:
    """What :func:`save_state` writes, for callers who send it elsewhere than to a file."""
    tensors = {MEMORY + name: value for name, value in adapter.state_dict().items()}
    tensors |= {EXTRA + name: value for name, value in (extra or {}).items()}
    header = {
        "format": FORMAT,
        **describe(adapter),
        "names": list(adapter.prompts.names),
        "templates": list(adapter.prompts.templates),
        "seed": adapter.seed,
        "torch": torch.__version__,
        "notes": dict(notes or {}),
    }
    return pack(tensors, header)


def read_header(path: Path | str) -> dict[str, Any]:
    """The header of a state file, without its tensors."""
    return _checked(tensor_file.read_header(path, kind="state file"), str(path))


def load_state(adapter: Adapter, path: Path | str, *, other_classes: bool = False) -> SavedState:
    """Let ``adapter`` continue from a file of :func:`save_state`; refuse one of another kind."""
    _check_size(adapter, Path(path))
    data = Path(path).read_bytes()
    return unpack_state(adapter, data, source=str(path), other_classes=other_classes)


def _check_size(adapter: Adapter, path: Path) -> None:
    """Refuse a file larger than the method's memory can be, before its tensors are read."""
    size, names = path.stat().st_size, read_header(path).get("names", ())
    memory = sum(adapter.memory[name].nbytes for name in adapter.memory)
    largest = memory * max(1, len(names) // len(adapter.prompts) + 1) + ROOM
    if size > largest:
        raise UserError(
            f"{path} has {size:,} bytes, where a state of {adapter.name} has at most "
            f"{largest:,}: it is damaged, or was not written by save_state"
        )


def restore_method(
    path: Path | str, model: CLIP, classes: ClassPrompts | Sequence[str] | None = None
) -> Adapter:
    """The adapter that a state was saved from, as it was.

    Args:
        path: A file of :func:`save_state`.
        model: The model that it was saved with.
        classes: Class names; those of the file if not given. Only a method with memory that does
            not depend on the classes takes others.

    Returns:
        An adapter that continues from the state.

    Raises:
        UserError: The file is no state, is of another model, or of a few-shot method, which is
            built from its fitted file.

    """
    header = read_header(path)
    if classes is None:
        if "names" not in header:
            raise UserError(f"{path} was saved without class names: give them")
        names, templates = tuple(header["names"]), tuple(header["templates"])
        classes = ClassPrompts(names, templates, allow_duplicates=True)
    config = method_config(header["method"], options=header["config"])
    adapter = create_method(header["method"], model, classes, config, seed=header["seed"])
    load_state(adapter, path, other_classes=True)
    return adapter


def unpack_state(
    adapter: Adapter, data: bytes, *, source: str = "the state", other_classes: bool = False
) -> SavedState:
    """Let ``adapter`` continue from :func:`pack_state`; ``source`` names the bytes in errors.

    Bytes of any origin may come in: they are parsed as safetensors and JSON, nothing is executed,
    and the adapter is as it was if they are refused. With ``other_classes`` a state of another
    class list is not refused by an adapter with memory that does not depend on the classes
    (``Adapter.class_free``), which is what it takes of it.
    """
    tensors, header = unpack(data, source=source, kind="state file")
    header = _checked(header, source)
    header["config"] = current_names(type(adapter.config), header["config"])
    mine = describe(adapter)
    asked, other_classes = other_classes, other_classes and adapter.outlives_classes
    other_classes = other_classes and header.get("classes") != mine["classes"]
    for field, what in (
        ("method", "another method"),
        ("model", "another model"),
        ("weights", "other weights of the model"),
        ("classes", "another class list or other templates"),
        ("config", "another config"),
        ("fitted", "another few-shot fit"),
    ):
        if header.get(field) != mine[field] and not (field == "classes" and other_classes):
            remedy = "build the adapter as it was, or start without the state"
            if field == "classes" and asked:
                remedy = (
                    f"{mine['method']} learns about its classes only, so give it that list, or "
                    "start without the state"
                )
            raise StateMismatchError(
                f"{source} was saved with {what} ({_difference(header.get(field), mine[field])}); "
                f"{remedy}"
            )
    found = {name[len(MEMORY) :]: v for name, v in tensors.items() if name.startswith(MEMORY)}
    if other_classes:
        kept = {name: value for name, value in found.items() if name in adapter.class_free}
        adapter.reset()
        found = {**adapter.state_dict(), **kept}
    adapter.load_state_dict(found)
    extra = {name[len(EXTRA) :]: v for name, v in tensors.items() if name.startswith(EXTRA)}
    return SavedState(header, extra, header["notes"], other_classes)


def merge_states(
    adapter: Adapter,
    states: Sequence[Path | str | bytes],
    start: Path | str | bytes | None = None,
) -> None:
    """Let ``adapter`` continue from what several equally built ones learned.

    Each of them saw a part of a stream: the shards of a list, or the actors of a cluster. TDA's
    and DMN's caches become those of one adapter that saw all parts; learned parameters are
    averaged. One state alone is taken up as it is.

    Args:
        adapter: Built like those that learned.
        states: Files of :func:`save_state`, or bytes of :func:`pack_state`.
        start: The same of the state that all of them began with, if they did not begin anew.

    Raises:
        StateMismatchError: A state belongs to another method, model, class list or config.
        UserError: The method cannot join states.

    """
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


def _checked(header: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The header, if it is one of ours."""
    if header.get("format") != FORMAT or "notes" not in header:
        raise UserError(f"{source} is not a state of a method: it was not written by save_state")
    return {key: value for key, value in header.items() if key != "format"}


def _difference(saved: Any, mine: Any) -> str:
    """Both values; of two configs only the fields that differ."""
    if isinstance(saved, dict) and isinstance(mine, dict):
        differing = sorted(k for k in saved.keys() | mine.keys() if saved.get(k) != mine.get(k))
        return ", ".join(f"{k}: {saved.get(k)!r} there, {mine.get(k)!r} here" for k in differing)
    return f"{saved!r} there, {mine!r} here"
