"""The section of a run that kept evidence: cliques, attention, features, changed images."""

import statistics
from dataclasses import dataclass

from cliquetta.evaluation.evidence_log import Evidence
from cliquetta.model.attention import Kind
from cliquetta.report.attention_figure import attention_figure, image_maps
from cliquetta.report.embedding import How, embed, embedding_figure
from cliquetta.report.gallery import (
    CliqueCard,
    Tile,
    changed_tiles,
    clique_cards,
    data_uri,
)
from cliquetta.report.markup import PageFigures, count, esc, number
from cliquetta.report.runs import ReportedRun

_SIGNS = {"repaired": "✓ ", "broken": "✗ ", "moved": "", "same": "prediction "}


@dataclass(frozen=True)
class Amounts:
    """Amounts of evidence shown of one run."""

    cliques: int = 6
    changed: int = 24
    maps: int = 3


def evidence_section(
    run: ReportedRun,
    label: str,
    evidence: Evidence,
    amounts: Amounts,
    figures: PageFigures,
    *,
    kind: Kind = "class",
    how: How = "auto",
) -> str:
    """Everything that a run left to look at."""
    parts = [_counts(evidence), _domains(evidence), _changed(run, evidence, amounts.changed)]
    parts.append(_gallery(run, evidence, amounts.cliques))
    parts.append(_attention(run, label, evidence, amounts.maps, kind, figures))
    parts.append(_embedding(run, label, evidence, how, figures))
    return "".join(parts)


def _counts(evidence: Evidence) -> str:
    lines = [line for line in evidence.counts if "cliques" in line]
    images = sum(line["images"] for line in lines)
    if not images:
        return ""

    def mean(key: str) -> float:
        return statistics.mean(float(line[key]) for line in lines)

    inside = 100 * sum(line["images_with_clique"] for line in lines) / images
    retained = 100 * sum(line["images_with_retained"] for line in lines) / images
    text = (
        f"Of {count(len(lines), 'batch', 'batches')}: on average "
        f"{mean('cliques'):.1f} cliques in {mean('distinct_sets'):.1f} different sets of images, "
        f"{mean('mean_size'):.1f} images each, the largest {mean('max_size'):.1f}. "
        f"{inside:.0f} % of the images were in a clique; {retained:.0f} % were scored with a "
        "retained prompt."
    )
    return f"<p>{esc(text)}</p>"


def _domains(evidence: Evidence) -> str:
    """The sentence about the domains of a run's batches."""
    lines = [line for line in evidence.counts if "domain" in line]
    if not lines:
        return ""
    size, believed, changed = (
        100 * statistics.mean(float(line[key]) for line in lines)
        for key in ("step_size", "belief", "changed")
    )
    domains = len({line["domain"] for line in lines})
    batches = count(len(lines), "batch", "batches")
    text = (
        f"{batches} with the LayerNorms of {count(domains, 'domain')}. On average, plain "
        f"CLIP's uncertainty allowed {size:.0f} % of a full step of learning, its shares of the "
        f"classes were believed to {believed:.0f} %; the rest was attributed to bias. "
        f"{changed:.0f} % of its predictions were changed. Collapsed LayerNorms restarted: "
        f"{lines[-1]['restarts']}. Images left to zero-shot CLIP (abstained): "
        f"{lines[-1].get('abstained', 0)}. Verdict without labels: {lines[-1]['verdict']}."
    )
    return f"<p>{esc(text)}</p>"


def _changed(run: ReportedRun, evidence: Evidence, limit: int) -> str:
    tiles = changed_tiles(evidence, limit)
    if not tiles:
        return ""
    shown = sum(len(batch.keys) for batch in evidence.batches)
    return (
        f"<h3>Images whose prediction changed</h3>{_tiles(run, tiles)}"
        f'<p class="note">Out of {count(shown, "image")} that the run kept to show, against plain '
        "CLIP on the same image. ✓ and a full frame: now right; ✗ and a dashed frame: now "
        "wrong.</p>"
    )


