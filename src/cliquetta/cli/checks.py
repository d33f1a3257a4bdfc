"""Checks of arguments that need no torch, so that a wrong one is answered within a second.

Importing torch and the methods takes seconds. A command calls these checks first;
whatever else may be wrong is found later, by the functions that use the argument.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from cliquetta.errors import UnknownNameError, UserError, look_up
from cliquetta.methods.building.index import has_plug_ins, method_index, method_names

DTYPES = ("fp32", "bf16", "fp16", "float32", "bfloat16", "float16")
_DEVICE = re.compile(r"auto|cpu|mps(:\d+)?|cuda(:\d+)?")
_STDIN = "-"


def check_device(device: str) -> None:
    """Raise a :class:`UserError` unless a device is spelled as torch spells it."""
    if not _DEVICE.fullmatch(device):
        raise UserError(f"no device {device!r}: use auto, cpu, mps, cuda or cuda:N")


def check_dtype(dtype: str) -> None:
    """Raise a :class:`UserError` unless a precision is known."""
    look_up("dtype", dtype, dict.fromkeys(DTYPES))


def check_methods(
    written: str | None, *, preset: str | None = None, settings: Sequence[str] = ()
) -> None:
    """Raise a :class:`UserError` if a method, preset or option is misspelt.

    Args:
        written: Methods as ``NAME[:PRESET][/FIELD=VALUE]...``, comma-separated.
        preset: Preset of all of them.
        settings: Pairs ``KEY=VALUE`` of the only one.

    """
    methods = [part.strip() for part in (written or "").split(",") if part.strip()]
    if len(methods) > 1 and (settings or preset):
        raise UserError(
            f"--set and --preset are for one method, got {', '.join(methods)}"
        )
    for method in methods:
        head, *pairs = method.split("/")
        name, _, own_preset = head.partition(":")
        _check_method(name, own_preset or preset, [*pairs, *settings])


def _check_method(name: str, preset: str | None, pairs: Sequence[str]) -> None:
    names = method_names()
    if name not in names:
        if has_plug_ins():
            return  # theirs are known when their modules have been imported
        raise UnknownNameError("method", name, names)
    entry = method_index().get(name)
    if entry is None:
        return
    if preset:
        look_up(f"preset of {name}", preset, dict.fromkeys(entry.presets))
    for pair in pairs:
        option = pair.partition("=")[0].strip()
        if option:
            look_up(f"option of {name}", option, dict.fromkeys(entry.options))


def check_model(name: str) -> None:
    """Raise a :class:`UserError` if the name of a model, or of a shard in ``a,b``, is unknown."""
    from cliquetta.model.names import resolve_name

    for shard in name.split(","):
        resolve_name(shard)


def check_datasets(
    ids: Sequence[str], root: Path | str | None, *, order: str = ""
) -> None:
    """Raise a :class:`UserError` if an id is unknown, or its files are not there.

    Args:
        ids: Ids as users write them, also ``a>b``.
        root: Folder of known datasets.
        order: Order of the stream; some interleave datasets that are written ``a+b``.

    """
    from cliquetta.data.catalogue import check_dataset
    from cliquetta.data.samplers import SAMPLERS

    interleaves = order != "" and look_up("order", order, SAMPLERS).interleaves
    separator = "+" if interleaves else ">"
    parts = [part for written in ids for part in written.split(separator)]
    for id in dict.fromkeys(parts):
        check_dataset(id, root)


def check_classes(classes: str | None, templates: Sequence[str] | None = None) -> None:
    """Raise a :class:`UserError` if class names or templates cannot be read."""
    from cliquetta.prompts.catalogue import read_prompts, read_templates

    if classes is None:
        read_templates(templates or ())
    else:
        read_prompts(classes, templates or ())


def check_sources(sources: Sequence[str]) -> None:
    """Raise an error if a local folder, file or table of images is not there."""
    from cliquetta.data.remote import expand_glob, is_url, require_exists

    for source in sources:
        is_pattern = "{" in source  # shard-{000..012}.tar
        if source == _STDIN or is_url(source) or is_pattern:
            continue
        if expand_glob(source) is None:
            require_exists(source)


def check_file(path: Path | str | None, option: str) -> None:
    """Raise a :class:`UserError` if an input file is not there.

    Args:
        path: The file; ``None`` where the option was not given.
        option: How users write it, such as ``--fitted``.

    """
    if path is None or Path(path).expanduser().is_file():
        return
    reason = "it is a folder" if Path(path).is_dir() else "there is no such file"
    raise UserError(f"{option} {path}: {reason}")


def check_runs(runs: Sequence[Path]) -> None:
    """Raise a :class:`UserError` unless all folders and files of runs are there."""
    for run in runs:
        if not run.exists():
            raise UserError(f"no such folder: {run}")
