"""``cliquetta export``: an adapted model as a file for other runtimes."""

from pathlib import Path
from typing import Annotated

from cliquetta.cli.checks import check_classes, check_file, check_methods, check_model
from cliquetta.cli.command import (
    Common,
    Fitted,
    Preset,
    Settings,
    Templates,
    read_methods,
)
from cliquetta.errors import UserError
from cliquetta.model.names import NO_MODEL

EXAMPLES = """
cliquetta export --state photos.safetensors --out model.onnx
cliquetta export --state photos.safetensors --out small.onnx --half
cliquetta export --method zero_shot --classes names.txt --model ViT-B/16 --out model.pt2
cliquetta export --fitted tip.safetensors --classes names.txt --model ViT-B/16 --out model.onnx
"""


def export(
    common: Common,
    out: Annotated[Path, "Output file: .onnx, or .pt2 for torch.export."],
    state: Annotated[Path | None, "Adapted state, saved by `predict --state`."] = None,
    classes: Annotated[
        str | None,
        "File with one name per line, a,b,c, or a known list. Default: --state.",
    ] = None,
    method: Annotated[
        str | None, "Method, NAME or NAME:PRESET, without --state."
    ] = None,
    preset: Preset = None,
    settings: Settings = None,
    fitted: Fitted = None,
    model: Annotated[
        str | None, "Model name or path. Default: that of --state."
    ] = None,
    templates: Templates = None,
    half: Annotated[bool, "Image tower in float16."] = False,
    overwrite: Annotated[bool, "Replace an existing output file."] = False,
) -> None:
    """Write an adapted model as ONNX or torch.export.

    Pixels in, logits out, for any batch size. The image tower with what was learned,
    the text matrix, class names and preprocessing are in the file. `predict --frozen`
    gives the same predictions.

    A method that predicts an image only by means of the others in its batch, or from a
    memory that changes with every image, has nothing to export and says so.
    """
    check_methods(method, preset=preset, settings=settings or ())
    check_file(state, "--state")
    check_file(fitted, "--fitted")
    if classes is not None:
        check_classes(classes, templates)
    if model is None and state is None:
        raise UserError(NO_MODEL)
    if model is not None:
        check_model(model)

    from cliquetta.export import check_format, export_model
    from cliquetta.inference.resumable import check_writable
    from cliquetta.methods.building.state import load_method, load_state, read_header
    from cliquetta.prompts.catalogue import read_prompts

    # Tracing takes a minute: what cannot be written is refused before.
    check_format(out)
    check_writable(out, None, overwrite=overwrite)
    prompts = (
        read_prompts(classes, templates or ()) if classes or state is None else None
    )
    if state is not None and not (method or preset or settings or fitted):
        clip = common.model(model or read_header(state)["model"])
        adapter = load_method(state, clip, prompts)
    else:
        if prompts is None:
            raise UserError("--method, --preset, --set and --fitted need --classes")
        spec, *_ = read_methods(method, fitted, settings or (), preset)
        if model is None and state is not None:
            model = read_header(state)["model"]
        adapter = spec.build(common.model(str(model)), prompts)
        if state is not None:
            load_state(adapter, state)
    terminal = common.terminal
    terminal.say("tracing; this takes a minute for a large model")
    written = export_model(adapter, out, half=half)
    kind = "torch.export" if written.opset is None else f"ONNX, opset {written.opset}"
    about = written.metadata
    terminal.say(
        f"{about['method']} on {about['model']}, {len(about['classes'])} classes, "
        f"in {out}: {kind}, {about['precision']}, {written.bytes / 1e6:.1f} MB"
    )
    terminal.document(
        {
            "out": str(out),
            "opset": written.opset,
            "bytes": written.bytes,
            "metadata": about,
        }
    )
