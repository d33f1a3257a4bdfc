"""``cliquetta predict``: predict the classes of images."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

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
    read_methods,
    read_shard,
)
from cliquetta.cli.console import Terminal, count, number
from cliquetta.errors import UserError
from cliquetta.model.names import NO_MODEL

if TYPE_CHECKING:
    from cliquetta.inference.options import PredictOptions
    from cliquetta.inference.rows import PredictionRun
    from cliquetta.inference.scores import MethodScores
    from cliquetta.methods.building.base import Adapter
    from cliquetta.methods.building.spec import MethodSpec
    from cliquetta.model.clip import CLIP
    from cliquetta.prompts.classes import ClassPrompts

Decode = Literal["exact", "fast", "gpu"]
Order = Literal["auto", "listed", "shuffled"]
SHOWN_CLASSES = 10  # rows of a table in the terminal
SIGNIFICANT = 0.05  # below this p a difference is called one
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
cliquetta predict labelled/ --classes names.txt --model ViT-B/16 --labels folder --page page.html
cliquetta predict --features photos.npz --text-features classes.npz --method tda
cliquetta predict photos/ --model tower.safetensors --text-features classes.npz
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
        Path | None,
        "Features of the class names (names and vectors), beside an image tower or with "
        "--features: text stays fixed.",
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
    labels: Annotated[
        str | None,
        "Known classes, for accuracy and a test whether adapting helped: `folder` (sub-folders "
        "named after classes) or a column of the input table. No method sees them.",
    ] = None,
    zero_shot: Annotated[
        bool, "Add plain CLIP's predictions (always with --labels and --page)."
    ] = False,
    order: Annotated[
        Order,
        "Order of prediction; rows are always in that of the list. auto shuffles sub-folders named "
        "after classes, which would tell a method what they show.",
    ] = "auto",
    top_k: Annotated[int, Bounds(1), "Predictions per image."] = 1,
    probabilities: Annotated[
        bool, "Write the probability of every class, too."
    ] = False,
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
        bool,
        typer.Option(
            "--calibrate",
            help="Scale probabilities by a temperature that needs no labels.",
        ),
    ] = False,
    state: Annotated[
        Path | None,
        "File of the adapted state: continued from if it exists, then saved.",
    ] = None,
    frozen: Annotated[
        bool, "Learn nothing: predict as `export` of --state would."
    ] = False,
    shard: Annotated[
        str, "Predict part I of N of the list, into a file of its own: I/N."
    ] = "1/1",
    group_by: Annotated[
        str | None,
        "Column of the input table: one adapted state per value; --state is then a folder.",
    ] = None,
    ray: Annotated[
        str | None, "Run on a Ray cluster: local, auto or an address."
    ] = None,
    actors: Annotated[
        int | None,
        Bounds(1),
        "Actors that adapt at the same time, with --ray (default: one per GPU).",
    ] = None,
    gpus_per_actor: Annotated[
        float | None,
        Bounds(0),
        "GPUs of an actor, with --ray; 0.25 lets four share one.",
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

    If the command is interrupted, run it again: it continues, and every image is
    predicted once. An image that cannot be read is skipped and named in the column
    `error`.
    """
    check_sources(paths or ())
    check_methods(method, preset=preset, settings=settings or ())
    check_file(fitted, "--fitted")
    if state is not None and state.is_dir() and group_by is None:
        raise UserError(
            f"--state {state} is a folder: name a file in it (--group-by takes a folder)"
        )
    if page is not None and not page.parent.is_dir():
        raise UserError(
            f"--page {page}: there is no folder {page.parent}, make it first"
        )
    check_file(features, "--features")
    check_file(text_features, "--text-features")
    if classes is not None:
        check_classes(classes, templates)
    if model is None and text_features is None:
        raise UserError(NO_MODEL)
    if model is not None:
        check_model(model)

    from cliquetta.inference.bulk import predict_with
    from cliquetta.inference.options import PredictOptions

    # Options that do not go together are refused before anything is loaded, as far as
    # that can be told without a model.
    to_stdout = out == "-"
    if to_stdout and common.json:
        raise UserError("--json prints the predictions itself: leave out --out -")
    if (features is None) == (not paths):
        raise UserError(
            "name images (folders, files or tables), or a file with --features"
        )
    if page is not None and (to_stdout or features is not None):
        raise UserError(
            "--page shows images, and their table: leave out --features and --out -"
        )
    if features is not None and (ray is not None or group_by is not None):
        raise UserError("--ray and --group-by are for images, not for --features")
    if frozen and features is not None:
        raise UserError(
            "--frozen takes images: nothing that predicts from features is exported"
        )
    if out is None and not (common.json and ray is None and group_by is None):
        out = "predictions.csv"

    options = PredictOptions(
        batch_size=batch_size,
        seed=seed,
        order=order,
        labels=labels,
        zero_shot=zero_shot or page is not None,
        top_k=top_k,
        all_probabilities=probabilities,
        multi_label=multi_label,
        reject=reject,
        calibrate=calibrate,
        workers=workers,
        decode=decode,
        state=None if frozen else state,
        out=out,
        file_format=format,
        shard=read_shard(shard),
        overwrite=overwrite,
        keep_rows=common.json or page is not None,
        group_by=group_by,
        cluster=_read_cluster(common, ray, actors, gpus_per_actor),
    )
    specs = read_methods(method, fitted, settings or (), preset)
    prompts = _read_prompts(classes, templates or (), text_features)
    _check_output(options, state)
    from_features = features is not None
    clip, prompts = _load(common, model, prompts, text_features, workers, from_features)
    # A frozen method takes its state here; others continue from it in the run.
    adapters = _build(
        specs, clip, prompts, options, state if frozen else None, frozen=frozen
    )
    images = _choose_images(paths or (), features, prompts)
    with common.terminal.bars() as bars:
        bars.show("predict", 0, None)

        def show(done: int, total: int, skipped: int) -> None:
            bars.show("predict", done, total, f"{skipped} skipped" if skipped else "")

        try:
            run = predict_with(adapters, images, options, on_progress=show)
        except (KeyboardInterrupt, OSError):
            _say_how_to_continue(options, common.terminal)
            raise
    if page is not None:
        _write_page(page, run, adapters, common.terminal)
    if not to_stdout:
        _report(run, options, common.terminal)
    if run.skipped:
        raise typer.Exit(SKIPPED if run.skipped < run.images else BAD_INPUT)


