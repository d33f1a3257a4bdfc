"""Predict any number of images, in memory or into a file."""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from torch import nn

from cliquetta.atomic import exclusive
from cliquetta.data.features import FeatureDataset, feature_dataset
from cliquetta.data.images import Decode
from cliquetta.data.inputs import is_table, separate_images
from cliquetta.data.listing import STDIN, ImageList, Source, list_images
from cliquetta.data.nvjpeg import JpegDecoder
from cliquetta.errors import UnknownNameError, UserError
from cliquetta.inference.predictor import ImageSource, Predictor
from cliquetta.inference.resumable import (
    FileRun,
    Progress,
    check_writable,
    shard_path,
    shard_range,
)
from cliquetta.inference.rows import PredictionRun, Row, RowFormat, pick_format
from cliquetta.methods.base import Adapter
from cliquetta.methods.registry import DEFAULT_METHOD, create_method
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
    seed: int = 0,
    batch_size: int = 64,
    top_k: int = 1,
    all_probabilities: bool = False,
    multi_label: float | None = None,
    reject: float | None = None,
    calibrate: bool | None = None,
    workers: int | None = None,
    decode: Decode = "exact",
    state: Path | str | None = None,
    out: Path | str | None = None,
    file_format: str | None = None,
    shard: tuple[int, int] = (1, 1),
    overwrite: bool = False,
    keep_rows: bool = False,
    on_progress: Progress | None = None,
    group_by: str | None = None,
    cluster: "RayCluster | None" = None,
) -> PredictionRun:
    """Predict the class of every image.

    >>> import numpy as np
    >>> run = predict(np.zeros((32, 32, 3), np.uint8), ["cat", "dog"], model="micro")
    >>> sorted(run.rows[0])
    ['error', 'path', 'prediction', 'probability']

    Args:
        images: Folders, image files, globs, tar files, CSV or Parquet files with a column of paths
            (their columns are copied), URLs of these, ``-`` for a list of paths on standard input;
            a DataFrame with a column ``path``; images in memory, one or several (see
            :func:`cliquetta.data.inputs.separate_images`); or features of images, as
            :func:`cliquetta.data.features.feature_dataset` takes them.
        classes: Class names, or prompts with templates; not needed with an :class:`Adapter`.
        text_features: Features of the class names, from the model that made ``images``, which
            are features then: an array or tensor (N, E), or a file (see
            :func:`cliquetta.prompts.features.as_text_features`). No model is loaded.
        method: Name of a method, an adapter, or several of them; the predictions of
            several stand side by side.
        model: Name or path of a model, a loaded one, or a module that
            :func:`cliquetta.from_model` takes; needed where ``method`` is a name. ``"micro"``,
            which comes with the package, is a toy for images of 32 pixels.
        device: Where to load the model.
        seed: Of the methods' random draws and of views.
        batch_size: Images per batch.
        top_k: Best classes to list per image.
        all_probabilities: Give the probability of every class, too.
        multi_label: Score classes independently (sigmoid models such as SigLIP only) and list all
            whose probability is at least this.
        reject: Name images of none of the classes: how many of them to look for, between 0 and 1;
            0.9 is a good start. The limit comes from the images themselves, without labels, and
            is a part of ``state``.
        calibrate: Scale probabilities by a temperature that the stream sets without labels; it is
            a part of ``state``, too. By default for methods where it costs nothing
            (``domain_norm``), so that one threshold serves first and later images.
        workers: Processes that decode files; threads for images in memory, for fewer than a
            thousand files, and where no process can be started. 0 decodes in this thread; by
            default as many as there are cores where the model is on a GPU, else two threads.
        decode: ``exact``; ``fast`` lets JPEG files be decoded at a half, a quarter or an eighth of
            their size where that is still enough (other pixels, slightly); ``gpu`` decodes them by
            nvJPEG (extra ``gpu-decode``; other pixels, slightly). Views are always exact.
        state: File of one method's adapted state: continued from if it exists, saved at the end;
            with ``group_by`` a folder of such files.
        out: Output file or URL; ``-`` is standard output. Without it rows stay in memory.
        file_format: ``csv``, ``jsonl`` or ``parquet``; by the suffix of ``out`` if not given.
        shard: ``(i, n)`` predicts the i-th of n equal parts of the list, counted from 1, into a
            file of its own.
        overwrite: Replace an existing output file.
        keep_rows: Keep rows in memory although they go to a file.
        on_progress: Called after each batch with the images done, of how many, and those skipped.
        group_by: Column of the input table: images that share a value there share a state, and no
            others. Rows come group by group.
        cluster: Where to run instead of here:
            :class:`~cliquetta.inference.ray_driver.RayCluster`.

    Returns:
        Counts, and the rows unless they went to a file only.

    Raises:
        UserError: Something in the request cannot be used.
        BusyError: Another process writes the same output or state file.

    """
    if text_features is not None:
        text = as_text_features(text_features)
        classes = text.prompts(classes)
        model = FeaturesOnly(text.width, scale=text.scale, device=pick_device(device))
    adapters = _adapters(method, model, classes, device, seed)
    first = next(iter(adapters.values()))
    if len({adapter.prompts for adapter in adapters.values()}) > 1:
        raise UserError("methods of one run share one class list")
    if state is not None and len(adapters) > 1:
        raise UserError(f"a state belongs to one method, got {', '.join(adapters)}")
    names = first.prompts.names
    if multi_label is not None:
        _check_independent(adapters)
        if reject is not None or calibrate:
            raise UserError(
                "several labels per image have sigmoid probabilities, which --reject and "
                "--calibrate do not read: leave out --multi-label or those"
            )
        calibrate = False
    top_k = min(top_k, len(names))
    row_format = RowFormat(
        tuple(adapters), names, top_k, all_probabilities, multi_label, reject, calibrate
    )
    write_table = pick_format(Path(out or STDIN), file_format)
    if workers is not None and workers < 0:
        raise UserError(f"workers is 0 or more, got {workers}")
    if decode not in get_args(Decode):
        raise UnknownNameError("way to decode", decode, get_args(Decode))
    predictor = Predictor(adapters, row_format, batch_size, seed, workers, decode)
    if decode == "gpu":
        if cluster is not None:
            raise UserError("Ray's tasks decode on CPUs: leave out --ray, or --decode gpu")
        JpegDecoder(first.model.preprocess, first.model.device).check()
    state = None if state is None else Path(state)
    if text_features is not None or _is_features(images, first.model.preprocess.size):
        if group_by is not None or cluster is not None:
            raise UserError("features are predicted here, as one stream: no groups, no cluster")
        images = feature_dataset(images, names, labelled=False)
        predictor.check(images)
    sources = None
    if is_table(images):
        sources = [images]
    elif not isinstance(images, FeatureDataset):
        images = list(separate_images(images, first.model.preprocess))
        if images and all(isinstance(image, str | os.PathLike) for image in images):
            sources = images
    with _standard_input(sources) as stdin, _held(state):
        if out is None or str(out) == STDIN:
            if group_by is not None or cluster is not None:
                raise UserError("groups and clusters write a file: give an output file (--out)")
            given = images if sources is None else list_images(sources, stdin=stdin)
            run, rows, columns = _run_in_memory(predictor, given, shard, state, on_progress)
            if out is None:
                run.rows = list(rows)
            else:
                write_table(rows, columns, sys.stdout.buffer)
            return run
        source = images if isinstance(images, FeatureDataset) else sources
        if source is None:
            raise UserError("an output file needs paths: folders, image files or CSV files")
        request = shard_path(out, shard), write_table, shard, group_by, state, stdin
        work = FileRun(predictor, source, *request, overwrite, keep_rows, on_progress)
        return work.complete(cluster)


