"""Pages of the web app as HTML, and their pictures. Every text of a visitor is escaped here."""

import base64
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from cliquetta.app.session import AppSession, Row, Shown, Tally
from cliquetta.methods.building.base import Adapter
from cliquetta.methods.building.explanation import CacheCount
from cliquetta.methods.scap.evidence import describe
from cliquetta.model.attention import Kind, difference, patch_grid, prompted_maps
from cliquetta.model.vision import VisionTower
from cliquetta.report.attention_figure import overlay
from cliquetta.report.gallery import data_uri
from cliquetta.report.markup import count
from cliquetta.report.style import BASELINE_LOOK, line_look, new_figure, to_file
from cliquetta.types import Prediction

Picture = npt.NDArray[np.uint8]

MOST_CLIQUES = 60  # galleries on one page
NOTHING_YET = "<p class='cq-quiet'>Run a batch first.</p>"
# rows of the figure of a cache; of longer class lists the fullest are shown
_CLASSES = 40
_BATCHES = 60  # columns of it: the last ones
_NUMBERED_BATCHES = 20  # columns up to which its cells have numbers
_MAP_SIDE = 192  # pixels of an attention map

CSS = """
.cq-grid {display: flex; flex-wrap: wrap; gap: 10px}
.cq-card {width: 167px; border: 1px solid var(--border-color-primary); border-radius: 8px;
  padding: 8px; font-size: 13px; line-height: 1.35}
.cq-card img {width: 100%; border-radius: 4px; display: block; margin: 0 0 6px}
.cq-card p, .cq-clique p {margin: 0; overflow-wrap: anywhere}
.cq-line {display: flex; justify-content: space-between; margin-top: 3px}
.cq-line span:last-child {white-space: nowrap}
.cq-card.cq-changed {border: 3px solid #d55e00; padding: 6px}
.cq-badge {display: inline-block; background: #d55e00; color: white; border-radius: 4px;
  padding: 0 6px; font-size: 11px; font-weight: 600}
.cq-name {overflow: hidden; text-overflow: ellipsis; white-space: nowrap; opacity: .7}
.cq-quiet {opacity: .75}
.cq-clique {border-top: 1px solid var(--border-color-primary); padding: 10px 0}
.cq-clique .cq-grid {margin-top: 6px}
.cq-small {width: 104px; font-size: 12px}
.cq-map {width: 208px}
.cq-figure {max-width: 640px; width: 100%; background: white; border-radius: 8px}
.cq-notice {border-left: 4px solid #0072b2; padding: 6px 12px; margin: 2px 0}
.cq-notice.cq-bad {border-color: #d55e00}
.cq-notice ul {margin: 4px 0 0 18px}
#pictures .grid-wrap {min-height: 0; max-height: none}
"""


def notice(text: str, *, bad: bool = False, items: Sequence[str] = ()) -> str:
    """Render a sentence above the tabs, with a list under it."""
    kind = "cq-notice cq-bad" if bad else "cq-notice"
    role = "alert" if bad else "status"
    body = escape(text)
    if items:
        listed = "".join(f"<li>{escape(item)}</li>" for item in items)
        body += f"<ul>{listed}</ul>"
    return f"<div class='{kind}' role='{role}'>{body}</div>"


def batch_notice(session: AppSession, batch: Shown, opening: str) -> str:
    """Render a summary of a batch, and the score so far."""
    tally = session.tally
    method = session.info.method
    words = [opening] if opening else []
    words.append(f"Batch {session.batches}: {count(len(batch.rows), 'image')}.")
    changed = sum(row.changed for row in batch.rows)
    words.append(f"{method} differs from zero-shot on {changed}.")
    if tally.labelled:
        before = 100 * tally.right["before"] / tally.labelled
        after = 100 * tally.right["after"] / tally.labelled
        words.append(
            f"Right so far, of {count(tally.labelled, 'image')}: zero-shot {before:.1f} %, "
            f"{method} {after:.1f} %."
        )
    text = notice(" ".join(words))
    if not batch.refused:
        return text
    sentence = f"{count(len(batch.refused), 'file')} could not be used; the others were predicted."
    reasons = [f"{entry.name}: {entry.reason}" for entry in batch.refused]
    return text + notice(sentence, bad=True, items=reasons)


def predictions_page(batch: Shown, method: str) -> str:
    """Render cards of a batch: both predictions side by side, changed ones marked."""
    cards = []
    for row, picture in zip(batch.rows, batch.pictures, strict=True):
        file = escape(row.name.rpartition("/")[2])
        body = f"<p class='cq-name' title='{escape(row.name)}'>{file}</p>"
        body += _label("zero-shot", row.before, row.before_probability, row.truth)
        body += _label(method, row.after, row.after_probability, row.truth)
        if row.truth is not None:
            body += _quiet(f"truth: {row.truth}")
        body += _badge(row)
        kind = "cq-changed" if row.changed else ""
        cards.append(_card(thumbnail(picture), row.name, body, kind))
    return _grid(cards)


