"""Models of any kind behind CLIP's interface: wrapped modules, and features without a model."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from cliquetta.errors import UserError, first_line
from cliquetta.model.clip import CLIP, MissingCapabilityError, l2_normalize, to_float32
from cliquetta.model.preprocess import Preprocess
from cliquetta.model.processors import RowTokenizer
from cliquetta.model.tokenizer import TextTokenizer, Tokenizer, is_clip_vocabulary

IMAGE_ENCODERS = {"encode_image": None, "get_image_features": "pixel_values"}
TEXT_ENCODERS = {"encode_text": None, "get_text_features": "input_ids"}
"""Functions that encode, and the name of what they take, if it is asked for by name."""


class ImageEncoder(nn.Module):
    """The image side of a held model as a module: pixels in, features out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.layer_norms: tuple[
            str, ...
        ] = ()  # names of the LayerNorms that an image passes

    def forward(self, pixels: Tensor) -> Tensor:
        """Features (B, E), not normalised unless the model does so."""
        encode = find_encoder(self.model, IMAGE_ENCODERS)
        assert encode is not None
        weight = next(self.model.parameters(), pixels)
        return encode(pixels.to(weight.device, weight.dtype))

    def watch(self, pixels: Tensor) -> Tensor:
        """Features of an image, noting the LayerNorms on its way."""
        passed: dict[str, None] = {}
        with ExitStack() as hooks:
            for name, module in self.named_modules():
                if isinstance(module, nn.LayerNorm) and module.weight is not None:
                    hook = module.register_forward_hook(
                        lambda *_, n=name: passed.setdefault(n)
                    )
                    hooks.enter_context(hook)
            features: Tensor = self(pixels)
        self.layer_norms = tuple(passed)
        return features


class WrappedCLIP(CLIP):
    """A held model behind the interface of ours, with the capabilities that it has."""

    is_wrapped = True
    visual: ImageEncoder

    @torch.no_grad()
    def __init__(
        self, model: nn.Module, id: str, preprocess: Preprocess, tokenizer: Any
    ) -> None:
        nn.Module.__init__(self)
        self.id, self.preprocess, self.image_size = id, preprocess, preprocess.size
        self.visual, self.text, self._text = (
            ImageEncoder(model),
            None,
            find_encoder(model, TEXT_ENCODERS),
        )
        size = preprocess.size
        try:
            features = self.visual.watch(torch.zeros(1, 3, size, size))
        except Exception as error:  # whatever a foreign module raises on a wrong size
            message = (
                f"{id} does not encode an image of {size} x {size}: {first_line(error)}"
            )
            raise UserError(message) from error
        if features.ndim != 2 or len(features) != 1:
            raise UserError(
                f"{id} gives {tuple(features.shape)} for one image, not (1, width)"
            )
        self.embed_dim = features.shape[1]
        weights = model.named_parameters()
        embeddings = (
            w for name, w in weights if name.endswith("token_embedding.weight")
        )
        vocab_size = next(map(len, embeddings), None)
        length = int(getattr(model, "context_length", 0) or 77)
        self._tokenizer: TextTokenizer | None = None
        if tokenizer is not None:
            self._tokenizer = RowTokenizer(tokenizer, length, vocab_size)
        elif vocab_size is not None and is_clip_vocabulary(vocab_size):
            self._tokenizer = Tokenizer(length)
        scale, bias = (
            getattr(model, f"logit_{part}", None) for part in ("scale", "bias")
        )
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
            raise MissingCapabilityError(
                f"{self.id} is wrapped: it takes no learned context"
            )
        ids = texts if isinstance(texts, Tensor) else self.tokenizer(texts)
        assert self._text is not None
        parts = [
            self._text(rows) for rows in torch.split(ids.to(self.device), chunk or 256)
        ]
        features = torch.cat(parts)
        return l2_normalize(features) if normalize else to_float32(features)


def _scalar(value: Tensor, device: torch.device) -> nn.Parameter:
    plain = value.detach().to(device, torch.float32).reshape(())
    return nn.Parameter(plain, requires_grad=False)


def find_encoder(
    model: nn.Module, names: Mapping[str, str | None]
) -> Callable[[Tensor], Tensor] | None:
    """The first of the named methods that a model has, giving a tensor."""
    for name, argument in names.items():
        method = getattr(model, name, None)
        if callable(method):
            return lambda x, f=method, a=argument: _features(
                f(x) if a is None else f(**{a: x})
            )  # type: ignore[misc]
    return None


def _features(output: Any) -> Tensor:
    """The features in what a model returns: newer transformers wrap them."""
    for value in (output, getattr(output, "pooler_output", None)):
        if isinstance(value, Tensor):
            return value
    if isinstance(output, Sequence) and output and isinstance(output[0], Tensor):
        return output[0]
    raise UserError(
        f"features are expected as a tensor, the model gives {type(output).__name__}"
    )


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
        message = (
            f"{self.id} stands for a model that is not here: it cannot encode images"
        )
        raise MissingCapabilityError(message)
