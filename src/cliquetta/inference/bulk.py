"""Predict any number of images, in memory or into a file."""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from cliquetta.atomic import exclusive
from cliquetta.data.features import FeatureDataset, feature_dataset
from cliquetta.data.images import Decode
from cliquetta.data.inputs import ChannelOrder, is_table, separate_images
from cliquetta.data.listing import STDIN, ImageList, Source, list_images
from cliquetta.data.nvjpeg import JpegDecoder
from cliquetta.data.torch_data import TorchImages, is_torch_data
from cliquetta.errors import UserError
from cliquetta.inference.options import Labels, Order, PredictOptions
from cliquetta.inference.order import arrange, say_shuffled
from cliquetta.inference.predictor import ImageSource, Predictor
from cliquetta.inference.resumable import FileRun, Progress, check_writable, shard_range
from cliquetta.inference.rows import LABEL, PredictionRun
from cliquetta.inference.tables import Row
from cliquetta.methods.building.base import Adapter
from cliquetta.methods.building.registry import DEFAULT_METHOD, create_method
from cliquetta.model.clip import CLIP
from cliquetta.model.factory import create_model, pick_device
from cliquetta.model.in_memory import from_model
from cliquetta.model.names import NO_MODEL
from cliquetta.model.wrapped import FeaturesOnly
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.prompts.features import as_text_features

if TYPE_CHECKING:
    from cliquetta.inference.ray_driver import RayCluster


