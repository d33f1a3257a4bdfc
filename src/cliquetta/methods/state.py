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
from cliquetta.methods.base import Adapter
from cliquetta.methods.building.few_shot import FewShotAdapter
from cliquetta.methods.registry import create_method, get_method, method_config
from cliquetta.model.clip import CLIP
from cliquetta.model.in_memory import from_model
from cliquetta.prompts.classes import ClassPrompts, as_prompts
from cliquetta.tensor_file import pack, pack_raw, unpack

FORMAT = "cliquetta-state-1"
MEMORY, FITTED, EXTRA = "memory.", "fitted.", "extra."
"""Prefixes of the tensors of a file: of the method, of a few-shot fit, of the caller."""
DIFFERENCES = {
    "method": "another method",
    "model": "another model",
    "weights": "other weights of the model",
    "classes": "another class list or other templates",
    "config": "another config",
    "fitted": "another few-shot fit",
}
ROOM = (
    2**28
)  # Bytes that a file may have beyond the memory, for its header and what a caller adds.


class StateMismatchError(UserError):
    """A saved state that belongs to another method, model, class list or config."""


@dataclass(frozen=True)
class SavedState:
    """The contents of a state file beside the memory."""

    extra: Mapping[str, Tensor]
    notes: Mapping[str, Any]
    classes_changed: bool = False
    """The file is of another class list: only what does not depend on the classes was loaded."""


def describe(adapter: Adapter) -> dict[str, Any]:
    """The properties that a state and the adapter that loads it must share."""
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
    return hashlib.sha256(pack_raw(dict(sorted(adapter.fitted.items())))).hexdigest()[
        :16
    ]


def plain_config(config: Any) -> Any:
    """A config dataclass as JSON types; tuples become lists."""
    is_config = dataclasses.is_dataclass(config) and not isinstance(config, type)
    values = dataclasses.asdict(config) if is_config else config
    return json.loads(json.dumps(values, sort_keys=True, default=str))


def pack_state(
    adapter: Adapter,
    *,
    extra: Mapping[str, Tensor] | None = None,
    notes: Mapping[str, Any] | None = None,
    fitted: bool = False,
) -> bytes:
    """Pack the memory, ``extra`` tensors, JSON ``notes`` and, with ``fitted``, a few-shot fit."""
    tensors = {MEMORY + name: value for name, value in adapter.state_dict().items()}
    if fitted:
        tensors |= {
            FITTED + name: value for name, value in (adapter.fitted or {}).items()
        }
    tensors |= {EXTRA + name: value for name, value in (extra or {}).items()}
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
    """The header of a state file, without its tensors."""
    return _checked(tensor_file.read_header(path, kind="state file"), str(path))


def read_fitted_method(path: Path | str) -> str:
    """Name of the few-shot method that a file was fitted for; other files are refused."""
    header = read_header(path)
    if header["fitted"] is None:
        raise UserError(f"{path} was not written by `cliquetta fit`, it is a state")
    return str(header["method"])


def load_state(
    adapter: Adapter, path: Path | str, *, other_classes: bool = False
) -> SavedState:
    """Let ``adapter`` continue from a file of :meth:`Adapter.save`; refuse one of another kind."""
    path = Path(path)
    size, names = path.stat().st_size, read_header(path).get("names", ())
    memory = sum(adapter.memory[name].nbytes for name in adapter.memory)
    largest = memory * max(1, len(names) // len(adapter.prompts) + 1) + ROOM
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
    """Build the adapter that a file was saved from, with what it had learned or was fitted to.

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
    model, header = from_model(model), read_header(path)
    names = tuple(header["names"])
    if classes is None:
        classes = ClassPrompts(names, tuple(header["templates"]), allow_duplicates=True)
    prompts, name = as_prompts(classes), header["method"]
    config = method_config(name, options=header["config"])
    seed = header["seed"] if seed is None else seed
    if header["fitted"] is None:
        adapter = create_method(name, model, prompts, config, seed=seed)
        load_state(adapter, path, other_classes=True)
        return adapter
    # Weights of another dtype hash differently although they are the same model's.
    same = header["weights"] == model.fingerprint or header["dtype"] != str(model.dtype)
    if header["model"] != model.id or not same:
        raise StateMismatchError(
            f"{path} was fitted on {header['model']} (weights {header['weights']}), this is "
            f"{model.id} ({model.fingerprint}): what was learned means nothing there; fit again"
        )
    tensors, _ = unpack(Path(path).read_bytes(), source=str(path), kind="state file")
    few_shot = get_method(name).adapter
    assert issubclass(few_shot, FewShotAdapter)  # no other is fitted
    fitted = few_shot.for_classes(_named(tensors, FITTED), names, prompts.names)
    return create_method(name, model, prompts, config, seed=seed, fitted=fitted)


def unpack_state(
    adapter: Adapter,
    data: bytes,
    *,
    source: str = "the state",
    other_classes: bool = False,
) -> SavedState:
    """Let ``adapter`` continue from :func:`pack_state`; ``source`` names the bytes in errors.

    Bytes of any origin may come in: nothing is executed, and the adapter is as it was
    if they are refused. With ``other_classes`` the ``class_free`` memory of another
    class list is loaded.
    """
    tensors, header = unpack(data, source=source, kind="state file")
    header = _checked(header, source)
    mine = describe(adapter)
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
    memory = _named(tensors, MEMORY)
    if classes_changed:
        shared = {
            name: value for name, value in memory.items() if name in adapter.class_free
        }
        adapter.reset()
        memory = {**adapter.state_dict(), **shared}
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


def _named(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name[len(prefix) :]: v for name, v in tensors.items() if name.startswith(prefix)
    }


def _checked(header: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The header, if it is one of ours."""
    if header.get("format") != FORMAT or "notes" not in header:
        raise UserError(
            f"{source} is not a state of a method: it was not written by Adapter.save"
        )
    return {key: value for key, value in header.items() if key != "format"}


def _difference(saved: Any, mine: Any) -> str:
    """Both values; of two configs only the fields that differ."""
    if isinstance(saved, dict) and isinstance(mine, dict):
        differing = sorted(
            k for k in saved.keys() | mine.keys() if saved.get(k) != mine.get(k)
        )
        return ", ".join(
            f"{k}: {saved.get(k)!r} there, {mine.get(k)!r} here" for k in differing
        )
    return f"{saved!r} there, {mine!r} here"
