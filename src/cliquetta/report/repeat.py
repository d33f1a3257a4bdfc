"""The command that repeats a run: it gives the same record again."""

import shlex
from dataclasses import dataclass
from typing import Any

from cliquetta.errors import UnknownNameError
from cliquetta.evaluation.record import Record
from cliquetta.methods.registry import get_method, method_config
from cliquetta.methods.state import plain_config
from cliquetta.prompts.catalogue import list_templates, templates

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class Repeat:
    """A command line, and what it cannot say."""

    command: str
    remarks: tuple[str, ...] = ()


def repeat_command(record: Record) -> Repeat:
    """``cliquetta evaluate ...`` for the settings of a record."""
    settings = record.settings
    stream, model = settings["stream"], settings["model"]
    words = ["cliquetta", "evaluate", "--dataset", record.dataset]
    remarks: list[str] = []
    changed = _changed_options(record, remarks)
    if settings["fitted"] is None:
        words += ["--method", record.method + (f":{record.preset}" if record.preset else "")]
        for key, value in changed.items():
            words += ["--set", f"{key}={_typed(value)}"]
    else:
        words += ["--fitted", "FILE"]
        remarks.append(
            "FILE is what `cliquetta fit` made; its content must have the fingerprint "
            f"{settings['fitted']}."
        )
    words += ["--model", str(model["id"]), "--seeds", str(record.seed)]
    words += ["--batch-size", str(stream["batch_size"])]
    words += ["--order", stream["order"]]
    if stream["dirichlet"] is not None:
        words += ["--gamma", str(stream["dirichlet"])]
    if "present" in stream:
        words += ["--present", "-".join(map(str, dict.fromkeys(stream["present"])))]
    for name in ("imbalance", "length"):
        if name in stream:
            words += [f"--{name}", str(stream[name])]
    if stream["limit"] is not None:
        words += ["--limit", str(stream["limit"])]
    for given in _templates(settings["prompts"]["templates"]):
        words += ["--templates", given]
    words += ["--dtype", _DTYPES.get(str(model["dtype"]), str(model["dtype"]))]
    device = str(record.environment.get("device", ""))
    if device:
        words += ["--device", device]
    words.append("--no-baseline")
    if stream["seed"] != record.seed or stream["view_seed"] not in (None, record.seed):
        remarks.append("The order or the views had another seed than the method: use the library.")
    return Repeat(shlex.join(words), tuple(remarks))


def _changed_options(record: Record, remarks: list[str]) -> dict[str, Any]:
    """Fields of the config that differ from the preset."""
    own = dict(record.settings["config"])
    try:
        get_method(record.method)
        usual = plain_config(method_config(record.method, record.preset))
    except UnknownNameError:
        remarks.append(f"{record.method} is not a method of this version: its plug-in is needed.")
        return {}
    return {key: value for key, value in own.items() if usual.get(key) != value}


def _typed(value: Any) -> str:
    """A value as ``--set`` reads it."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)


def _templates(given: list[str]) -> list[str]:
    """The name of the set that holds exactly these templates, else all of them."""
    if len(given) > 1:
        for name in list_templates():
            if list(templates(name)) == list(given):
                return [name]
    return list(given)
