"""Models that are already in memory: those of open_clip, transformers, or any that encodes images.

A model whose towers are ours under other names becomes one of ours, with its weights where they
are. Any other is wrapped, and can do what its own functions can.
"""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from cliquetta.errors import UserError, first_line
from cliquetta.model.checkpoints import huggingface, open_clip, openai
from cliquetta.model.checkpoints.openai import Conventions
from cliquetta.model.checkpoints.releases import SIGLIP_PREPROCESS
from cliquetta.model.checkpoints.state import Checkpoint, CheckpointError, build
from cliquetta.model.clip import CLIP, MissingCapabilityError, l2_normalize, to_float32
from cliquetta.model.config import Activation
from cliquetta.model.preprocess import Preprocess
from cliquetta.model.tokenizer import CLIP_END, TextTokenizer, Tokenizer, is_clip_vocabulary

_IMAGE = {"encode_image": None, "get_image_features": "pixel_values"}
_TEXT = {"encode_text": None, "get_text_features": "input_ids"}
"""Functions that encode, and the name of what they take, if it is asked for by name."""
_SAMPLES = ("a photo of a cat.", "A sketch of an old truck")


def from_model(
    model: nn.Module, *, preprocess: Any = None, tokenizer: Any = None, id: str | None = None
) -> CLIP:
    """Adapt a model that you hold.

    A model of open_clip (or OpenAI's ``clip``), or a ``CLIPModel``, ``MetaClip2Model`` or
    ``SiglipModel`` of transformers, gets our towers with its own weights: shared where their layout
    is the same, copied where transformers keeps apart what is one matrix here. One image and one
    text are encoded by both to make sure that they agree. Any other module with ``encode_image`` or
    ``get_image_features`` is wrapped, and put into evaluation mode, with a warning if it was not:
    methods that need features or LayerNorms run, the others say what is missing. Device and
    precision stay those of the model.

    Args:
        model: The model.
        preprocess: How images are prepared: a :class:`Preprocess`, transforms of torchvision (as
            ``open_clip.create_model_and_transforms`` returns them), or an image processor of
            transformers; ``None`` takes what the model says of itself.
        tokenizer: ``open_clip.get_tokenizer(...)`` or a tokenizer of transformers; ``None`` is
            CLIP's own, where the vocabulary is CLIP's.
        id: A name for records and saved states; by default that of the model or of its class.

    Returns:
        A model for :func:`cliquetta.create_method`.

    Raises:
        UserError: The model encodes no images, or preprocessing or tokenizer do not fit it.

    """
    if isinstance(model, CLIP):
        return model
    if isinstance(model, str | os.PathLike):
        raise UserError(
            f"from_model takes a model that you hold; by its name or path it is loaded with "
            f"cliquetta.create_model({str(model)!r})"
        )
    if _method(model, _IMAGE) is None:
        raise UserError(
            f"{type(model).__name__} encodes no images: it has neither encode_image nor "
            "get_image_features"
        )
    name = id or getattr(model, "name_or_path", "") or type(model).__name__
    training = [module for module in model.modules() if module.training]
    model.eval()
    native = _native(model, name)
    if native is None and training:
        warnings.warn(f"{name} was in training mode: it is now in evaluation mode", stacklevel=2)
    for module in training:
        module.training = native is not None
    if native is None:
        own = _own_preprocess(model, name) if preprocess is None else preprocess_from(preprocess)
        return WrappedCLIP(model, name, own, tokenizer)
    if preprocess is not None:
        given = preprocess_from(preprocess)
        if given.size != native.image_size:
            raise UserError(
                f"the preprocessing makes images of {given.size} pixels, {name} takes "
                f"{native.image_size}"
            )
        native.preprocess = given
    if tokenizer is not None and native.text is not None:
        text = native.text.config
        rows = RowTokenizer(tokenizer, text.context_length, text.vocab_size)
        native.set_tokenizer(rows.simplest())
    return native


# --- our towers, their weights -------------------------------------------------------------------


