"""Every decision of SCAP as a field; the defaults are the paper's, read literally."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cliquetta.errors import UserError
from cliquetta.methods.building.adam import Adam
from cliquetta.methods.building.config import (
    Count,
    Decay,
    Fraction,
    MethodConfig,
    NonNegative,
    Positive,
    Weight,
)
from cliquetta.methods.building.views import ViewKind, Zoom
from cliquetta.types import ViewSpec


@dataclass(frozen=True)
class SCAPConfig(
    MethodConfig, renamed={"learning_rate": "lr", "confident_share": "selection_fraction"}
):
    """Settings of SCAP. Where the paper is silent, the field says whose choice the default is."""

    # --- mining (Eq. 1-3)
    topk: Count = 3
    """Classes per image that put it into candidate sets."""
    threshold: float = 0.8
    """t, cosine above which two images are similar. Never stated in the paper; the released
    default. Its scripts use 0.65 (ImageNet-A), 0.90 (R, Sketch) and 0.80 (V2)."""
    full_set: bool = False
    """Add each whole candidate set as a clique, even of one image (released code)."""
    deduplicate: Literal["class", "none"] = "class"
    """Equal cliques of one class count once (paper), or as often as they occur (released code)."""
    mining_features: Literal["plain", "start-prompt"] = "plain"
    """Features that are compared: CLIP's own, or those with the start prompt (released code)."""

    # --- prompts (Eq. 4, 6)
    modalities: Literal["both", "image", "text"] = "both"
    """Which prompts are learned: the component ablation."""
    blocks: tuple[int, ...] = (1,)
    """Visual blocks that take a prompt; one block is the released choice, more are deep prompts."""
    prompt_length: Count = 1
    """Tokens of a visual prompt per block."""
    prompt_scale: NonNegative = 1.0
    """Visual prompts start at U(-scale, scale)."""
    start: Literal["shared", "fresh"] = "shared"
    """One start prompt for the run, or a fresh draw for every clique."""
    text_scope: Literal["shared", "class"] = "shared"
    """One text context per clique for all classes (Eq. 6), or one for each class (released)."""
    text_mix: Weight = 0.5
    """rho, share of the fixed templates in a text feature when there are several templates."""

    # --- learning (Eq. 5-10, 14)
    entropy: Literal["mean-feature", "mean-entropy", "marginal"] = "mean-feature"
    """Entropy of the mean feature's prediction (Eq. 7-9), mean of the members' entropies (released
    code), or entropy of their mean prediction (the paper's figure)."""
    concentration: NonNegative = 1.0
    """lambda, weight of the concentration loss; 1.0 is the ablation's optimum."""
    concentration_form: Literal["sum", "mean"] = "sum"
    """Squared distances to the mean feature summed over members (Eq. 10), or averaged."""
    optimiser: Literal["adam", "adamw"] = "adam"
    """AdamW (released code) decays by 0.01."""
    lr: Positive = 3e-3
    """Of Adam on the prompts; as printed."""
    steps: Count = 1
    """Not stated in the paper; one is what the released code and its relatives do."""

    # --- retention (Eq. 11-13)
    retention: bool = True
    """Keep visual prompts in a cache per class. The text running mean is always kept."""
    retention_order: Literal["update-first", "infer-first"] = "update-first"
    """Whether a batch is scored with what it has itself just taught."""
    key: Literal["start", "updated", "plain"] = "start"
    """Key of a clique: its mean feature before or after learning, or without any prompt."""
    capacity: Count = 6
    """L, prompts kept per class."""
    neighbours: Count = 3
    """K, edges kept per key of the retention graph."""
    bandwidth: Positive = 0.3
    """sigma of the graph's Gaussian kernel."""
    propagation: Decay = 0.3
    """alpha of the propagation; not stated in the paper, the released code's constant."""
    graph: Literal["zhou", "zhou-loops", "self"] = "zhou"
    """Propagation after Zhou et al. 2003: without self-loops, as there; with loops, where a key is
    the first of its own K neighbours; or the released rule, whose only neighbour of a key is
    itself: keys / (1 - alpha), nothing propagates."""
    restore_norms: bool = False
    """Rescale propagated keys to their former norms; the paper does not."""
    replace_keys: bool = True
    """Keys become the propagated ones ("update all pairs"); else these only choose the pair."""
    count_start: bool = False
    """Whether the start context counts as the first text prompt of the running mean."""

    # --- composition and inference (Eq. 15-19)
    query: Literal["start", "plain"] = "start"
    """Feature that is matched against the keys."""
    match: Literal["inner", "cosine"] = "inner"
    """How a query is compared with a key: by inner product (Eq. 16), or by cosine, which ignores
    that keys of scattered cliques are short."""
    clique_combination: Literal["concat", "mean"] = "concat"
    """How the prompts of an image's cliques are joined (Eq. 15)."""
    retained_combination: Literal["concat", "mean"] = "concat"
    """How the retained prompt joins them (Eq. 17)."""
    text_retained_share: Weight = 1.0
    """alpha_r, share of the running mean in the composed text prompt (Eq. 18)."""
    merge: Literal[
        "mean-probability", "top-1", "mean-logits", "own-class", "union", "max-confidence"
    ] = "mean-probability"
    """How the passes of an image's candidate sets become one prediction."""
    visual_inference: Literal["composed", "discarded"] = "composed"
    """Score with the composed visual prompts, or compute and discard them (released code)."""
    without_prompts: Literal["plain", "start-prompt"] = "plain"
    """An image with no clique and no retained prompt: plain CLIP, or the start prompt."""

    # --- views (not in the paper's method; all published figures use them)
    views: Count = 1
    """Views whose predictions are aggregated; 64 for figures comparable with the paper's."""
    view_kind: ViewKind = "zoom-crop"
    """How views are made; the released code takes zoom crops."""
    view_zoom: Zoom = 410 / 224
    """Shorter side, in input sizes, that zoom crops are taken from (410 of 224 for ImageNet-A)."""
    selection_fraction: Fraction = 0.1
    """Share of most confident views that are averaged (mean of logits)."""

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        if not self.blocks or list(self.blocks) != sorted(set(self.blocks)) or self.blocks[0] < 0:
            raise UserError(f"blocks must be different and ascending, got {self.blocks}")
        spaces = {self.key, self.query}
        if self.start == "fresh" and self.learns_visual and self.retention and spaces != {"plain"}:
            raise UserError(
                "start=fresh draws a prompt per clique, so that keys and queries under prompts "
                "cannot be compared: set key=plain and query=plain, or retention=false"
            )

    @property
    def spec(self) -> ViewSpec:
        """The views that are scored."""
        return ViewSpec(self.view_kind, self.views, self.view_zoom)

    @property
    def adam(self) -> Adam:
        """The optimiser of the prompts."""
        return Adam(self.lr, weight_decay=0.01 if self.optimiser == "adamw" else 0.0)

    def without_effect(self) -> list[str]:
        """Fields that were changed from their defaults and mean nothing beside the others."""
        idle: set[str] = set()
        if self.graph == "self":
            idle |= {"neighbours", "bandwidth", "restore_norms"}
        if self.views == 1:
            idle |= {"view_kind", "view_zoom", "selection_fraction"}
        elif self.view_kind != "zoom-crop":
            idle |= {"view_zoom"}
        if not self.learns_visual:
            idle |= {"blocks", "prompt_length", "prompt_scale", "start", "clique_combination"}
            idle |= {"visual_inference", "retention"}
        if not self.learns_visual or not self.retention:
            idle |= {"key", "query", "match", "capacity", "neighbours", "bandwidth", "graph"}
            idle |= {"propagation", "restore_norms", "replace_keys", "retained_combination"}
        if not self.learns_text:
            idle |= {"text_scope", "text_mix", "text_retained_share", "count_start"}
        if self.concentration == 0:
            idle |= {"concentration_form"}
        defaults = type(self)()
        return sorted(name for name in idle if getattr(self, name) != getattr(defaults, name))

    @property
    def learns_visual(self) -> bool:
        """Whether images are prompted."""
        return self.modalities in ("both", "image")

    @property
    def learns_text(self) -> bool:
        """Whether a text context is learned."""
        return self.modalities in ("both", "text")


PRESETS: Mapping[str, SCAPConfig] = {
    "paper": SCAPConfig(),
    # The only preset whose figures may be put beside the paper's table: 64 zoom crops, the
    # confident tenth of them averaged.
    "paper-views": SCAPConfig(views=64),
    # The same with the released code's other crops (RandomResizedCrop), which it makes unless a
    # script asks for zoom crops: the cross-domain table.
    "paper-crops": SCAPConfig(views=64, view_kind="resized-crop"),
    # What the released ImageNet-A script does with the parts above, for audit; docs/methods/scap.md
    # lists what it does otherwise. Prompts are learned and then not used for scoring.
    "released": SCAPConfig(
        topk=1,
        threshold=0.65,
        full_set=True,
        deduplicate="none",
        mining_features="start-prompt",
        text_scope="class",
        text_mix=0.6,
        entropy="mean-entropy",
        concentration=100 / 512,
        concentration_form="mean",
        optimiser="adamw",
        lr=5e-3,
        capacity=10,
        graph="self",
        replace_keys=False,
        merge="top-1",
        visual_inference="discarded",
        views=64,
    ),
}
