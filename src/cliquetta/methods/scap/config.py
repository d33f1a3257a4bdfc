"""Settings of SCAP by the paper's symbols; the defaults are the paper's, read literally."""

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
from cliquetta.methods.scap.released import RULES, Rules
from cliquetta.types import ViewSpec


@dataclass(frozen=True)
class SCAPConfig(MethodConfig):
    """Settings of SCAP. Where the paper is silent, the field says whose choice the default is."""

    topk: Count = 3  # k of Eq. 1, classes per image that put it into candidate sets.
    threshold: float = 0.8
    """t of Eq. 3, cosine above which two images are similar. Never stated in the paper;
    the released default. Its scripts use 0.65 (ImageNet-A), 0.90 (R, Sketch) and 0.80
    (V2)."""
    modalities: Literal["both", "image", "text"] = "both"
    """P^I and P^T, P^I alone or P^T alone: the component ablation."""
    blocks: tuple[int, ...] = (1,)
    """Visual blocks that P^I enters; one is the released choice, more are deep prompts."""
    prompt_length: Count = 1  # Tokens of P^I per block.
    text_mix: Weight = 0.5
    """rho, share of the fixed templates in a text feature when there are several templates."""
    concentration: NonNegative = 1.0
    """lambda of Eq. 14, weight of the concentration loss; 1.0 is the ablation's optimum."""
    lr: Positive = 3e-3  # Step size of Adam on the prompts; as printed.
    steps: Count = 1
    """Not stated in the paper; one is what the released code and its relatives do."""
    retention: bool = True
    """Keep visual prompts in R_i, a cache per class. The running mean of text always is."""
    capacity: Count = 6  # L, prompts stored per class.
    neighbours: Count = 3  # K, edges per key of the retention graph.
    bandwidth: Positive = 0.3  # sigma of Eq. 12, the graph's Gaussian kernel.
    propagation: Decay = 0.3  # alpha of the propagation; the released code's constant.
    clique_combination: Literal["concat", "mean"] = "concat"
    """How the prompts of an image's cliques are joined (Eq. 15)."""
    retained_combination: Literal["concat", "mean"] = "concat"
    """How the retained prompt joins them (Eq. 17)."""

    # --- not in the paper's method; all published figures use views
    views: Count = 1
    """Views that are aggregated; 64 for figures comparable with the paper's."""
    view_kind: ViewKind = "zoom-crop"
    """How views are made; the released code takes zoom crops."""
    view_zoom: Zoom = 410 / 224
    """Shorter side, in input sizes, that zoom crops are cut from (410 of 224 for ImageNet-A)."""
    selection_fraction: Fraction = 0.1
    """Share of most confident views, whose logits are averaged."""
    variant: Literal["paper", "released"] = "paper"
    """Whose rules hold where the two differ; see ``cliquetta.methods.scap.released.Rules``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_ascending = list(self.blocks) == sorted(set(self.blocks))
        if not self.blocks or not is_ascending or self.blocks[0] < 0:
            raise UserError(
                f"blocks must be different and ascending, got {self.blocks}"
            )

    @property
    def rules(self) -> Rules:
        """The decisions that ``variant`` stands for."""
        return RULES[self.variant]

    @property
    def spec(self) -> ViewSpec:
        """The views that are scored."""
        return ViewSpec(self.view_kind, self.views, self.view_zoom)

    @property
    def adam(self) -> Adam:
        """The optimiser of the prompts."""
        return Adam(self.lr, weight_decay=self.rules.weight_decay)

    def without_effect(self) -> list[str]:
        """List the fields that were changed and mean nothing beside the others."""
        idle: set[str] = set()
        if self.rules.isolated_keys:
            idle |= {"neighbours", "bandwidth"}
        if self.views == 1:
            idle |= {"view_kind", "view_zoom", "selection_fraction"}
        elif self.view_kind != "zoom-crop":
            idle |= {"view_zoom"}
        if not self.learns_visual:
            idle |= {"blocks", "prompt_length", "clique_combination", "retention"}
        if not self.learns_visual or not self.retention:
            idle |= {
                "capacity",
                "neighbours",
                "bandwidth",
                "propagation",
                "retained_combination",
            }
        if not self.learns_text:
            idle |= {"text_mix"}
        defaults = type(self)()
        return sorted(
            name for name in idle if getattr(self, name) != getattr(defaults, name)
        )

    @property
    def learns_visual(self) -> bool:
        """Whether images are prompted."""
        return self.modalities in ("both", "image")

    @property
    def scores_with_visual(self) -> bool:
        """Whether images are scored with the visual prompts that are learned."""
        return self.learns_visual and not self.rules.discarded_prompts

    @property
    def learns_text(self) -> bool:
        """Whether a text context is learned."""
        return self.modalities in ("both", "text")


PRESETS: Mapping[str, SCAPConfig] = {
    "paper": SCAPConfig(),
    # The only preset whose figures may be put beside the paper's table: 64 zoom crops,
    # the confident tenth of them averaged.
    "paper-views": SCAPConfig(views=64),
    # The same with the released code's other crops (RandomResizedCrop), which it makes
    # unless a script asks for zoom crops: the cross-domain table.
    "paper-crops": SCAPConfig(views=64, view_kind="resized-crop"),
    # What the released ImageNet-A script does with the parts above, for audit.
    "released": SCAPConfig(
        variant="released",
        topk=1,
        threshold=0.65,
        text_mix=0.6,
        concentration=100 / 512,
        lr=5e-3,
        capacity=10,
        views=64,
    ),
}