def _gallery(run: ReportedRun, evidence: Evidence, limit: int) -> str:
    cards = clique_cards(evidence, limit)
    if not cards:
        return ""
    return (
        "<h3>Cliques</h3>"
        '<p class="note">Images that resemble one another among those with the same '
        "class in their best predictions. Under each: its label, its mean cosine to the other "
        "members, and its prediction before and after.</p>"
        + "".join(_card(run, card) for card in cards)
    )


def _card(run: ReportedRun, card: CliqueCard) -> str:
    facts = [f"batch {card.batch}", count(card.size, "image")]
    if card.before is not None:
        loss = number(card.before["total"], 3)
        after = "" if card.after is None else f" → {number(card.after['total'], 3)}"
        facts.append(f"loss {loss}{after}")
    more = card.size - len(card.tiles)
    if more > 0:
        facts.append(f"{more} not shown")
    return (
        f'<div class="clique"><h4>candidates for “{esc(run.class_name(card.label))}” '
        f"<small>{esc(' · '.join(facts))}</small></h4>{_tiles(run, card.tiles)}</div>"
    )


def _tiles(run: ReportedRun, tiles: list[Tile] | tuple[Tile, ...]) -> str:
    return f'<ul class="tiles">{"".join(_tile(run, tile) for tile in tiles)}</ul>'


def _tile(run: ReportedRun, tile: Tile) -> str:
    before, after = run.class_name(tile.before), run.class_name(tile.after)
    prediction = after if tile.change == "same" else f"{before} → {after}"
    label = "" if tile.label < 0 else run.class_name(tile.label)
    lines = [f"<span>is {esc(label)}</span>" if label else ""]
    if tile.similarity is not None:
        lines.append(f"<span>cosine {tile.similarity:.2f}</span>")
    sign = _SIGNS[tile.change]
    lines.append(f'<span class="prediction">{sign}{esc(prediction)}</span>')
    small = " small-pictures" if len(tile.picture) <= 64 else ""
    alt = f"{label or 'image'}, predicted {prediction}"
    return (
        f'<li class="tile {tile.change}{small}" title="{esc(tile.key)}">'
        f'<img src="{data_uri(tile.picture)}" alt="{esc(alt)}">{"".join(lines)}</li>'
    )


def _attention(
    run: ReportedRun, label: str, evidence: Evidence, limit: int, kind: Kind, figures: PageFigures
) -> str:
    images = image_maps(evidence, run.names, limit, kind)
    if not images:
        return ""
    what = "attention of the class token" if kind == "class" else "attention rollout"
    block = run.record.settings["config"]["blocks"][0]
    caption = (
        f"Mean over heads of the {what} from block {block} on, the first with a prompt; "
        "brighter is more, one scale per image. From the left: the image with its label and its "
        "prediction, plain CLIP, prompts of single cliques (class and size), all prompts of the "
        "image's cliques together. Below each map, what it has more (violet) and less (brown) "
        "than plain CLIP, and the share of attention that moved."
    )
    alt = f"Attention maps of {count(len(images), 'image')} for {label}"
    title = f"attention-{run.id}-{kind}-{len(images)}"
    figure = figures.add(title, lambda: attention_figure(images), alt, caption)
    return f"<h3>Attention</h3>{figure}"


def _embedding(
    run: ReportedRun, label: str, evidence: Evidence, how: How, figures: PageFigures
) -> str:
    title = f"features-{run.id}"
    if title not in figures.rendered:  # t-SNE takes seconds
        embedding = embed(evidence, how)
        if embedding is None:
            return ""
        before, after = embedding.cohesion
        caption = (
            f"Features of {count(len(embedding.labels), 'image')} by {embedding.how}, both panels "
            "in the same axes. Cohesion is measured on the features themselves: mean cosine to the "
            "own class's centre less that to the nearest other one."
        )
        alt = (
            f"Map of image features, plain and with the prompts of {label}; cohesion "
            f"{before:.4f} and {after:.4f}"
        )
        figures.add(title, lambda: embedding_figure(embedding, run.names), alt, caption)
    return f"<h3>Features</h3>{figures.rendered[title]}"