def predict(
    images: Any,
    classes: ClassPrompts | Sequence[str] | None = None,
    *,
    text_features: Any = None,
    method: str | Adapter | Sequence[str | Adapter] = DEFAULT_METHOD,
    model: CLIP | nn.Module | str | None = None,
    device: str = "auto",
    batch_size: int = 64,
    seed: int = 0,
    order: Order = "auto",
    labels: Labels | None = None,
    zero_shot: bool = False,
    top_k: int = 1,
    all_probabilities: bool = False,
    multi_label: float | None = None,
    reject: float | None = None,
    calibrate: bool = False,
    channel_order: ChannelOrder = "rgb",
    workers: int | None = None,
    decode: Decode = "exact",
    state: Path | str | None = None,
    out: Path | str | None = None,
    file_format: str | None = None,
    shard: tuple[int, int] = (1, 1),
    overwrite: bool = False,
    keep_rows: bool = False,
    group_by: str | None = None,
    cluster: "RayCluster | None" = None,
    on_progress: Progress | None = None,
) -> PredictionRun:
    """Predict the class of every image.

    >>> import numpy as np
    >>> run = predict(np.zeros((32, 32, 3), np.uint8), ["cat", "dog"], model="micro")
    >>> sorted(run.rows[0])
    ['error', 'path', 'prediction', 'probability']

    Args:
        images: Folders, image files, globs, tar files, CSV or Parquet files with a
            column of paths (their columns are copied), URLs of these, ``-`` for a list
            of paths on standard input; a DataFrame with a column ``path``; images in
            memory, one or several (see :func:`cliquetta.data.inputs.separate_images`);
            a torch ``Dataset`` or ``DataLoader`` (see
            :class:`cliquetta.data.torch_data.TorchImages`); or features of images, as
            :func:`cliquetta.data.features.feature_dataset` takes them.
        classes: Class names, or prompts with templates; not needed with an
            :class:`Adapter`.
        text_features: Features of the class names: an array or tensor (N, E), or a file
            (see :func:`cliquetta.prompts.features.as_text_features`). Beside a
            ``model`` they replace its text tower. Without one ``images`` are features
            from the model that made them.
        method: Name of a method, an adapter, or several of them; the predictions of
            several stand side by side.
        model: Name or path of a model, a loaded one, or a module that
            :func:`cliquetta.from_model` takes; needed where ``method`` is a name.
            ``"micro"``, which comes with the package, is a toy for images of 32 pixels.
        device: Where to load the model.
        batch_size: Images per batch.
        seed: Of the methods' random draws, of views, and of a shuffled order.
        order: ``auto`` predicts in the order of the list, but shuffled where
            sub-folders are named after classes and list their images class by class,
            which would tell a method that adapts what they show; ``listed`` and
            ``shuffled`` do so always. Rows are in the order of the list in any case.
        labels: What images are known to show: ``"folder"`` (sub-folders named after
            classes), a column of the input table, ``"label"`` of a torch dataset, or a
            label per image in memory; names of classes or their numbers. Adds a column
            ``label``, and the run has ``scores``. No method sees them.
        zero_shot: Add plain CLIP's predictions as columns; always with ``labels``, to
            test whether adapting helped. Costs a plain pass per image.
        top_k: Best classes to list per image.
        all_probabilities: Give the probability of every class, too.
        multi_label: Score classes independently (sigmoid models such as SigLIP only)
            and list all whose probability is at least this.
        reject: Name images of none of the classes: how many of them to look for,
            between 0 and 1; 0.9 is a good start. The limit comes from the images
            themselves, without labels, and is a part of ``state``.
        calibrate: Scale probabilities by a temperature that the stream sets without
            labels; it is a part of ``state``, too, and costs a plain pass per image.
        channel_order: Of arrays and uint8 tensors: ``bgr`` for images that OpenCV has
            read.
        workers: Processes that decode files; threads for images in memory, for fewer
            than a thousand files, and where no process can be started. 0 decodes in
            this thread; by default as many as there are cores where the model is on a
            GPU, else two threads.
        decode: ``exact``; ``fast`` lets JPEG files be decoded at a half, a quarter or
            an eighth of their size where that is still enough (other pixels, slightly);
            ``gpu`` decodes them by nvJPEG (extra ``gpu-decode``; other pixels,
            slightly). Views are always exact.
        state: File of one method's adapted state: continued from if it exists, saved at
            the end; with ``group_by`` a folder of such files.
        out: Output file or URL; ``-`` is standard output. Without it rows stay in
            memory.
        file_format: ``csv``, ``jsonl`` or ``parquet``; by the suffix of ``out`` if not
            given.
        shard: ``(i, n)`` predicts the i-th of n equal parts of the list, counted from
            1, into a file of its own.
        overwrite: Replace an existing output file.
        keep_rows: Keep rows in memory although they go to a file.
        group_by: Column of the input table: images that share a value there share a
            state, and no others. Rows come group by group.
        cluster: Where to run instead of here:
            :class:`~cliquetta.inference.ray_driver.RayCluster`.
        on_progress: Called after each batch with the images done, of how many, and
            those skipped.

    Returns:
        Counts, scores where labels are known, and the rows unless they went to a file
        only.

    Raises:
        UserError: Something in the request cannot be used.
        BusyError: Another process writes the same output or state file.

    """
    options = PredictOptions(
        batch_size=batch_size,
        seed=seed,
        order=order,
        labels=labels,
        zero_shot=zero_shot,
        top_k=top_k,
        all_probabilities=all_probabilities,
        multi_label=multi_label,
        reject=reject,
        calibrate=calibrate,
        channel_order=channel_order,
        workers=workers,
        decode=decode,
        state=state,
        out=out,
        file_format=file_format,
        shard=shard,
        overwrite=overwrite,
        keep_rows=keep_rows,
        group_by=group_by,
        cluster=cluster,
    )
    if text_features is not None:
        text = as_text_features(text_features)
        classes = text.prompts(classes)
        if model is None:
            model = FeaturesOnly(
                text.width, scale=text.scale, device=pick_device(device)
            )
            images = feature_dataset(images, classes.names, labelled=False)
    adapters = _build_adapters(method, model, classes, device, seed)
    return predict_with(adapters, images, options, on_progress=on_progress)


def predict_with(
    adapters: Sequence[Adapter],
    images: Any,
    options: PredictOptions,
    *,
    on_progress: Progress | None = None,
) -> PredictionRun:
    """Predict images with methods that are built; see :func:`predict`."""
    by_name = _check_adapters(adapters, options)
    predictor = Predictor(by_name, options)
    first = adapters[0]
    if options.decode == "gpu":
        JpegDecoder(first.model.preprocess, first.model.device).check()
    given = read_input(images, predictor)
    if isinstance(given.images, FeatureDataset):
        _check_features(given.images, predictor)
    with _standard_input(given.sources) as stdin, _held(options.state_path):
        if not options.writes_file:
            return _predict_in_memory(predictor, given, stdin, on_progress)
        source = (
            given.images if isinstance(given.images, FeatureDataset) else given.sources
        )
        if source is None:
            raise UserError(
                "an output file needs paths: folders, image files or CSV files"
            )
        work = FileRun(predictor, source, options, stdin=stdin, on_progress=on_progress)
        return work.complete()