def _check_independent(adapters: Mapping[str, Adapter]) -> None:
    """Raise unless the sigmoid of every logit is the probability of its class alone."""
    need = "classes against each other: several labels per image need a"
    for name, adapter in adapters.items():
        if adapter.model.logit_bias is None:
            raise UserError(f"{adapter.model.id} scores {need} sigmoid model such as SigLIP")
        if not adapter.scaled_cosines:
            raise UserError(f"{name} weighs {need} method such as zero_shot or tent")


def _adapters(
    method: str | Adapter | Sequence[str | Adapter],
    model: CLIP | nn.Module | str | None,
    classes: ClassPrompts | Sequence[str] | None,
    device: str,
    seed: int,
) -> dict[str, Adapter]:
    """Adapters by the name of their method, built where only a name is given."""
    adapters: dict[str, Adapter] = {}
    for one in [method] if isinstance(method, str | Adapter) else method:
        if isinstance(one, str):
            if classes is None:
                raise UserError("no class names: give a list such as ['cat', 'dog']")
            if model is None:
                raise UserError(NO_MODEL)
            if isinstance(model, str):
                model = create_model(model, device=device)
            model = from_model(model)
            one = create_method(one, model, classes, seed=seed)
        if adapters.setdefault(one.name, one) is not one:
            raise UserError(f"{one.name} is named twice: name every method once")
    if not adapters:
        raise UserError("no method given")
    return adapters


