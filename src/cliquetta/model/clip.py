"""One CLIP for everything: two towers, how to feed them, what they can do; frozen, or random."""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cliquetta.errors import UserError
from cliquetta.model.block import Block, Prefix
from cliquetta.model.config import CLIPConfig, VisionConfig
from cliquetta.model.preprocess import Preprocess
from cliquetta.model.text import TextTower
from cliquetta.model.tokenizer import TextTokenizer, Tokenizer, is_clip_vocabulary
from cliquetta.model.vision import ModifiedResNet, TokenPrompts, VisionTower
from cliquetta.prompts.classes import ClassPrompts

CAPABILITIES: Mapping[str, str] = {
    "text": "a text tower",
    "text-prompts": "a text tower that takes learned context",
    "visual-blocks": "a ViT image tower that runs block by block",
    "visual-prefix": "a ViT image tower that takes key/value prefixes",
    "visual-tokens": "a ViT image tower that takes prompt tokens",
    "attention": "attention weights of a ViT image tower",
    "norm": "LayerNorms in the image tower",
}


class MissingCapabilityError(UserError):
    """Need of a method that the loaded model does not meet."""


class CLIP(nn.Module):
    """Frozen, promptable CLIP. Gradients reach prompts, never weights.

    Features come back as float32 whatever the weights' dtype.
    """

    is_wrapped = False
    """Whether the towers are another library's (see :func:`cliquetta.from_model`)."""

    def __init__(
        self,
        config: CLIPConfig,
        *,
        id: str = "clip",
        preprocess: Preprocess | None = None,
        tokenizer: TextTokenizer | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.id = id
        self.image_size = config.vision.image_size
        self.embed_dim = config.embed_dim
        self.preprocess = preprocess or Preprocess.openai(self.image_size)
        if tokenizer is not None:
            self.tokenizer = tokenizer

        self.visual: nn.Module
        if isinstance(config.vision, VisionConfig):
            self.visual = VisionTower(config.vision, config.embed_dim)
        else:
            self.visual = ModifiedResNet(config.vision, config.embed_dim)
        self.text: TextTower | None = None
        if config.text is not None:
            self.text = TextTower(config.text, config.embed_dim)

        self.logit_scale = nn.Parameter(torch.full((), math.log(100.0)))
        self.logit_bias: nn.Parameter | None = None
        if config.sigmoid:
            self.logit_bias = nn.Parameter(torch.full((), -10.0))

        self.requires_grad_(False)
        self.eval()

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """Tokenizer with the vocabulary of this model: CLIP's own, unless one was set."""
        text = self.require_text().config
        if text.merges is None and not is_clip_vocabulary(text.vocab_size):
            raise UserError(
                f"{self.id} has a vocabulary of its own ({text.vocab_size} tokens) and came "
                "without its tokenizer: put tokenizer.json or spiece.model beside the weights, "
                "pass from_model(..., tokenizer=...), or give text features with "
                "ClassPrompts(features=...)"
            )
        return Tokenizer(text.context_length, merges=text.merges)

    def set_tokenizer(self, tokenizer: TextTokenizer) -> None:
        """Take another tokenizer of the same vocabulary, with the special tokens that it adds."""
        tower = self.require_text()
        tower.config = replace(tower.config, start_tokens=len(tokenizer.prefix))
        self.config = replace(self.config, text=tower.config)
        self.tokenizer = tokenizer

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.logit_scale.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return next(self.visual.parameters()).dtype

    @property
    def scale(self) -> float:
        """Factor that turns cosines into logits: 100 for the released CLIPs."""
        return float(self.logit_scale.exp())

    @property
    def bias(self) -> float:
        """Summand of scaled cosines: 0 except for sigmoid models (SigLIP)."""
        return 0.0 if self.logit_bias is None else float(self.logit_bias)

    @property
    def capabilities(self) -> frozenset[str]:
        """Abilities that methods may ask for (keys of ``CAPABILITIES``)."""
        names = {"text", "text-prompts"} if self.text is not None else set()
        if isinstance(self.visual, VisionTower):
            names |= {
                "visual-blocks",
                "visual-prefix",
                "visual-tokens",
                "attention",
                "norm",
            }
        return frozenset(names)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all weights, as loaded."""
        # Values are hashed in float32: numpy has no bfloat16.
        digest = hashlib.sha256()
        for name, tensor in sorted(self.state_dict().items()):
            digest.update(name.encode())
            values = tensor.detach().float().cpu().numpy()
            digest.update(values.tobytes())
        return digest.hexdigest()[:16]

    def require(self, needs: frozenset[str], *, by: str) -> None:
        """Raise if a needed capability is missing, naming it."""
        missing = sorted(needs - self.capabilities)
        if missing:
            wanted = " and ".join(CAPABILITIES[name] for name in missing)
            raise MissingCapabilityError(
                f"{by} needs {wanted}, which {self.id} does not have; choose a ViT model with "
                "both towers (`cliquetta models`) or a method that works on features"
            )

    def require_text(self) -> TextTower:
        """Return the text tower, or raise an error that says what to do without one."""
        if self.text is None:
            raise MissingCapabilityError(
                f"{self.id} has no text tower; give text features with ClassPrompts(features=...)"
            )
        return self.text

    def require_vit(self) -> VisionTower:
        """Return the image tower if it is a ViT."""
        if not isinstance(self.visual, VisionTower):
            raise MissingCapabilityError(
                f"{self.id} has no ViT image tower: plain encoding only"
            )
        return self.visual

    def encode_image(
        self,
        pixels: Tensor,
        *,
        prefix: Mapping[int, Prefix] | None = None,
        tokens: TokenPrompts | None = None,
        normalize: bool = False,
    ) -> Tensor:
        """Encode preprocessed pixels (B, 3, S, S) as image features (B, E)."""
        if prefix is None and tokens is None:
            features = self.visual(pixels)
        else:
            features = self.require_vit()(pixels, prefix=prefix, tokens=tokens)
        return self.unit_image(features) if normalize else to_float32(features)

    def unit_image(self, features: Tensor) -> Tensor:
        """Scale image features as they are compared with texts: to length one."""
        return l2_normalize(features)

    def encode_text(
        self,
        texts: Sequence[str] | Tensor,
        *,
        context: Tensor | None = None,
        positions: Tensor | None = None,
        deep: Sequence[Tensor] = (),
        normalize: bool = False,
        chunk: int | None = None,
    ) -> Tensor:
        """Encode strings or token ids as text features (N, E); see :meth:`TextTower.forward`."""
        ids = texts if isinstance(texts, Tensor) else self.tokenizer(texts)
        features = self.require_text()(
            ids.to(self.device),
            context=context,
            positions=positions,
            deep=deep,
            chunk=chunk,
        )
        return l2_normalize(features) if normalize else to_float32(features)

    def context(self, words: str) -> Tensor:
        """Embed the words before a class name (M, D), float32: a learner's start."""
        ids = torch.tensor(self.tokenizer.encode(words), dtype=torch.long)
        embeddings = self.require_text().tokens(ids.to(self.device))
        return to_float32(embeddings.detach())

    @torch.no_grad()
    def classifier(self, prompts: ClassPrompts) -> Tensor:
        """Build the unit text classifier (N, E): ``prompts.features``, or the mean of templates."""
        features = prompts.features
        if features is not None:
            if features.shape[1] != self.embed_dim:
                raise UserError(
                    f"text features are {features.shape[1]} wide, {self.id} wants "
                    f"{self.embed_dim}"
                )
            return l2_normalize(features.to(self.device))

        # One classifier for each template: (N, E).
        by_template = []
        for template in prompts.templates:
            texts = prompts.texts(template)
            by_template.append(self.encode_text(texts, normalize=True))
        return l2_normalize(torch.stack(by_template).mean(dim=0))


def l2_normalize(features: Tensor) -> Tensor:
    """Scale rows to length one, float32 (float64 stays)."""
    return F.normalize(to_float32(features), dim=-1)


def to_float32(features: Tensor) -> Tensor:
    """Convert half precision to float32; float64, which only tests use, stays."""
    return features if features.dtype == torch.float64 else features.float()


@torch.no_grad()
def encode_views(model: CLIP, views: Tensor, *, chunk: int) -> Tensor:
    """Encode views (B, V, 3, S, S) as unit features (B, V, E), ``chunk`` views at once."""
    B, V = views.shape[:2]
    parts = torch.split(views.flatten(0, 1), chunk)
    features = [model.encode_image(part, normalize=True) for part in parts]
    return torch.cat(features).view(B, V, -1)


# --- what can leave this package -----------------------------------------------------------------


# Unit features (B, E) and logits (B, N) to logits.
Head = Callable[[Tensor, Tensor], Tensor]


class FrozenModel(nn.Module):
    """Module from preprocessed pixels (B, 3, S, S) to logits (B, N); every image by itself.

    ``text`` (N, E) are unit class features; ``visual`` and ``scale`` replace those of
    the model, with which all other weights are shared.
    """

    text: Tensor

    def __init__(
        self,
        model: CLIP,
        text: Tensor,
        *,
        visual: nn.Module | None = None,
        scale: float | None = None,
        head: Head | None = None,
    ) -> None:
        super().__init__()
        self.visual = model.visual if visual is None else visual
        self.register_buffer("text", text.detach())

        self.scale = model.scale if scale is None else scale
        self.bias = model.bias
        self.head = head
        self.requires_grad_(False)
        self.eval()

    def text_logits(self, features: Tensor) -> Tensor:
        """Compute scaled cosines (B, N) of unit image features (B, E) with the class texts."""
        return F.linear(self.scale * features, self.text)

    def forward(self, pixels: Tensor) -> Tensor:
        """Compute logits (B, N), float32."""
        features = l2_normalize(self.visual(pixels))
        logits = self.text_logits(features)

        # A head, such as a cache model, may change the logits.
        if self.head is not None:
            logits = self.head(features, logits)
        return logits + self.bias


class PromptedTower(nn.Module):
    """ViT image tower with fixed prompt tokens built in."""

    def __init__(self, tower: nn.Module, tokens: TokenPrompts) -> None:
        super().__init__()
        self.tower = tower
        self.position = tokens.position
        self.layers = nn.ParameterList(
            nn.Parameter(layer.detach(), requires_grad=False) for layer in tokens.layers
        )

    def forward(self, pixels: Tensor) -> Tensor:
        """Compute features (B, E), not normalised."""
        tokens = TokenPrompts(tuple(self.layers), self.position)
        return cast(Tensor, self.tower(pixels, tokens=tokens))


@torch.no_grad()
def initialise(model: CLIP, seed: int = 0) -> CLIP:
    """Draw all weights of ``model`` in place, scaled by width and depth as CLIP's training does."""
    # On the CPU, so that every device gets the same weights.
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor: Tensor, std: float) -> None:
        draw = torch.empty(tensor.shape).normal_(0.0, std, generator=generator)
        tensor.copy_(draw.to(tensor.device, tensor.dtype))

    def draw_blocks(blocks: Iterable[nn.Module], width: int, layers: int) -> None:
        # So that the residual sum keeps its size.
        residual = width**-0.5 * (2 * layers) ** -0.5
        for block in blocks:
            assert isinstance(block, Block)
            linears = (
                (block.qkv, width**-0.5),
                (block.out, residual),
                (block.fc, (2 * width) ** -0.5),
                (block.proj, residual),
            )
            for linear, std in linears:
                normal(linear.weight, std)
                linear.bias.zero_()

    visual = model.visual
    if isinstance(visual, VisionTower):
        width = visual.config.width
        layers = visual.config.layers
        draw_blocks(visual.blocks, width, layers)
        if visual.head is None:
            normal(visual.projection, width**-0.5)
            normal(visual.class_token, width**-0.5)
        else:
            draw_blocks([visual.head], width, layers)
            normal(visual.head.probe, width**-0.5)

        normal(visual.position, 0.02)
        normal(visual.patch.weight, visual.patch.weight[0].numel() ** -0.5)
        if visual.patch.bias is not None:
            visual.patch.bias.zero_()
    else:
        for parameter in visual.parameters():
            if parameter.ndim > 1:
                normal(parameter, parameter[0].numel() ** -0.5)
        for module in visual.modules():
            if isinstance(module, nn.Linear):
                module.bias.zero_()

    text = model.text
    if text is not None:
        draw_blocks(text.blocks, text.config.width, text.config.layers)
        normal(text.projection, text.config.width**-0.5)
        normal(text.position, 0.01)
        normal(text.tokens.weight, 0.02)
    return model
