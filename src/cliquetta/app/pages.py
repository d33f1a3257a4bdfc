"""Pages of the web app as HTML. Every text of a visitor is escaped here."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from cliquetta.app.figures import (
    accuracy_figure,
    attention_maps,
    cache_figures,
    clique_description,
    overlays,
    thumbnail,
)
from cliquetta.app.session import AppSession, Row, Shown
from cliquetta.serve.schema import ImageProblem

MOST_CLIQUES = 60
"""Galleries on one page."""
NOTHING_YET = "<p class='cq-quiet'>Run a batch first.</p>"

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
    """A sentence above the tabs, with a list under it."""
    kind, role = ("cq-notice cq-bad", "alert") if bad else ("cq-notice", "status")
    listed = "".join(f"<li>{escape(item)}</li>" for item in items)
    below = f"<ul>{listed}</ul>" if items else ""
    return f"<div class='{kind}' role='{role}'>{escape(text)}{below}</div>"


def batch_notice(session: AppSession, shown: Shown, opening: str = "") -> str:
    """Summary of a batch, and the score so far."""
    tally, method = session.tally, session.request.method
    words = [f"Batch {session.batches}: {_count(len(shown.rows), 'image')}."]
    words = [opening, *words] if opening else words
    changed = sum(row.changed for row in shown.rows)
    words.append(f"{method} differs from zero-shot on {changed}.")
    if tally.labelled:
        before, after = (100 * tally.right[side] / tally.labelled for side in ("before", "after"))
        words.append(
            f"Right so far, of {_count(tally.labelled, 'image')}: zero-shot {before:.1f} %, "
            f"{method} {after:.1f} %."
        )
    text = notice(" ".join(words))
    return text + refused_notice(shown.refused) if shown.refused else text


def refused_notice(refused: Sequence[ImageProblem]) -> str:
    """Every file that could not be used, with the reason."""
    sentence = f"{_count(len(refused), 'file')} could not be used; the others were predicted."
    return notice(sentence, bad=True, items=[f"{entry.name}: {entry.reason}" for entry in refused])


def predictions_page(session: AppSession) -> str:
    """Cards of the last batch: both answers side by side, changed ones marked."""
    shown = session.last
    if shown is None:
        return NOTHING_YET
    cards = [
        _card(row, thumbnail(picture), session.request.method)
        for row, picture in zip(shown.rows, shown.pictures, strict=True)
    ]
    return f"<div class='cq-grid'>{''.join(cards)}</div>"


def _card(row: Row, image: str, method: str) -> str:
    badge = "<span class='cq-badge'>changed</span>" if row.changed else ""
    kind = "cq-card cq-changed" if row.changed else "cq-card"
    truth = "" if row.truth is None else f"<p class='cq-quiet'>truth: {escape(row.truth)}</p>"
    before = _answer("zero-shot", row.before, row.before_probability, row.truth)
    after = _answer(method, row.after, row.after_probability, row.truth)
    return (
        f"<div class='{kind}'><img src='{image}' alt='{escape(row.name)}'>"
        f"<p class='cq-name' title='{escape(row.name)}'>{escape(row.name.rpartition('/')[2])}</p>"
        f"{before}{after}{truth}{badge}</div>"
    )


def _answer(who: str, label: str, probability: float, truth: str | None) -> str:
    mark = "" if truth is None else (" ✓" if label == truth else " ✗")
    share = f"{100 * probability:.0f}%{mark}"
    line = f"<span class='cq-quiet'>{escape(who)}</span><span>{share}</span>"
    return f"<div class='cq-line'>{line}</div><p><b>{escape(label)}</b></p>"


def cliques_page(session: AppSession) -> str:
    """A gallery per clique of the last batch."""
    shown = session.last
    if shown is None:
        return NOTHING_YET
    description = clique_description(shown.prediction)
    if description is None:
        return _quiet(f"{session.request.method} forms no cliques; scap does.")
    cliques = description["cliques"]
    if not cliques:
        return _quiet("No images of this batch were similar enough to form a clique.")
    small = [thumbnail(picture, 96) for picture in shown.pictures]
    names = session.request.classes
    members = {index for clique in cliques for index in clique["members"]}
    parts = [_quiet(f"{_count(len(cliques), 'clique')} of {_count(len(members), 'image')}.")]
    parts += [_clique(clique, shown.rows, small, names) for clique in cliques[:MOST_CLIQUES]]
    if len(cliques) > MOST_CLIQUES:
        parts.append(_quiet(f"The first {MOST_CLIQUES} of {len(cliques)} cliques are shown."))
    return "".join(parts)


def _clique(
    clique: dict[str, Any], rows: Sequence[Row], small: Sequence[str], names: Sequence[str]
) -> str:
    label = names[clique["class"]]
    head = f"<b>{escape(label)}</b> · {_count(clique['size'], 'image')}"
    if clique["before"] is not None and clique["after"] is not None:
        before, after = clique["before"]["total"], clique["after"]["total"]
        head += f" · loss {before:.3f} → {after:.3f}"
    members = []
    for index in clique["members"]:
        row = rows[index]
        answer = f"{row.before} → {row.after}" if row.changed else row.after
        badge = " <span class='cq-badge'>changed</span>" if row.changed else ""
        members.append(
            f"<div class='cq-card cq-small'><img src='{small[index]}' alt='{escape(row.name)}'>"
            f"<p>{escape(answer)}{badge}</p></div>"
        )
    return (
        f"<div class='cq-clique'><p>{head}</p><div class='cq-grid'>{''.join(members)}</div></div>"
    )


def attention_page(session: AppSession, index: int, kind: str) -> str:
    """Overlays of one image of the last batch."""
    shown = session.last
    if shown is None or not shown.rows:
        return NOTHING_YET
    index = min(max(index, 0), len(shown.rows) - 1)
    chosen: Any = "rollout" if kind == "rollout" else "class"
    maps = attention_maps(session.adapter, shown.pixels, shown.prediction, index, chosen)
    if not maps:
        return _quiet(f"{session.request.model} has no attention to show: it is not a ViT.")
    row, picture = shown.rows[index], shown.pictures[index]
    cards = [_map_card("the image", "as the model sees it", thumbnail(picture, 192))]
    for entry, image in zip(maps, overlays(picture, maps), strict=True):
        moved = f"{100 * entry.moved:.1f}% of it moved, {100 * entry.to_prompts:.1f}% to prompts"
        cards.append(_map_card(entry.title, moved if entry.moved else "", image))
    words = f"{row.name}: zero-shot says {row.before}, {session.request.method} {row.after}."
    if len(maps) == 1:
        words += " No visual prompts were in this image's answer: plain attention only."
    return f"<p>{escape(words)}</p><div class='cq-grid'>{''.join(cards)}</div>"


def _map_card(title: str, below: str, image: str) -> str:
    return (
        f"<div class='cq-card cq-map'><img src='{image}' alt='{escape(title)}'>"
        f"<p><b>{escape(title)}</b></p><p class='cq-quiet'>{escape(below)}</p></div>"
    )


def memory_page(session: AppSession) -> str:
    """Memory of the method over the batches, and the score."""
    tally, method = session.tally, session.request.method
    if not session.batches:
        return NOTHING_YET
    parts = []
    figures = cache_figures(tally.counts, session.request.classes)
    for cache, figure in figures.items():
        count = tally.counts[-1][cache]
        total, filled = sum(count.held), sum(held > 0 for held in count.held)
        parts.append(
            f"<p><b>{escape(cache)}</b>: {total} held for {filled} of {len(count.held)} classes, "
            f"at most {count.capacity} each.</p>"
            f"<img class='cq-figure' src='{figure}' alt='{escape(cache)} per class and batch'>"
        )
    if not figures:
        parts.append(_quiet(f"{method} keeps no cache of entries per class."))
    if tally.curve:
        figure = accuracy_figure(tally.curve, method)
        parts.append(
            "<p><b>Right answers so far</b></p>"
            f"<img class='cq-figure' src='{figure}' alt='accuracy over the stream'>"
        )
    return "".join(parts)


def _quiet(text: str) -> str:
    return f"<p class='cq-quiet'>{escape(text)}</p>"


def _count(amount: int, noun: str) -> str:
    return f"{amount:,} {noun}{'' if amount == 1 else 's'}"