def _read_cluster(
    common: Common, ray: str | None, actors: int | None, gpus_per_actor: float | None
) -> Any:
    """Return the cluster to run on, if one is asked for."""
    if ray is None:
        if actors is not None or gpus_per_actor is not None:
            raise UserError("--actors and --gpus-per-actor are for --ray")
        return None
    from cliquetta.inference.ray_driver import RayCluster

    common.device = "cpu"  # actors move the model to theirs
    return RayCluster(ray, actors, gpus_per_actor, common.threads or 1)


def _read_prompts(
    classes: str | None, templates: Sequence[str], text_features: Path | None
) -> "ClassPrompts | None":
    """Return the class list; ``None`` where a file of text features may name the classes."""
    from cliquetta.prompts.catalogue import read_prompts
    from cliquetta.prompts.features import as_text_features

    names_classes = (
        text_features is not None and as_text_features(text_features).names is not None
    )
    if classes is None and names_classes:
        return None
    return read_prompts(classes, templates)


def _check_output(options: "PredictOptions", state: Path | None) -> None:
    """Refuse files that cannot be written, before a model is loaded."""
    from cliquetta.inference.resumable import check_writable

    target = options.target
    overwrite = options.overwrite or target is None
    check_writable("-" if target is None else target, state, overwrite=overwrite)