def _card(image: str, alt: str, body: str, kind: str) -> str:
    picture = f"<img src='{image}' alt='{escape(alt)}'>"
    return f"<div class='cq-card {kind}'>{picture}{body}</div>"


def _grid(cards: Sequence[str]) -> str:
    return f"<div class='cq-grid'>{''.join(cards)}</div>"


def _badge(row: Row) -> str:
    return " <span class='cq-badge'>changed</span>" if row.changed else ""


def _label(who: str, label: str, probability: float, truth: str | None) -> str:
    """Render a class with its probability, marked as right or wrong where the truth is known."""
    share = f"{100 * probability:.0f}%"
    if truth is not None:
        share += " ✓" if label == truth else " ✗"
    line = f"<span class='cq-quiet'>{escape(who)}</span><span>{share}</span>"
    return f"<div class='cq-line'>{line}</div><p><b>{escape(label)}</b></p>"


def cliques_page(batch: Shown, method: str, classes: Sequence[str]) -> str:
    """Render a gallery per clique of a batch."""
    if "cliques" not in batch.prediction.evidence:
        return _quiet(f"{method} forms no cliques; scap does.")

    cliques = describe(batch.prediction)["cliques"]
    if not cliques:
        return _quiet("No images of this batch were similar enough to form a clique.")
    small = [thumbnail(picture, 96) for picture in batch.pictures]
    members = {index for clique in cliques for index in clique["members"]}
    images = count(len(members), "image")
    parts = [_quiet(f"{count(len(cliques), 'clique')} of {images}.")]
    for clique in cliques[:MOST_CLIQUES]:
        parts.append(_clique(clique, batch.rows, small, classes))
    if len(cliques) > MOST_CLIQUES:
        words = f"The first {MOST_CLIQUES} of {len(cliques)} cliques are shown."
        parts.append(_quiet(words))
    return "".join(parts)


def _clique(
    clique: dict[str, Any],
    rows: Sequence[Row],
    small: Sequence[str],
    classes: Sequence[str],
) -> str:
    """Render a clique: its class, its size, its loss before and after learning, its members."""
    name = escape(classes[clique["class"]])
    head = f"<b>{name}</b> · {count(clique['size'], 'image')}"
    before = clique["before"]
    after = clique["after"]
    if before is not None and after is not None:
        head += f" · loss {before['total']:.3f} → {after['total']:.3f}"

    # Under every image the predictions that learning changed.
    members = []
    for index in clique["members"]:
        row = rows[index]
        label = f"{row.before} → {row.after}" if row.changed else row.after
        body = f"<p>{escape(label)}{_badge(row)}</p>"
        members.append(_card(small[index], row.name, body, "cq-small"))
    return f"<div class='cq-clique'><p>{head}</p>{_grid(members)}</div>"


def attention_page(session: AppSession, batch: Shown, index: int, kind: str) -> str:
    """Render overlays of one image of a batch."""
    index = min(max(index, 0), len(batch.rows) - 1)
    mapped = attention_maps(
        session.adapter,
        batch.pixels,
        batch.prediction,
        index,
        kind="rollout" if kind == "rollout" else "class",
    )
    if mapped is None:
        words = f"{session.info.model} has no attention to show: it is not a ViT."
        return _quiet(words)
    titles, maps = mapped

    row = batch.rows[index]
    picture = batch.pictures[index]
    cards = [_map_card("the image", "as the model sees it", picture)]

    # All maps have one scale; the first is plain CLIP's.
    grids = patch_grid(maps).numpy()
    brightest = float(grids.max()) or 1.0
    moved = difference(maps, maps[:1]).tolist()
    to_prompts = maps[:, 0].tolist()
    for number, title in enumerate(titles):
        heat = overlay(picture, grids[number] / brightest)
        below = ""
        if moved[number]:
            away = f"{100 * moved[number]:.1f}% of it moved"
            below = f"{away}, {100 * to_prompts[number]:.1f}% to prompts"
        cards.append(_map_card(title, below, heat))
    words = (
        f"{row.name}: zero-shot says {row.before}, {session.info.method} {row.after}."
    )
    if len(maps) == 1:
        words += (
            " No visual prompts were in this image's prediction: plain attention only."
        )
    return f"<p>{escape(words)}</p>{_grid(cards)}"


def _map_card(title: str, below: str, picture: Picture) -> str:
    body = f"<p><b>{escape(title)}</b></p>{_quiet(below)}"
    return _card(thumbnail(picture, _MAP_SIDE), title, body, "cq-map")


