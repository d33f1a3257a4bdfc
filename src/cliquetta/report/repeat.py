"""The command that repeats a run: it gives the same record again."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from cliquetta.errors import UnknownNameError
from cliquetta.evaluation.record import Record
from cliquetta.methods.building.registry import get_method, method_config
from cliquetta.methods.building.state import plain_config
from cliquetta.prompts.catalogue import list_templates, templates

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def repeat_command(record: Record) -> tuple[str, list[str]]:
    """Write ``cliquetta evaluate ...`` for a record's settings; also what it cannot say."""
    settings = record.settings
    remarks: list[str] = []
    words = ["cliquetta", "evaluate", "--dataset", record.dataset]

    # Only what differs from the preset is written.
    usual = settings["config"]
    try:
        get_method(record.method)
        usual = plain_config(method_config(record.method, record.preset))
    except UnknownNameError:
        remarks.append(
            f"{record.method} is not a method of this version: its plug-in is needed."
        )
    if settings["fitted"] is None:
        preset = f":{record.preset}" if record.preset else ""
        words += ["--method", f"{record.method}{preset}"]
        for key, value in settings["config"].items():
            if usual.get(key) != value:
                words += ["--set", f"{key}={_typed(value)}"]
    else:
        words += ["--fitted", "FILE"]
        remarks.append(
            "FILE is what `cliquetta fit` made; its content must have the fingerprint "
            f"{settings['fitted']}."
        )

    model = settings["model"]
    words += ["--model", str(model["id"]), "--seeds", str(record.seed)]
    words += _stream_options(settings["stream"])
    for template in _template_options(settings["prompts"]["templates"]):
        words += ["--templates", template]
    dtype = str(model["dtype"])
    words += ["--dtype", _DTYPES.get(dtype, dtype)]
    device = str(record.environment.get("device", ""))
    if device:
        words += ["--device", device]
    words.append("--no-baseline")

    stream = settings["stream"]
    if stream["seed"] != record.seed or stream["view_seed"] not in (None, record.seed):
        remarks.append(
            "The order or the views had another seed than the method: use the library."
        )
    return shlex.join(words), remarks


def _stream_options(stream: Mapping[str, Any]) -> list[str]:
    """Write the order of a stream with what belongs to it."""
    words = ["--batch-size", str(stream["batch_size"]), "--order", stream["order"]]
    present = map(str, dict.fromkeys(stream.get("present", ())))
    values = {
        "gamma": stream["dirichlet"],
        "present": "-".join(present) or None,
        "imbalance": stream.get("imbalance"),
        "length": stream.get("length"),
        "limit": stream["limit"],
    }
    for name, value in values.items():
        if value is not None:
            words += [f"--{name}", str(value)]
    return words


def _template_options(prompts: Sequence[str]) -> Sequence[str]:
    """Return the name of a set of templates if it is one, else the templates."""
    for name in list_templates() if len(prompts) > 1 else ():
        if list(templates(name)) == list(prompts):
            return [name]
    return prompts


def _typed(value: Any) -> str:
    """Write a value as ``--set`` reads it."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)