def _load(
    common: Common,
    model: str | None,
    prompts: "ClassPrompts | None",
    text_features: Path | None,
    workers: int | None,
    from_features: bool,
) -> "tuple[CLIP, ClassPrompts]":
    """Return the model, or what stands for it where images are features, and the class list."""
    from cliquetta.data.loader import expect_images
    from cliquetta.model.wrapped import FeaturesOnly
    from cliquetta.prompts.features import as_text_features

    if text_features is not None:
        text = as_text_features(text_features)
        prompts = text.prompts(prompts)
        if from_features and model is None:
            clip = FeaturesOnly(
                text.width, scale=text.scale, device=common.checked_device()
            )
            return clip, prompts
    if model is None:
        raise UserError(NO_MODEL)
    assert prompts is not None
    expect_images(common.checked_device(), workers)
    return common.model(model), prompts


def _build(
    specs: "Sequence[MethodSpec]",
    clip: "CLIP",
    prompts: "ClassPrompts",
    options: "PredictOptions",
    state: Path | None,
    *,
    frozen: bool,
) -> "list[Adapter]":
    """Build the methods; a frozen one continues from the state and learns nothing."""
    from cliquetta.methods.building.frozen import freeze

    adapters = [spec.build(clip, prompts, seed=options.seed) for spec in specs]
    if not frozen:
        return adapters
    for adapter in adapters:
        adapter.enable(reject=options.reject, calibrate=options.calibration)
    return [freeze(adapters, state)]


def _choose_images(
    paths: Sequence[str], features: Path | None, prompts: "ClassPrompts"
) -> Any:
    """Choose the input: paths, or features from a file."""
    from cliquetta.data.features import feature_dataset

    if features is None:
        return list(paths)
    return feature_dataset(features, prompts.names, labelled=False)


def _say_how_to_continue(options: "PredictOptions", terminal: Terminal) -> None:
    """Name what an interrupted run has finished."""
    from cliquetta.inference.resumable import parts_folder

    if options.target is None:
        return
    parts = parts_folder(options.target)
    if any(parts.glob("*.jsonl")):
        terminal.warn(
            f"stopped; finished parts are in {parts}: run the same command again to continue"
        )


def _write_page(
    page: Path,
    run: "PredictionRun",
    adapters: "Sequence[Adapter]",
    terminal: Terminal,
) -> None:
    """Write the page of thumbnails."""
    from cliquetta.report.contact_sheet import contact_sheet

    several = [adapter.name for adapter in adapters] if len(adapters) > 1 else [""]
    write_atomically(page, contact_sheet(run, several).encode())
    terminal.say(f"Page: {page}")


def _report(
    run: "PredictionRun", options: "PredictOptions", terminal: Terminal
) -> None:
    """Say what was predicted, and what there is to know about the run."""
    from cliquetta.methods.domain_norm.health import in_words

    out = options.target
    state = options.state
    predicted = run.images - run.skipped
    _show_classes(run, predicted, terminal)
    for name, scores in run.scores.items():
        _show_scores(name, scores, terminal)
    if run.unlabelled:
        terminal.warn(
            f"{count(run.unlabelled, 'image')} with no label of the class list: not scored"
        )
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
        terminal.say(
            f"Adapted state saved to {state}; pass --state {state} to continue."
        )
    if run.skipped:
        where = f" in {out}" if out else ""
        worst = "; nothing could be predicted" if not predicted else ""
        skipped = f"{'was' if run.skipped == 1 else 'were'} skipped: see `error`{where}{worst}"
        terminal.warn(f"{count(run.skipped, 'image')} could not be read and {skipped}")
    rate = (run.images - run.before) / run.seconds if run.seconds else 0.0
    speed = rate_in_words(rate)
    resumed = f", {run.before:,} of them before it was continued" if run.before else ""
    terminal.say(f"{count(run.images, 'image')} in {out}, each once{resumed} ({speed})")
    terminal.document(_document(run, options))


def rate_in_words(images_per_second: float) -> str:
    """Write a rate; a slow one with a digit after the point.

    >>> rate_in_words(0.24), rate_in_words(1234.5)
    ('0.2 images/s', '1234 images/s')
    """
    digits = 0 if images_per_second >= 10 else 1
    return f"{images_per_second:.{digits}f} images/s"