def _is_features(images: Any, size: int) -> bool:
    """Whether these can only be features: a dataset or a DataFrame of them, or rows of floats.

    Floats (3, ``size``, ``size``) are the pixels of one image.
    """
    if isinstance(images, FeatureDataset):
        return True
    if is_table(images):
        return any(np.ndim(cell) for name in images.columns for cell in images[name][:1])
    kind = getattr(images, "dtype", None)
    floats = isinstance(kind, np.dtype) and np.issubdtype(kind, np.floating)
    floats |= isinstance(kind, torch.dtype) and kind.is_floating_point
    return floats and images.ndim in (2, 3) and tuple(images.shape) != (3, size, size)


def _held(state: Path | None) -> AbstractContextManager[None]:
    """Keep other processes from a state file between reading and writing it."""
    if state is None:
        return nullcontext()
    check_writable(STDIN, state, overwrite=True)
    return exclusive(state, state.with_name(f".{state.name}.lock"))


@contextmanager
def _standard_input(sources: Sequence[Source] | None) -> Iterator[Path | None]:
    """A copy of standard input in a file, where it is a source."""
    if not any(not is_table(source) and str(source) == STDIN for source in sources or ()):
        yield None
        return
    with tempfile.NamedTemporaryFile(prefix="cliquetta-") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
        file.flush()
        yield Path(file.name)


def _run_in_memory(
    predictor: Predictor,
    given: Any,
    shard: tuple[int, int],
    state: Path | None,
    on_progress: Progress | None,
) -> tuple[PredictionRun, Iterator[Row], dict[str, type]]:
    """A run that keeps nothing for another start: its rows are yielded while it goes on."""
    source, run = ImageSource(given, predictor.row_format), PredictionRun()
    if isinstance(given, ImageList):
        run.repeated, run.unused = given.repeated, given.unused

    def rows() -> Iterator[Row]:
        seen, begun = predictor.load(state), time.perf_counter()
        run.classes_changed = predictor.classes_changed
        start, stop = shard_range(len(given), shard, predictor.batch_size)
        for read in predictor.reader.batches(source, start, stop):
            for row in predictor.rows(read):
                run.count(predictor.row_format, row)
                yield row
            if on_progress is not None:
                on_progress(run.images, stop - start, run.skipped)
        run.seconds = time.perf_counter() - begun
        run.busy, run.waited = predictor.busy, run.seconds - predictor.busy
        run.health = predictor.health
        if state is not None:
            predictor.save(state, seen + run.images - run.skipped)

    return run, rows(), source.table_columns()