# --- what is predicted ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Given:
    """Images as they were given: ``sources`` of paths, or ``images`` in memory with labels."""

    sources: Sequence[Source] | None = None
    images: Any = None
    labels: Sequence[str] = ()


def read_input(images: Any, predictor: Predictor) -> Given:
    """Tell features, tables, paths, torch data and images in memory apart.

    Raises:
        UserError: Something is not an image, or an option does not go with what was
            given.

    """
    options = predictor.options
    first = next(iter(predictor.adapters.values()))
    preprocess = first.model.preprocess
    if is_torch_data(images):
        items = TorchImages(images, preprocess, channel_order=options.channel_order)
        return Given(images=items, labels=_labels_of(items, options))
    if _is_features(images, preprocess.size):
        return Given(
            images=feature_dataset(images, first.prompts.names, labelled=False)
        )
    if is_table(images):
        return Given(sources=[images])
    separated = separate_images(images, preprocess, channel_order=options.channel_order)
    listed = list(separated)
    if listed and all(isinstance(image, str | os.PathLike) for image in listed):
        if options.labels is not None and options.label_source is None:
            raise UserError(
                "labels of paths are named: labels='folder', or a column of a table of paths"
            )
        return Given(sources=listed)
    return Given(images=listed, labels=_given_labels(listed, options))


def _labels_of(items: TorchImages, options: PredictOptions) -> Sequence[str]:
    """Return the labels of a torch dataset if they are asked for."""
    _keep_order(options)
    if options.label_source is None:
        return _given_labels(items, options)
    if options.label_source != LABEL:
        raise UserError(
            f"a torch dataset has no column {options.labels!r}: labels='label' reads the second "
            "part of its (image, label) pairs"
        )
    return [str(label) for label in items.labels()]


def _given_labels(images: Sequence[Any], options: PredictOptions) -> Sequence[str]:
    """Return the labels that were given beside images in memory."""
    _keep_order(options)
    if options.labels is None:
        return ()
    if options.label_source is not None:
        raise UserError(
            f"images in memory have no {options.labels!r}: give labels=[...], one per image"
        )
    if len(options.labels) != len(images):
        counts = f"{len(options.labels)} labels for {len(images)} images"
        raise UserError(f"{counts}: give one per image, '' where it is unknown")
    return [str(label) for label in options.labels]


def _keep_order(options: PredictOptions) -> None:
    if options.order == "shuffled":
        raise UserError(
            "images in memory are predicted as they come: shuffle them before"
        )


def _is_features(images: Any, size: int) -> bool:
    """Whether these can only be features: a dataset or a DataFrame of them, or rows of floats.

    Floats (3, ``size``, ``size``) are the pixels of one image.
    """
    if isinstance(images, FeatureDataset):
        return True
    if is_table(images):
        return any(
            np.ndim(cell) for name in images.columns for cell in images[name][:1]
        )
    kind = getattr(images, "dtype", None)
    if isinstance(kind, torch.dtype):
        floats = kind.is_floating_point
    else:
        floats = isinstance(kind, np.dtype) and np.issubdtype(kind, np.floating)
    return floats and images.ndim in (2, 3) and tuple(images.shape) != (3, size, size)


def _check_features(dataset: FeatureDataset, predictor: Predictor) -> None:
    """Refuse features with options that need images."""
    options = predictor.options
    if options.group_by is not None or options.cluster is not None:
        raise UserError(
            "features are predicted here, as one stream: no groups, no cluster"
        )
    if options.labels is not None:
        raise UserError(
            "features are predicted without labels: `cliquetta evaluate --dataset "
            "features:FILE` scores those that the file holds"
        )
    _keep_order(options)
    predictor.check(dataset)


# --- what predicts --------------------------------------------------------------------------------


def _build_adapters(
    method: str | Adapter | Sequence[str | Adapter],
    model: CLIP | nn.Module | str | None,
    classes: ClassPrompts | Sequence[str] | None,
    device: str,
    seed: int,
) -> list[Adapter]:
    """Return the methods, built where only a name is given."""
    adapters: list[Adapter] = []
    for one in [method] if isinstance(method, str | Adapter) else method:
        if isinstance(one, Adapter):
            adapters.append(one)
            continue
        if classes is None:
            raise UserError("no class names: give a list such as ['cat', 'dog']")
        if model is None:
            raise UserError(NO_MODEL)
        if isinstance(model, str):
            model = create_model(model, device=device)
        model = from_model(model)
        adapters.append(create_method(one, model, classes, seed=seed))
    return adapters


