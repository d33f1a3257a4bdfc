"""A classifier in the shape of transformers' pipelines, which adapts while it is used."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from cliquetta.data.inputs import (
    ChannelOrder,
    ImageLike,
    is_single,
    separate_images,
    to_picture,
)
from cliquetta.data.remote import fetch_image, is_url
from cliquetta.errors import UnknownNameError, UserError
from cliquetta.methods.building.base import Adapter
from cliquetta.methods.building.registry import (
    DEFAULT_METHOD,
    create_method,
    method_config,
)
from cliquetta.methods.building.state import load_state, read_header
from cliquetta.model.clip import CLIP
from cliquetta.model.factory import create_model
from cliquetta.model.in_memory import from_model
from cliquetta.model.names import NO_MODEL
from cliquetta.prompts.classes import ClassPrompts

TASK = "zero-shot-image-classification"
TEMPLATE = "This is a photo of {}."  # that of transformers
_THUMBNAIL = 128
_SHOWN = 100  # images that a page of predictions holds at most


def pipeline(
    task: str = TASK,
    model: str | CLIP | nn.Module | None = None,
    method: str = DEFAULT_METHOD,
    *,
    preset: str | None = None,
    options: Mapping[str, Any] | None = None,
    device: str | int = "auto",
    dtype: str = "float32",
    seed: int = 0,
    batch_size: int = 64,
    reject: float | None = None,
    calibrate: bool = False,
    allow_urls: bool = False,
    url_seconds: float = 10.0,
    url_bytes: int = 2**25,
) -> ZeroShotImageClassification:
    """Build a classifier that is called as transformers' is, and adapts to what it is called with.

    >>> classify = pipeline("zero-shot-image-classification", model="micro", method="zero_shot")
    >>> import numpy as np
    >>> scores = classify(np.zeros((32, 32, 3), np.uint8), candidate_labels=["cat", "ship"])
    >>> [sorted(entry) for entry in scores]
    [['label', 'score'], ['label', 'score']]

    Args:
        task: ``"zero-shot-image-classification"``, the only one.
        model: Name or path of a model, or one that is loaded (see :func:`from_model`);
            there is no default. ``"micro"`` comes with the package, a toy for images of
            32 pixels.
        method: Name of a method.
        preset: Preset of its config.
        options: Fields of its config.
        device: Where to load a model by name; a number is a GPU, -1 the CPU.
        dtype: Precision of its weights.
        seed: Of the method's random draws and of views.
        batch_size: Images that are predicted, and learned from, at once.
        reject: Name images of none of the labels: how many of them to look for, such as
            0.9. Results then have ``rejected`` and ``rejection_score``.
        calibrate: Scale scores by a temperature that the images set without labels.
        allow_urls: Fetch images that are named by an ``http(s)`` URL.
        url_seconds: Time that one of these may take.
        url_bytes: Size that one of these may have.

    Raises:
        UserError: An unknown task or name, or a model that lacks what the method needs.

    """
    if task != TASK:
        raise UnknownNameError("task", task, [TASK])
    if model is None:
        raise UserError(NO_MODEL)
    if isinstance(device, int):
        device = "cpu" if device < 0 else f"cuda:{device}"
    if isinstance(model, str):
        model = create_model(model, device=device, dtype=dtype)
    elif not isinstance(model, CLIP):
        model = from_model(model)
    config = method_config(method, preset, options)
    limits = {"seconds": url_seconds, "max_bytes": url_bytes} if allow_urls else None
    return ZeroShotImageClassification(
        model=model,
        method=method,
        config=config,
        seed=seed,
        batch_size=batch_size,
        url_limits=limits,
        reject=reject,
        calibrate=calibrate,
    )


class LabelScores(list[dict[str, Any]]):
    """``{"score": ..., "label": ...}`` for every label, the best first; a list of dicts."""

    rejected: bool | None = None
    """Whether the image looks like none of the labels, of a pipeline with ``reject``."""
    rejection_score: float | None = None
    """How unsure the prediction is, from 0 to 1, of a pipeline with ``reject``."""

    def __init__(self, entries: Iterable[dict[str, Any]], image: ImageLike) -> None:
        super().__init__(entries)
        self.image = image

    def show(self, top_k: int = 3) -> PredictionsPage:
        """The image beside its best labels, for a notebook."""
        return PredictionsPage([self], top_k, images=True)

    def _repr_html_(self) -> str:
        return PredictionsPage([self], len(self), images=False)._repr_html_()


class ImageScores(list[LabelScores]):
    """The scores of several images, in order; a list of lists of dicts."""

    def show(self, top_k: int = 3) -> PredictionsPage:
        """The images beside their best labels, for a notebook; the first hundred of them."""
        return PredictionsPage(self, top_k, images=True)

    def _repr_html_(self) -> str:
        return PredictionsPage(self, 3, images=False)._repr_html_()


class PredictionsPage:
    """Scores as a notebook shows them."""

    def __init__(
        self, scores: Sequence[LabelScores], top_k: int, *, images: bool
    ) -> None:
        self.scores = scores
        self.top_k = top_k
        self.images = images

    def __repr__(self) -> str:
        return f"<predictions of {len(self.scores)} images; a notebook shows them as a table>"

    def _repr_html_(self) -> str:
        rows = "".join(map(self._row, self.scores[:_SHOWN]))
        more = len(self.scores) - _SHOWN
        rest = f"<p>and {more:,} more</p>" if more > 0 else ""
        return f"<table>{rows}</table>{rest}"

    def _row(self, scores: LabelScores) -> str:
        named = isinstance(scores.image, str | os.PathLike)
        name = escape(str(scores.image)) if named else ""
        lines = ["none of these"] if scores.rejected else []
        for entry in scores[: self.top_k]:
            lines.append(f"{entry['score']:.3f} {escape(str(entry['label']))}")
        labels = "<br>".join(lines)
        align = ' style="text-align:left"'
        cells = f"<td{align}>{name}</td><td{align}>{labels}</td>"
        if self.images:
            cells = f"<td>{_thumbnail(scores.image)}</td>{cells}"
        return f"<tr>{cells}</tr>"


def _thumbnail(image: ImageLike) -> str:
    from cliquetta.report.gallery import data_uri

    picture = to_picture(image)[1].copy()
    picture.thumbnail((_THUMBNAIL, _THUMBNAIL))
    return f'<img src="{data_uri(np.asarray(picture))}" alt="">'


@dataclass(eq=False, repr=False)
class ZeroShotImageClassification:
    """A classifier of :func:`pipeline`, which keeps what it learns between calls."""

    model: CLIP
    method: str
    config: Any
    seed: int
    batch_size: int
    url_limits: Mapping[str, Any] | None
    reject: float | None
    calibrate: bool
    adapter: Adapter | None = field(default=None, init=False)
    """The method with its class list; ``None`` before the first call."""
    images_seen: int = field(default=0, init=False)
    """Images since the start or the last reset."""

    def __post_init__(self) -> None:
        _check_batch_size(self.batch_size)
        if self.seed < 0:
            raise UserError(f"seeds are 0 or more, got {self.seed}")
        self._build(
            ClassPrompts(("one", "two", "three"))
        )  # what cannot be built ends here

    def __call__(
        self,
        images: Any,
        candidate_labels: Sequence[str] | None = None,
        hypothesis_template: str | Sequence[str] | None = None,
        *,
        top_k: int | None = None,
        batch_size: int | None = None,
        timeout: float | None = None,
        progress: bool | None = None,
        channel_order: ChannelOrder = "rgb",
    ) -> Any:
        """Classify one image or several, and learn from them.

        Args:
            images: A path, a URL where these are allowed, a PIL image, an array (H, W,
                3) of uint8, or whatever :func:`~cliquetta.data.inputs.separate_images`
                takes; or several of them, also by a generator.
            candidate_labels: The classes; those of the call before by default. With
                others than before, the method keeps what it learned apart from them.
            hypothesis_template: Text with ``{}`` for the label, or several to average;
                transformers' ``"This is a photo of {}."`` by default, without labels
                those of the call before.
            top_k: Entries per image; all by default.
            batch_size: That of this call; by default that of the pipeline.
            timeout: Seconds that a URL of this call may take; by default those of the
                pipeline.
            progress: Show a progress bar; by default where somebody watches and there
                are several batches.
            channel_order: Of arrays: ``bgr`` for images that OpenCV has read.

        Returns:
            :class:`LabelScores` of one image, ``[{"score": ..., "label": ...}, ...]``,
            best first; :class:`ImageScores`, a list of these, for several. Scores are
            probabilities; those of a sigmoid model (SigLIP) as it is (``zero_shot``)
            are independent of each other, as transformers gives them.

        Raises:
            UserError: Labels that cannot be used, or an image that cannot be read; what
                was learned is then as it was before the call.

        """
        is_one = is_single(images)
        size = _check_batch_size(batch_size or self.batch_size)
        limits = {} if timeout is None else {"seconds": timeout}
        given = separate_images(
            images, self.model.preprocess, channel_order=channel_order
        )
        results = ImageScores()
        # what a call that fails goes back to
        adapter_before = self.adapter
        seen_before = self.images_seen
        adapter = self._prepare(candidate_labels, hypothesis_template)
        memory = adapter.state_dict()
        try:
            with _bar(_count(images), size, progress) as bar:
                while batch := [
                    self._open(image, limits) for image in islice(given, size)
                ]:
                    results += self._scores(adapter, batch, top_k)
                    self.images_seen += len(batch)
                    bar.update(len(batch))
        except BaseException:
            adapter.load_state_dict(memory)
            self.adapter = adapter_before
            self.images_seen = seen_before
            raise
        return results[0] if is_one else results

    def _scores(
        self,
        adapter: Adapter,
        batch: Sequence[tuple[ImageLike, ImageLike]],
        top_k: int | None,
    ) -> Iterator[LabelScores]:
        """Yield the scores of a batch, which the method learns from."""
        names = adapter.prompts.names
        prediction = adapter.predict([picture for _, picture in batch])
        independent = bool(self.model.bias) and self.method == "zero_shot"
        best, ranked = prediction.topk(top_k or len(names), independent=independent)
        rejections: Iterable[tuple[Any, Any]] = [(None, None)] * len(batch)
        if prediction.rejection is not None:
            rejections = zip(
                *(part.tolist() for part in prediction.rejection), strict=True
            )
        for (shown, _), scores, indices, (unsure, rejected) in zip(
            batch, best.tolist(), ranked.tolist(), rejections, strict=True
        ):
            entries = [
                {"score": score, "label": names[index]}
                for score, index in zip(scores, indices, strict=True)
            ]
            scored = LabelScores(entries, shown)
            scored.rejection_score = unsure
            scored.rejected = rejected
            yield scored

    def _open(
        self, image: ImageLike, limits: Mapping[str, Any]
    ) -> tuple[ImageLike, ImageLike]:
        """Return an image as results show it later, and as a method reads it."""
        if isinstance(image, str) and is_url(image):
            if self.url_limits is None:
                raise UserError(
                    f"{image!r} is a URL: build the pipeline with allow_urls=True"
                )
            _, picture = to_picture(fetch_image(image, **{**self.url_limits, **limits}))
            small = picture.copy()
            small.thumbnail((_THUMBNAIL, _THUMBNAIL))
            return small, picture
        return image, image

    def _prepare(self, labels: Sequence[str] | None, template: Any) -> Adapter:
        """Return the adapter for these labels, with what was learned under others."""
        templates = (template,) if isinstance(template, str) else tuple(template or ())
        old = self.adapter
        if labels is not None:
            texts = templates or (TEMPLATE,)
            prompts = ClassPrompts(labels, texts)  # type: ignore[arg-type]  # made a tuple
        elif old is not None:
            prompts = ClassPrompts(
                old.prompts.names, templates or old.prompts.templates
            )
        else:
            raise UserError("no labels: give candidate_labels=['cat', 'dog']")
        if old is not None and prompts == old.prompts:
            return old
        if old is not None and old.outlives_classes:
            self.adapter = old.with_classes(prompts)
            return self.adapter
        if old is not None:
            warnings.warn(
                f"{self.method} learns about its classes only: it starts again with these labels",
                stacklevel=3,
            )
        self.adapter = self._build(prompts)
        return self.adapter

    def _build(self, prompts: ClassPrompts) -> Adapter:
        adapter = create_method(
            self.method, self.model, prompts, self.config, seed=self.seed
        )
        adapter.enable(reject=self.reject, calibrate=self.calibrate)
        return adapter

    def reset(self) -> None:
        """Forget what was learned; the labels stay."""
        self.images_seen = 0
        if self.adapter is not None:
            self.adapter.reset()

    def save(self, path: Path | str) -> None:
        """Write what was learned, with the labels, to a safetensors file."""
        if self.adapter is None:
            raise UserError("nothing to save: the pipeline has not been called yet")
        prompts = self.adapter.prompts
        labels = {
            "candidate_labels": prompts.names,
            "hypothesis_template": prompts.templates,
        }
        self.adapter.save(path, notes={"images": self.images_seen, **labels})

    def load(self, path: Path | str) -> None:
        """Continue from a file of :meth:`save`, with its labels.

        Raises:
            UserError: It was saved with another method, model or config, or not by a
                pipeline.

        """
        notes = read_header(path)["notes"]
        if "candidate_labels" not in notes:
            raise UserError(
                f"{path} was not saved by a pipeline: it does not name its labels; use "
                "cliquetta.load_method"
            )
        prompts = ClassPrompts(
            notes["candidate_labels"], tuple(notes["hypothesis_template"])
        )
        adapter = self._build(prompts)
        load_state(adapter, path)
        self.adapter, self.images_seen = adapter, int(notes["images"])

    def __repr__(self) -> str:
        labels = (
            "no labels yet"
            if self.adapter is None
            else f"{len(self.adapter.prompts)} labels"
        )
        return (
            f"<{TASK}: {self.method} on {self.model.id}, {labels}, "
            f"learned from {self.images_seen:,} images>"
        )


def _check_batch_size(batch_size: int) -> int:
    if batch_size < 1:
        raise UserError(f"a batch holds at least one image, got {batch_size}")
    return batch_size


def _count(images: Any) -> int | None:
    """Return how many images were given, if that can be known before they are read."""
    if is_single(images):
        return 1
    return (
        len(images)
        if isinstance(images, Sized) and not isinstance(images, str)
        else None
    )


def _bar(total: int | None, batch_size: int, wanted: bool | None) -> Any:
    """Make a progress bar as the terminal or the notebook can show it."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # of tqdm, that a notebook lacks widgets: text will do
        from tqdm.auto import tqdm

        shell: Any = sys.modules.get("IPython")
        watched = sys.stderr.isatty() or (
            shell is not None and shell.get_ipython() is not None
        )
        several = total is None or total > batch_size
        shown = watched and several if wanted is None else wanted
        return tqdm(total=total, unit="image", desc="classify", disable=not shown)
