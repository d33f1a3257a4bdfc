"""``cliquetta predict``: predict the classes of images."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cliquetta.atomic import write_atomically
from cliquetta.cli.checks import (
    check_classes,
    check_file,
    check_methods,
    check_model,
    check_sources,
)
from cliquetta.cli.command import (
    BAD_INPUT,
    SKIPPED,
    BatchSize,
    Bounds,
    Common,
    Fitted,
    Preset,
    Settings,
    Templates,
    Workers,
    read_cells,
    read_shard,
)
from cliquetta.cli.console import Terminal, count, number
from cliquetta.errors import UserError
from cliquetta.model.names import NO_MODEL

if TYPE_CHECKING:
    from cliquetta.inference.rows import PredictionRun
    from cliquetta.model.clip import CLIP

Decode = Literal["exact", "fast", "gpu"]
EXAMPLES = """
cliquetta predict photos/ --classes cat,dog,horse --model ViT-B/16
cliquetta predict photos/ --classes names.txt --model ViT-B/16 --top-k 3 --out top3.jsonl
cliquetta predict s3://bucket/shard-{000..012}.tar --classes names.txt --model ViT-B/16 --out s3://bucket/out.parquet
cliquetta predict list.csv more/*.jpg --classes names.txt --model ViT-B/16 --templates openai-80
find /data -name '*.jpg' -print0 | cliquetta predict - --classes names.txt --model B.pt --shard 2/8
cliquetta predict monday/ --classes names.txt --model ViT-B/16 --state camera.safetensors
cliquetta predict tuesday/ --classes names.txt --model ViT-B/16 --state camera.safetensors --frozen
cliquetta predict photos/ --classes names.txt --model ViT-B/16 --method zero_shot,domain_norm,tda
cliquetta predict photos/ --classes names.txt --model ViT-B/16 --reject 0.9
cliquetta predict --features photos.npz --text-features classes.npz --method tda
cliquetta predict list.csv --classes names.txt --model ViT-B/16 --group-by camera --ray auto
"""


def predict(
    common: Common,
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            help="Folders, image files, tar files, CSV or Parquet files with a column `path`, URLs "
            "of these, or - for a list of paths on standard input."
        ),
    ] = None,
    features: Annotated[
        Path | None,
        "Features of images (.npy, .npz, .safetensors) instead of paths, for methods "
        "that need no more.",
    ] = None,
    text_features: Annotated[
        Path | None, "With --features: those of the class names; no model is loaded."
    ] = None,
    classes: Annotated[
        str | None, "File with one name per line, a,b,c, or a known list (imagenet)."
    ] = None,
    method: Annotated[
        str | None,
        "Method, NAME or NAME:PRESET, or several, comma-separated (default: domain_norm).",
    ] = None,
    preset: Preset = None,
    settings: Settings = None,
    fitted: Fitted = None,
    model: Annotated[
        str | None, "Model name (see `cliquetta models`) or path; not with --features."
    ] = None,
    out: Annotated[
        str | None,
        "Output file or URL: .csv, .jsonl or .parquet; - for standard output. (default: "
        "predictions.csv; none with --json)",
    ] = None,
    format: Annotated[
        str | None, "csv, jsonl or parquet (default: by the suffix of --out)."
    ] = None,
    overwrite: Annotated[bool, "Replace an existing output file."] = False,
    page: Annotated[
        Path | None, "Also write an HTML page of thumbnails with their predictions."
    ] = None,
    top_k: Annotated[int, Bounds(1), "Predictions per image."] = 1,
    probabilities: Annotated[bool, "Write the probability of every class, too."] = False,
    multi_label: Annotated[
        float | None,
        Bounds(0.0, 1.0),
        "Score classes independently (SigLIP) and list all from this probability on.",
    ] = None,
    reject: Annotated[
        float | None,
        "Name images of none of the classes in a column `rejected`: how many of them to "
        "look for, between 0 and 1, such as 0.9.",
    ] = None,
    calibrate: Annotated[
        bool | None,
        typer.Option(
            help="Scale probabilities by a temperature that needs no labels. (default: for "
            "domain_norm, where it costs nothing; not with --frozen)",
            show_default=False,
        ),
    ] = None,
    state: Annotated[
        Path | None, "File of the adapted state: continued from if it exists, then saved."
    ] = None,
    frozen: Annotated[bool, "Learn nothing: predict as `export` of --state would."] = False,
    shard: Annotated[str, "Predict part I of N of the list, into a file of its own: I/N."] = "1/1",
    group_by: Annotated[
        str | None,
        "Column of the input table: one adapted state per value; --state is then a folder.",
    ] = None,
    ray: Annotated[str | None, "Run on a Ray cluster: local, auto or an address."] = None,
    actors: Annotated[
        int | None,
        Bounds(1),
        "Actors that adapt at the same time, with --ray (default: one per GPU).",
    ] = None,
    gpus_per_actor: Annotated[
        float | None, Bounds(0), "GPUs of an actor, with --ray; 0.25 lets four share one."
    ] = None,
    templates: Templates = None,
    batch_size: BatchSize = 64,
    seed: Annotated[int, "Seed of the method and of views."] = 0,
    workers: Workers = None,
    decode: Annotated[
        Decode,
        "exact; fast: JPEG's own downscaling of large photographs; gpu: nvJPEG, with the extra "
        "gpu-decode (both change pixels slightly).",
    ] = "exact",
) -> None:
    """Predict the class of every image and write a table.

    If the command is interrupted, run it again: it continues, and every image is predicted once.
    An image that cannot be read is skipped and named in the column `error`.
    """
    check_sources(paths or ())
    check_methods(method, preset=preset, settings=settings or ())
    check_file(fitted, "--fitted")
    if state is not None and state.is_dir() and group_by is None:
        raise UserError(
            f"--state {state} is a folder: name a file in it (--group-by takes a folder)"
        )
    if page is not None and not page.parent.is_dir():
        raise UserError(f"--page {page}: there is no folder {page.parent}, make it first")
    check_file(features, "--features")
    check_file(text_features, "--text-features")
    if classes is not None:
        check_classes(classes, templates)
    if model is None and text_features is None:
        raise UserError(NO_MODEL)
    if model is not None:
        check_model(model)

    from cliquetta.data.features import feature_dataset
    from cliquetta.data.loader import expect_images
    from cliquetta.evaluation.grid import RunSpec
    from cliquetta.evaluation.sweep import build_adapter
    from cliquetta.inference.bulk import predict as predict_images
    from cliquetta.inference.resumable import check_writable, parts_folder, shard_path
    from cliquetta.methods.building.frozen import freeze
    from cliquetta.model.wrapped import FeaturesOnly
    from cliquetta.prompts.catalogue import read_prompts
    from cliquetta.prompts.features import as_text_features

    to_stdout = out == "-"
    if to_stdout and common.json:
        raise UserError("--json prints the predictions itself: leave out --out -")
    if out is None and not (common.json and ray is None and group_by is None):
        out = "predictions.csv"
    if (features is None) == (not paths):
        raise UserError("name images (folders, files or tables), or a file with --features")
    if text_features is not None and features is None:
        raise UserError("--text-features go with --features, the features of images")
    if page is not None and (to_stdout or features is not None):
        raise UserError("--page shows images, and their table: leave out --features and --out -")
    text = None if text_features is None else as_text_features(text_features)
    named = classes is None and text is not None and text.names is not None
    prompts = None if named else read_prompts(classes, templates or ())
    base = RunSpec("", "", model or "", seed=seed)
    specs = read_cells(base, method, fitted, settings or (), preset)
    part = read_shard(shard)
    target = None if out is None else shard_path(out, part)
    check_writable(target or "-", state, overwrite=overwrite or to_stdout or out is None)
    cluster = None
    if features is not None and (ray is not None or group_by is not None):
        raise UserError("--ray and --group-by are for images, not for --features")
    if ray is not None:
        from cliquetta.inference.ray_driver import RayCluster

        cluster = RayCluster(ray, actors, gpus_per_actor, common.threads or 1)
        common.device = "cpu"  # actors move the model to theirs
    elif actors is not None or gpus_per_actor is not None:
        raise UserError("--actors and --gpus-per-actor are for --ray")
    if text is not None:
        prompts = text.prompts(prompts)
        clip: CLIP = FeaturesOnly(text.width, scale=text.scale, device=common.checked_device())
    else:
        expect_images(common.checked_device(), workers)
        clip = common.model(base.model)
    assert prompts is not None
    adapters = [build_adapter(spec, clip, prompts) for spec in specs]
    calibrate = bool(calibrate) if frozen else calibrate
    for adapter in adapters:
        adapter.enable(reject=reject, calibrate=calibrate)
    if frozen and text is not None:
        raise UserError("--frozen takes images: nothing that predicts from features is exported")
    if frozen:
        adapters, state = [freeze(adapters, state)], None
    with common.terminal.bars() as bars:
        bars.show("predict", 0, None)

        def show(done: int, total: int, skipped: int) -> None:
            bars.show("predict", done, total, f"{skipped} skipped" if skipped else "")

        try:
            run = predict_images(
                paths
                if features is None
                else feature_dataset(features, prompts.names, labelled=False),
                method=adapters,
                seed=seed,
                batch_size=batch_size,
                top_k=top_k,
                all_probabilities=probabilities,
                multi_label=multi_label,
                reject=reject,
                calibrate=calibrate,
                workers=workers,
                decode=decode,
                state=state,
                out=out,
                file_format=format,
                shard=part,
                overwrite=overwrite,
                keep_rows=common.json or page is not None,
                on_progress=show,
                group_by=group_by,
                cluster=cluster,
            )
        except (KeyboardInterrupt, OSError):
            if target is not None and any(parts_folder(target).glob("*.jsonl")):
                common.terminal.warn(
                    f"stopped; finished parts are in {parts_folder(target)}: run the same command "
                    "again to continue"
                )
            raise
    if page is not None:
        from cliquetta.report.contact_sheet import contact_sheet

        several = [adapter.name for adapter in adapters] if len(adapters) > 1 else [""]
        write_atomically(page, contact_sheet(run.rows, several).encode())
        common.terminal.say(f"Page: {page}")
    if not to_stdout:
        _report(run, target, state, common.terminal)
    if run.skipped:
        raise typer.Exit(SKIPPED if run.skipped < run.images else BAD_INPUT)


def _report(
    run: "PredictionRun", out: Path | str | None, state: Path | None, terminal: Terminal
) -> None:
    from cliquetta.methods.domain_norm.health import in_words

    predicted = run.images - run.skipped
    for name, classes in run.classes.items():
        shown = classes.most_common(10)
        rows = [(label, f"{n:,}", number(100 * n / predicted, 1)) for label, n in shown]
        title = "Predicted classes" if len(shown) == len(classes) else "Most frequent classes"
        title += f", {name}" if len(run.classes) > 1 else ""
        if not terminal.quiet:
            terminal.table(("class", "images", "%"), rows, title=title, right=("images", "%"))
        if name in run.rejected:
            none = f"{run.rejected[name]:,} of them look like none of the classes"
            terminal.say(f"{none} (column `rejected`).")
    if run.repeated:
        terminal.warn(f"{count(run.repeated, 'path')} named twice: predicted once")
    if run.unused:
        kinds = ", ".join(f"{n:,} {kind}" for kind, n in run.unused.most_common(8))
        terminal.say(f"Not used, in the folders: {kinds}")
    if run.classes_changed:
        terminal.say(
            f"{state} was of another class list: what was learned about the images stays, "
            "what is remembered per class started again."
        )
    for name, figures in run.health.items():
        terminal.say(in_words(name, figures))
    if state is not None:
        terminal.say(f"Adapted state saved to {state}; pass --state {state} to continue.")
    if run.skipped:
        where = f" in {out}" if out else ""
        worst = "; nothing could be predicted" if not predicted else ""
        skipped = f"{'was' if run.skipped == 1 else 'were'} skipped: see `error`{where}{worst}"
        terminal.warn(f"{count(run.skipped, 'image')} could not be read and {skipped}")
    rate = (run.images - run.before) / run.seconds if run.seconds else 0.0
    resumed = f", {run.before:,} of them before it was continued" if run.before else ""
    terminal.say(f"{count(run.images, 'image')} in {out}, each once{resumed} ({rate:.0f} images/s)")
    damaged = [{"path": row["path"], "reason": row["error"]} for row in run.rows if row["error"]]
    counts = {name: dict(classes.most_common()) for name, classes in run.classes.items()}
    terminal.document(
        {
            "out": None if out is None else str(out),
            "images": predicted,
            "skipped": damaged,
            "before": run.before,
            "predicted": counts,
            **({"rejected": run.rejected} if run.rejected else {}),
            "predictions": run.rows,
            "repeated": run.repeated,
            "unused": dict(run.unused),
            "seconds": run.seconds,
            "state": None if state is None else str(state),
            "classes_changed": run.classes_changed,
            "health": run.health,
        }
    )
