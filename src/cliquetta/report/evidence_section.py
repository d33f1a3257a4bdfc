"""The section of a run with evidence: cliques, attention, features, changed images."""

from dataclasses import dataclass
from statistics import mean

from cliquetta.evaluation.evidence_log import Evidence
from cliquetta.model.attention import Kind
from cliquetta.report.attention_figure import attention_figure, image_maps
from cliquetta.report.embedding import How, embed, embedding_figure
from cliquetta.report.gallery import changed_section, cliques_section
from cliquetta.report.markup import PageFigures, count, esc
from cliquetta.report.runs import ReportedRun
from cliquetta.report.scap_findings import find


@dataclass(frozen=True)
class Amounts:
    """Amounts shown of one run's evidence, and of how much else there is on its page."""

    cliques: int = 6
    changed: int = 24
    maps: int = 3
    runs: int = 8  # whose evidence is shown
    datasets: int = 24  # with figures


def evidence_section(
    run: ReportedRun,
    label: str,
    evidence: Evidence,
    amounts: Amounts,
    figures: PageFigures,
    kind: Kind = "class",
    how: How = "auto",
) -> str:
    """Render all evidence of a run."""
    return (
        _cliques_in_words(evidence)
        + _domains_in_words(evidence)
        + changed_section(run, evidence, amounts.changed)
        + cliques_section(run, evidence, amounts.cliques)
        + _attention(run, label, evidence, amounts.maps, kind, figures)
        + _embedding(run, label, evidence, how, figures)
    )


def _cliques_in_words(evidence: Evidence) -> str:
    findings = find(evidence)
    if findings is None:
        return ""
    return f"<p>{esc(' '.join(findings.sentences()))}</p>"


def _domains_in_words(evidence: Evidence) -> str:
    lines = [line for line in evidence.counts if "domain" in line]
    if not lines:
        return ""
    # Between the steps of a settled domain nothing is compared with zero-shot
    # predictions.
    changed = [float(line["changed"]) for line in lines if "changed" in line]
    batches = count(len(lines), "batch", "batches")
    domains = count(len({line["domain"] for line in lines}), "domain")
    prior_weight = 100 * mean(float(line["belief"]) for line in lines)
    text = (
        f"{batches} with the LayerNorms of {domains}. Weight of the class prior, on "
        f"average: {prior_weight:.0f} %. Predictions that differ from zero-shot CLIP's: "
        f"{100 * mean(changed):.0f} %."
    )
    return f"<p>{esc(text)}</p>"


def _attention(
    run: ReportedRun,
    label: str,
    evidence: Evidence,
    limit: int,
    kind: Kind,
    figures: PageFigures,
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