def memory_page(tally: Tally, method: str, classes: Sequence[str]) -> str:
    """Render the memory of the method over the batches of a tally, and the score."""
    parts = []
    for cache, latest in tally.counts[-1].items():
        figure = cache_figure([counts[cache] for counts in tally.counts], classes)
        name = escape(cache)
        filled = sum(held > 0 for held in latest.held)
        parts.append(
            f"<p><b>{name}</b>: {sum(latest.held)} held for {filled} of "
            f"{len(latest.held)} classes, at most {latest.capacity} each.</p>"
            f"<img class='cq-figure' src='{figure}' alt='{name} per class and batch'>"
        )
    if not parts:
        parts.append(_quiet(f"{method} keeps no cache of entries per class."))
    if tally.curve:
        figure = accuracy_figure(tally.curve, method)
        parts.append(
            "<p><b>Correct predictions so far</b></p>"
            f"<img class='cq-figure' src='{figure}' alt='accuracy over the stream'>"
        )
    return "".join(parts)


def _quiet(text: str) -> str:
    return f"<p class='cq-quiet'>{escape(text)}</p>"


def enlarged(picture: Picture, side: int = 112) -> Picture:
    """Scale a picture (S, S, 3) to the size at which it is shown."""
    image = Image.fromarray(picture).resize((side, side), Image.Resampling.BICUBIC)
    return np.asarray(image)


def thumbnail(picture: Picture, side: int = 112) -> str:
    """Write a picture (S, S, 3) as the address of an image on a page."""
    return data_uri(enlarged(picture, side))


def accuracy_figure(curve: Sequence[tuple[int, float, float]], method: str) -> str:
    """Draw accuracy so far, over the images of the stream."""
    images = [seen for seen, _, _ in curve]
    before = [100 * share for _, share, _ in curve]
    after = [100 * share for _, _, share in curve]
    with new_figure(6.4, 2.6) as figure:
        axes = figure.add_subplot()
        # Zero-shot is drawn on top, dashed and hollow, so that equal curves are both
        # seen.
        hollow = {"marker": "s", "markersize": 7, "fillstyle": "none", "zorder": 3}
        axes.plot(images, before, label="zero-shot", **BASELINE_LOOK | hollow)
        axes.plot(images, after, label=method, **line_look(0))
        axes.set_ylim(0, 105)
        axes.set_xlabel("images so far")
        axes.set_ylabel("accuracy, %")
        axes.set_xlim(left=0)
        axes.legend(loc="lower right")
        return _png(to_file(figure, "png"))


def cache_figure(history: Sequence[CacheCount], names: Sequence[str]) -> str:
    """Draw entries per class (rows) after each batch (columns)."""
    from matplotlib.ticker import MaxNLocator

    recent = history[-_BATCHES:]
    first = len(history) - len(recent) + 1  # number of the first batch that is shown

    capacity = history[-1].capacity
    table = np.array([count.held for count in recent]).T

    # Of many classes the fullest are shown, in the order of the class list.
    fullest = np.argsort(-table[:, -1], kind="stable")[:_CLASSES]
    labels = np.sort(fullest)
    table = table[labels]
    height, width = table.shape
    with new_figure(6.4, 1.0 + 0.22 * height) as figure:
        axes = figure.add_subplot()
        axes.grid(visible=False)
        edges = (first - 0.5, first + width - 0.5, height - 0.5, -0.5)
        drawn = axes.imshow(table, vmin=0, vmax=capacity, aspect="auto", extent=edges)
        axes.set_yticks(range(height), [names[label] for label in labels])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("batch")
        if width <= _NUMBERED_BATCHES:
            centred: dict[str, Any] = {"ha": "center", "va": "center"}
            for (row, column), held in np.ndenumerate(table):
                ink = "white" if held < 0.6 * capacity else "black"
                axes.text(first + column, row, str(held), color=ink, **centred)
        figure.colorbar(drawn, ax=axes, label=f"entries, at most {capacity}", pad=0.02)
        return _png(to_file(figure, "png"))


def _png(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def attention_maps(
    adapter: Adapter, pixels: Tensor, prediction: Prediction, row: int, kind: Kind
) -> tuple[Sequence[str], Tensor] | None:
    """Compute titles and maps (passes, 1 + T) of image ``row``; ``None`` if the model is no ViT.

    The first is plain CLIP's, others are those of passes with prompts.
    """
    tower = adapter.model.visual
    if not isinstance(tower, VisionTower):
        return None
    image = pixels[row].to(adapter.model.device)
    titles = ["plain CLIP"]
    passes = adapter.prompted_passes(prediction, row)
    if passes is None:
        prompts = torch.zeros(
            0, 1, 1, 2, tower.config.width, device=tower.position.device
        )
        blocks: Sequence[int] = (len(tower.blocks) - 1,)
        used = torch.zeros(1, 0)
    else:
        titles += passes.titles
        prompts = passes.prompts
        blocks = passes.blocks
        # The first pass, plain CLIP's, uses no prompt.
        no_prompt = torch.zeros(1, passes.used.shape[1])
        used = torch.cat([no_prompt, passes.used.cpu()])
    maps = prompted_maps(tower, image, prompts, blocks, used.bool())[kind]
    return titles, maps.float().cpu()