def _show_classes(run: "PredictionRun", predicted: int, terminal: Terminal) -> None:
    """Show how often every class came first."""
    for name, classes in run.classes.items():
        most_frequent = classes.most_common(SHOWN_CLASSES)
        rows = []
        for label, images in most_frequent:
            share = number(100 * images / predicted, 1)
            rows.append((label, f"{images:,}", share))
        title = (
            "Predicted classes"
            if len(most_frequent) == len(classes)
            else "Most frequent classes"
        )
        if len(run.classes) > 1:
            title += f", {name}"
        if not terminal.quiet:
            terminal.table(
                ("class", "images", "%"), rows, title=title, right=("images", "%")
            )
        if name in run.rejected:
            none = f"{run.rejected[name]:,} of them look like none of the classes"
            terminal.say(f"{none} (column `rejected`).")


def _show_scores(name: str, scores: "MethodScores", terminal: Terminal) -> None:
    """Show accuracy, what was confused, and whether adapting helped."""
    if not scores.images:
        return

    # The classes that went worst, with what was predicted instead.
    per_class = scores.per_class
    worst = sorted(per_class, key=lambda label: per_class[label].accuracy)[
        :SHOWN_CLASSES
    ]
    rows = []
    for label in worst:
        score = per_class[label]
        mistakes = [f"{to} {n:,}" for own, to, n in scores.mistakes if own == label]
        accuracy = number(score.accuracy, 1)
        rows.append((label, f"{score.images:,}", accuracy, ", ".join(mistakes[:3])))
    title = f"Accuracy of {name} by class"
    if len(worst) < len(scores.per_class):
        title += f", the {len(worst)} worst of {len(scores.per_class)}"
    columns = ("class", "images", "accuracy", "predicted instead")
    if not terminal.quiet:
        terminal.table(columns, rows, title=title, right=("images", "accuracy"))
    terminal.say(scores_in_words(name, scores))


def scores_in_words(name: str, scores: "MethodScores") -> str:
    """Return accuracy and the paired test against plain CLIP as sentences."""
    accuracy = number(scores.accuracy, 1)
    images = count(scores.images, "image")
    words = f"Accuracy of {name}: {accuracy} % of {images} with a label"
    test = scores.versus_zero_shot
    if test is None:
        return f"{words}."

    plain = number(scores.zero_shot_accuracy, 1)
    gain = number(test.gain, 1, signed=True)
    half_width = number(test.half_width, 1)
    words += f", zero-shot {plain} %: {gain} ± {half_width} points."
    counts = f"{test.repaired:,} repaired and {test.broken:,} broken, p = {test.p:.2g}"
    if test.p >= SIGNIFICANT:
        return f"{words} Adapting made no difference beyond chance ({counts})."
    effect = "helped" if test.repaired > test.broken else "hurt"
    return f"{words} Adapting {effect} ({counts})."


def _document(run: "PredictionRun", options: "PredictOptions") -> dict[str, Any]:
    """Return everything about a run as JSON types."""
    damaged = []
    for row in run.rows:
        if row["error"]:
            damaged.append({"path": row["path"], "reason": row["error"]})
    counts = {}
    for name, classes in run.classes.items():
        counts[name] = dict(classes.most_common())
    document: dict[str, Any] = {
        "out": None if options.target is None else str(options.target),
        "images": run.images - run.skipped,
        "skipped": damaged,
        "before": run.before,
        "predicted": counts,
    }
    if run.rejected:
        document["rejected"] = run.rejected
    if options.labels is not None:
        document["scores"] = {
            name: scores.to_dict() for name, scores in run.scores.items()
        }
        document["unlabelled"] = run.unlabelled
    return document | {
        "predictions": run.rows,
        "shuffled": run.shuffled,
        "repeated": run.repeated,
        "unused": dict(run.unused),
        "seconds": run.seconds,
        "state": None if options.state is None else str(options.state),
        "classes_changed": run.classes_changed,
        "health": run.health,
    }