def _check_adapters(
    adapters: Sequence[Adapter], options: PredictOptions
) -> dict[str, Adapter]:
    """Return the methods by name; refuse those that cannot run side by side, or as asked."""
    if not adapters:
        raise UserError("no method given")
    by_name: dict[str, Adapter] = {}
    for adapter in adapters:
        if adapter.name in by_name:
            raise UserError(f"{adapter.name} is named twice: name every method once")
        by_name[adapter.name] = adapter
    if len({adapter.prompts for adapter in adapters}) > 1:
        raise UserError("methods of one run share one class list")
    if options.state is not None and len(adapters) > 1:
        raise UserError(f"a state belongs to one method, got {', '.join(by_name)}")
    if options.multi_label is not None:
        _check_independent(by_name)
    return by_name


def _check_independent(adapters: Mapping[str, Adapter]) -> None:
    """Raise unless the sigmoid of every logit is the probability of its class alone."""
    need = "classes against each other: several labels per image need a"
    for name, adapter in adapters.items():
        if adapter.model.logit_bias is None:
            raise UserError(
                f"{adapter.model.id} scores {need} sigmoid model such as SigLIP"
            )
        if not adapter.scaled_cosines:
            raise UserError(f"{name} weighs {need} method such as zero_shot or tent")


# --- inputs and locks of all runs -----------------------------------------------------------------


def _held(state: Path | None) -> AbstractContextManager[None]:
    """Keep other processes from a state file between reading and writing it."""
    if state is None:
        return nullcontext()
    check_writable(STDIN, state, overwrite=True)
    return exclusive(state, state.with_name(f".{state.name}.lock"))


@contextmanager
def _standard_input(sources: Sequence[Source] | None) -> Iterator[Path | None]:
    """Copy standard input into a file, where it is a source."""
    if not any(
        not is_table(source) and str(source) == STDIN for source in sources or ()
    ):
        yield None
        return
    with tempfile.NamedTemporaryFile(prefix="cliquetta-") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
        file.flush()
        yield Path(file.name)


def _predict_in_memory(
    predictor: Predictor, given: Given, stdin: Path | None, on_progress: Progress | None
) -> PredictionRun:
    """Predict without a file: rows stay in memory, or go to standard output as they come."""
    options = predictor.options
    images = given.images
    if given.sources is not None:
        images = list_images(given.sources, stdin=stdin, labels=options.label_source)
    source = ImageSource(images, predictor.row_format, given.labels)
    run = PredictionRun()
    start, stop = shard_range(len(images), options.shard, options.batch_size)
    if isinstance(images, ImageList):
        arrange(images, predictor, [(start, stop)])
        run.repeated = images.repeated
        run.unused = images.unused
        run.shuffled = images.shuffled
    if run.shuffled:
        say_shuffled(asked=options.order == "shuffled")
    rows = _rows(predictor, source, run, range(start, stop), on_progress)
    if run.shuffled:
        assert isinstance(images, ImageList)
        rows = _in_list_order(rows, images.numbers(start, stop))
    if options.out is None:
        run.rows = list(rows)
    else:
        options.write_table(rows, source.table_columns(), sys.stdout.buffer)
    return run


def _rows(
    predictor: Predictor,
    source: ImageSource,
    run: PredictionRun,
    turns: range,
    on_progress: Progress | None,
) -> Iterator[Row]:
    """Yield rows while they are predicted, counted; then complete the run's figures."""
    state = predictor.options.state_path
    seen = predictor.load(state)
    run.classes_changed = predictor.classes_changed
    begun = time.perf_counter()
    for read in predictor.reader.batches(source, turns.start, turns.stop):
        for row in predictor.rows(read):
            run.count(predictor.row_format, row)
            yield row
        if on_progress is not None:
            on_progress(run.images, len(turns), run.skipped)
    run.seconds = time.perf_counter() - begun
    run.busy = predictor.busy
    run.waited = run.seconds - predictor.busy
    run.health = predictor.health
    if state is not None:
        predictor.save(state, seen + run.images - run.skipped)


def _in_list_order(rows: Iterator[Row], numbers: Iterator[int]) -> Iterator[Row]:
    """Yield rows by their number in the list, when all of them are there."""
    by_number = dict(zip(numbers, rows, strict=True))
    for number in sorted(by_number):
        yield by_number[number]