def _native(model: nn.Module, name: str) -> CLIP | None:
    """Our towers with the model's weights, if they compute what it computes."""
    try:
        checkpoint = _of_transformers(model, name) or _of_open_clip(model, name)
        if checkpoint is None:
            return None
        weight = next(w for w in model.parameters() if w.ndim > 1)
        native = build(checkpoint, device=weight.device, dtype=weight.dtype, share=True)
    except CheckpointError:
        return None
    if not _agree(native, model):
        warnings.warn(
            f"{name} has the weights of a CLIP but computes other features: it is wrapped, and "
            "methods that learn prompts cannot run on it",
            stacklevel=4,
        )
        return None
    return native


def _of_transformers(model: nn.Module, name: str) -> Checkpoint | None:
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict") or not hasattr(model, "get_image_features"):
        return None
    shapes = huggingface.config_from(config.to_dict())  # with any vocabulary: text may come as ids
    size, is_siglip = shapes.vision.image_size, shapes.sigmoid
    preprocess = huggingface.preprocess_from(size, {}, is_siglip=is_siglip)
    return Checkpoint(shapes, huggingface.rename(model.state_dict()), name, preprocess)


def _of_open_clip(model: nn.Module, name: str) -> Checkpoint | None:
    weights = openai.clean(model.state_dict())
    open_clip.refuse_other_models(weights)
    is_siglip = openai.is_siglip_state(weights)
    try:
        conventions = _conventions_of(model, is_siglip=is_siglip)
    except (AttributeError, KeyError, IndexError, TypeError):  # built of other modules
        return None
    shapes = openai.config_from(weights, conventions)
    stated = getattr(model.visual, "preprocess_cfg", None)
    if stated is None:
        stated = SIGLIP_PREPROCESS if is_siglip else {}
    preprocess = open_clip.preprocess_from(shapes.vision.image_size, stated)
    return Checkpoint(shapes, openai.rename(weights), name, preprocess)


def _conventions_of(model: Any, *, is_siglip: bool) -> Conventions:
    text = getattr(model, "text", model)  # some keep a tower of its own
    text_block = text.transformer.resblocks[0]
    pooling = getattr(text, "pool_type", getattr(model, "text_pool_type", "argmax"))
    end = getattr(text, "eos_id", getattr(model, "text_eos_id", None))
    side = getattr(model.visual, "image_size", None)
    common = Conventions(
        _activation(text_block.mlp.gelu),
        text_heads=text_block.attn.num_heads,
        text_eps=text_block.ln_1.eps,
        text_activation=_activation(text_block.mlp.gelu),
        text_end=end if pooling == "eos" else None,
        image_size=side[0] if isinstance(side, Sequence) else side,
    )
    if is_siglip:
        block = model.visual.trunk.blocks[0]
        activation, eps = block.mlp.act, block.norm1.eps
    elif hasattr(model.visual, "transformer"):
        block = model.visual.transformer.resblocks[0]
        activation, eps = block.mlp.gelu, block.ln_1.eps
    else:  # a ResNet
        return common
    heads = block.attn.num_heads
    return replace(common, activation=_activation(activation), vision_heads=heads, vision_eps=eps)


def _activation(module: nn.Module) -> Activation:
    known: Mapping[str, Activation] = {"QuickGELU": "quick_gelu", "GELU": "gelu"}
    return "gelu_tanh" if "tanh" in repr(module).lower() else known[type(module).__name__]


@torch.no_grad()
def _agree(native: CLIP, model: nn.Module) -> bool:
    """Whether both encode one random image, and one random text, alike."""
    draw = torch.Generator().manual_seed(0)
    size, text = native.image_size, native.config.text
    pixels = torch.randn(1, 3, size, size, generator=draw).to(native.device, native.dtype)
    encode_image, encode_text = _method(model, _IMAGE), _method(model, _TEXT)
    assert encode_image is not None
    pairs = [(native.encode_image(pixels), encode_image(pixels))]
    if text is not None and encode_text is not None:
        highest = min(CLIP_END, text.vocab_size - 1)
        ids = torch.randint(8, highest, (1, text.context_length), generator=draw)
        if text.causal:
            ids[:, text.context_length // 2] = highest if text.end is None else text.end
        ids = ids.to(native.device)
        pairs.append((native.encode_text(ids), encode_text(ids)))
    allowed = 1e-4 if native.dtype in (torch.float32, torch.float64) else 3e-2
    return all(
        ours.shape == theirs.shape
        and float((ours - to_float32(theirs)).norm() / to_float32(theirs).norm()) < allowed
        for ours, theirs in pairs
    )


# --- any other model -----------------------------------------------------------------------------


class ImageEncoder(nn.Module):
    """The image side of a held model as a module: pixels in, features out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.layer_norms: tuple[str, ...] = ()  # names of the LayerNorms that an image passes

    def forward(self, pixels: Tensor) -> Tensor:
        """Features (B, E), not normalised unless the model does so."""
        encode = _method(self.model, _IMAGE)
        assert encode is not None
        weight = next(self.model.parameters(), pixels)
        return encode(pixels.to(weight.device, weight.dtype))

    def watch(self, pixels: Tensor) -> Tensor:
        """Features of an image, noting the LayerNorms on its way."""
        passed: dict[str, None] = {}
        with ExitStack() as hooks:
            for name, module in self.named_modules():
                if isinstance(module, nn.LayerNorm) and module.weight is not None:
                    hook = module.register_forward_hook(lambda *_, n=name: passed.setdefault(n))
                    hooks.enter_context(hook)
            features: Tensor = self(pixels)
        self.layer_norms = tuple(passed)
        return features


class WrappedCLIP(CLIP):
    """A held model behind the interface of ours, with the capabilities that it has."""

    is_wrapped = True
    visual: ImageEncoder

    @torch.no_grad()
    def __init__(self, model: nn.Module, id: str, preprocess: Preprocess, tokenizer: Any) -> None:
        nn.Module.__init__(self)
        self.id, self.preprocess, self.image_size = id, preprocess, preprocess.size
        self.visual, self.text, self._text = ImageEncoder(model), None, _method(model, _TEXT)
        size = preprocess.size
        try:
            features = self.visual.watch(torch.zeros(1, 3, size, size))
        except Exception as error:  # whatever a foreign module raises on a wrong size
            message = f"{id} does not encode an image of {size} x {size}: {first_line(error)}"
            raise UserError(message) from error
        if features.ndim != 2 or len(features) != 1:
            raise UserError(f"{id} gives {tuple(features.shape)} for one image, not (1, width)")
        self.embed_dim = features.shape[1]
        weights = model.named_parameters()
        embeddings = (w for name, w in weights if name.endswith("token_embedding.weight"))
        vocab_size = next(map(len, embeddings), None)
        length = int(getattr(model, "context_length", 0) or 77)
        self._tokenizer: TextTokenizer | None = None
        if tokenizer is not None:
            self._tokenizer = RowTokenizer(tokenizer, length, vocab_size)
        elif vocab_size is not None and is_clip_vocabulary(vocab_size):
            self._tokenizer = Tokenizer(length)
        scale, bias = (getattr(model, f"logit_{part}", None) for part in ("scale", "bias"))
        device = next(self.visual.parameters()).device
        log_scale = scale if isinstance(scale, Tensor) else torch.tensor(100.0).log()
        self.logit_scale = _scalar(log_scale, device)
        self.logit_bias = _scalar(bias, device) if isinstance(bias, Tensor) else None

    @property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer that was given, or CLIP's own."""
        if self._tokenizer is None or self._text is None:
            raise MissingCapabilityError(
                f"{self.id} does not encode text here: pass from_model(..., tokenizer=...), or "
                "give text features with ClassPrompts(features=...)"
            )
        return self._tokenizer

    @property
    def capabilities(self) -> frozenset[str]:
        """Text if it can be tokenised, LayerNorms if there are any; no prompts."""
        has_text = self._tokenizer is not None and self._text is not None
        available = {"text": has_text, "norm": bool(self.visual.layer_norms)}
        return frozenset(name for name, is_there in available.items() if is_there)

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
        """Text features (N, E) of strings or token ids; ``chunk`` rows at a time (256)."""
        if context is not None or deep:
            raise MissingCapabilityError(f"{self.id} is wrapped: it takes no learned context")
        ids = texts if isinstance(texts, Tensor) else self.tokenizer(texts)
        assert self._text is not None
        parts = [self._text(rows) for rows in torch.split(ids.to(self.device), chunk or 256)]
        features = torch.cat(parts)
        return l2_normalize(features) if normalize else to_float32(features)


def _scalar(value: Tensor, device: torch.device) -> nn.Parameter:
    plain = value.detach().to(device, torch.float32).reshape(())
    return nn.Parameter(plain, requires_grad=False)


def _own_preprocess(model: Any, name: str) -> Preprocess:
    cfg: Any = getattr(getattr(model, "visual", None), "preprocess_cfg", None)
    if cfg is None:
        raise UserError(
            f"{name} does not say how its images are prepared: pass "
            "from_model(..., preprocess=Preprocess(size, mean, std, ...))"
        )
    size = cfg.get("size", 224)
    return open_clip.preprocess_from(size if isinstance(size, int) else size[0], cfg)


def _method(model: nn.Module, names: Mapping[str, str | None]) -> Callable[[Tensor], Tensor] | None:
    """The first of the named methods that a model has, giving a tensor."""
    for name, argument in names.items():
        method = getattr(model, name, None)
        if callable(method):
            return lambda x, f=method, a=argument: _features(f(x) if a is None else f(**{a: x}))  # type: ignore[misc]
    return None


def _features(output: Any) -> Tensor:
    """The features in what a model returns: newer transformers wrap them."""
    for value in (output, getattr(output, "pooler_output", None)):
        if isinstance(value, Tensor):
            return value
    if isinstance(output, Sequence) and output and isinstance(output[0], Tensor):
        return output[0]
    raise UserError(f"features are expected as a tensor, the model gives {type(output).__name__}")


class FeaturesOnly(CLIP):
    """Stands for a model behind an embedding API: methods that need features only run on it.

    >>> from cliquetta import ClassPrompts, create_method
    >>> import torch
    >>> text = torch.eye(2, 512)
    >>> classes = ClassPrompts(("cat", "dog"), features=text)
    >>> method = create_method("tda", FeaturesOnly(512), classes)
    >>> method.predict_features(text).logits.argmax(dim=1)
    tensor([0, 1])

    Args:
        width: Entries of a feature.
        scale: What cosines are multiplied by to become logits; 100 for CLIP.
        id: A name for records and saved states.
        device: Where methods compute.

    """

    def __init__(
        self,
        width: int,
        *,
        scale: float = 100.0,
        id: str | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        nn.Module.__init__(self)
        self.id = id or f"features-{width}"
        self.embed_dim = width
        self.image_size = 1
        self.preprocess = Preprocess(1)  # of no image: there are none
        self.visual, self.text = nn.Identity(), None
        log_scale = torch.tensor(float(scale), device=device).log()
        self.logit_scale = nn.Parameter(log_scale, requires_grad=False)
        self.logit_bias = None

    @property
    def dtype(self) -> torch.dtype:
        """Features are float32."""
        return torch.float32

    @property
    def capabilities(self) -> frozenset[str]:
        """No capabilities: there are no towers."""
        return frozenset()

    def encode_image(self, pixels: Tensor, **options: Any) -> Tensor:
        """Raise: there is no image tower."""
        message = f"{self.id} stands for a model that is not here: it cannot encode images"
        raise MissingCapabilityError(message)


# --- tokenizers and preprocessing of other libraries ----------------------------------------------


class RowTokenizer(TextTokenizer):
    """A tokenizer of another library: a callable from texts to rows of ids."""

    def __init__(self, given: Any, context_length: int, vocab_size: int | None) -> None:
        self._given, self._words = given, vocab_size
        self.vocab_size = vocab_size or int(getattr(given, "vocab_size", 0))
        stated = getattr(given, "context_length", None)
        self.context_length = context_length if stated is None else min(stated, context_length)
        self._is_transformers = hasattr(given, "pad_token_id") and hasattr(given, "padding_side")
        empty, one = self([""])[0].tolist(), self(["a"])[0].tolist()
        self.pad = empty[-1]
        same = next((i for i, (x, y) in enumerate(zip(empty, one, strict=True)) if x != y), 0)
        self.prefix = tuple(empty[:same])
        rest = empty[same:]
        while rest and rest[-1] == self.pad:
            rest.pop()
        self.suffix = tuple(rest)

    def simplest(self) -> TextTokenizer:
        """CLIP's own tokenizer if it gives the same rows, else this one."""
        if self._words is not None and is_clip_vocabulary(self._words):
            ours = Tokenizer(self.context_length)
            if torch.equal(ours(_SAMPLES), self(_SAMPLES)):
                return ours
        return self

    def encode(self, text: str) -> list[int]:
        """The ids of ``text`` without special tokens or padding."""
        row = self([text])[0].tolist()[len(self.prefix) :]
        while row and row[-1] == self.pad:
            row.pop()
        end = len(row) - len(self.suffix)
        return row[:end] if tuple(row[end:]) == self.suffix else row

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Rows of ids (N, context_length), int64, as the given tokenizer makes them."""
        texts = [texts] if isinstance(texts, str) else list(texts)
        if self._is_transformers:
            padding = {"padding": "max_length", "padding_side": "right"}
            length = self.context_length
            rows = self._given(texts, **padding, max_length=length, return_tensors="pt").input_ids
        else:
            rows = self._given(texts)
        if not isinstance(rows, Tensor) or rows.ndim != 2 or len(rows) != len(texts):
            raise UserError("the tokenizer does not turn N texts into a tensor of N rows")
        if rows.shape[1] > self.context_length:
            raise UserError(
                f"a text takes {rows.shape[1]} tokens, the model's context holds "
                f"{self.context_length}: shorten the class name or template"
            )
        if self._words is not None and int(rows.max()) >= self._words:
            raise UserError(
                f"a tokenizer of another vocabulary: it gives token {int(rows.max())}, the text "
                f"tower has {self._words}"
            )
        return rows.long()


def preprocess_from(given: Any) -> Preprocess:
    """Our preprocessing of torchvision's transforms or of transformers' image processor."""
    if isinstance(given, Preprocess):
        return given
    processor = getattr(given, "image_processor", given)
    if hasattr(processor, "image_mean"):
        values = processor.to_dict()
        size, crop = values.get("size") or {}, values.get("crop_size") or {}
        sides = [d.get(k) for d in (crop, size) for k in ("height", "shortest_edge") if d.get(k)]
        if not sides or not isinstance(sides[0], int):
            message = f"{type(processor).__name__} states no size: pass preprocess=Preprocess(...)"
            raise UserError(message)
        return huggingface.preprocess_from(sides[0], values)
    if hasattr(given, "transforms"):
        ours = _from_transforms(given.transforms)
        shape = (ours.size + 37, 2 * ours.size, 3)
        image = Image.fromarray(np.random.default_rng(0).integers(0, 256, shape, np.uint8))
        if float((ours(image) - given(image)).abs().max()) < 1e-3:
            return ours
    raise UserError(
        f"{type(given).__name__} cannot be read as preprocessing: pass "
        "cliquetta.model.preprocess.Preprocess(size, mean, std, interpolation, resize)"
    )


def _from_transforms(transforms: Sequence[Any]) -> Preprocess:
    """Preprocessing of torchvision's Resize, CenterCrop and Normalize, in that order."""
    values: dict[str, Any] = {}
    size = 0
    for transform in transforms:
        kind = type(transform).__name__
        if kind == "Resize":
            wanted = transform.size
            values["resize_mode"] = "shortest" if isinstance(wanted, int) else "squash"
            size = wanted if isinstance(wanted, int) else wanted[0]
            values["interpolation"] = transform.interpolation.value
        elif kind == "CenterCrop":
            size = transform.size if isinstance(transform.size, int) else transform.size[0]
        elif kind == "Normalize":
            values |= {"mean": transform.mean, "std": transform.std}
    with suppress(UserError, ValueError):
        return open_clip.preprocess_from(size, values)
    raise UserError("these transforms have no Resize, CenterCrop and Normalize that can be read")
