"""Models of any kind behind CLIP's interface: wrapped modules, and features without a model."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cliquetta.errors import UserError, first_line
from cliquetta.model.clip import CLIP, MissingCapabilityError, l2_normalize, to_float32
from cliquetta.model.preprocess import Preprocess
from cliquetta.model.processors import RowTokenizer
from cliquetta.model.tokenizer import TextTokenizer, Tokenizer, is_clip_vocabulary

# Functions that encode, and the name of what they take, if it is asked for by name.
IMAGE_ENCODERS = {"encode_image": None, "get_image_features": "pixel_values"}
TEXT_ENCODERS = {"encode_text": None, "get_text_features": "input_ids"}


class ImageEncoder(nn.Module):
    """Image side of a wrapped model as a module: pixels in, features out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        # Names of the LayerNorms that an image passes.
        self.layer_norms: tuple[str, ...] = ()

    def forward(self, pixels: Tensor) -> Tensor:
        """Compute features (B, E), not normalised unless the model does so."""
        encode = find_encoder(self.model, IMAGE_ENCODERS)
        assert encode is not None
        weight = next(self.model.parameters(), pixels)
        return encode(pixels.to(weight.device, weight.dtype))

    def watch(self, pixels: Tensor) -> Tensor:
        """Compute features of an image and note the LayerNorms on its way."""
        passed: dict[str, None] = {}
        with ExitStack() as hooks:
            for name, module in self.named_modules():
                if not isinstance(module, nn.LayerNorm) or module.weight is None:
                    continue

                note = partial(_note, passed, name)
                hooks.enter_context(module.register_forward_hook(note))
            features: Tensor = self(pixels)
        self.layer_norms = tuple(passed)
        return features


def _note(names: dict[str, None], name: str, *_: Any) -> None:
    """Note, as a hook, that a module was passed."""
    names.setdefault(name)


class WrappedCLIP(CLIP):
    """Model of another library behind the interface of ours, with what it is capable of."""

    is_wrapped = True
    visual: ImageEncoder

    @torch.no_grad()
    def __init__(
        self, model: nn.Module, id: str, preprocess: Preprocess, tokenizer: Any
    ) -> None:
        nn.Module.__init__(self)
        self.id = id
        self.preprocess = preprocess
        self.image_size = size = preprocess.size
        self.visual = ImageEncoder(model)
        self.text = None
        self._text = find_encoder(model, TEXT_ENCODERS)

        # One image shows whether it encodes, and how wide features are.
        try:
            features = self.visual.watch(torch.zeros(1, 3, size, size))
        except Exception as error:  # whatever a foreign module raises on a wrong size
            raise UserError(
                f"{id} does not encode an image of {size} x {size}: {first_line(error)}"
            ) from error
        if features.ndim != 2 or len(features) != 1:
            raise UserError(
                f"{id} gives {tuple(features.shape)} for one image, not (1, width)"
            )

        self.embed_dim = features.shape[1]
        self._tokenizer = _find_tokenizer(model, tokenizer)

        device = next(self.visual.parameters()).device
        scale = getattr(model, "logit_scale", None)
        log_scale = scale if isinstance(scale, Tensor) else torch.tensor(100.0).log()
        self.logit_scale = _scalar(log_scale, device)
        bias = getattr(model, "logit_bias", None)
        self.logit_bias = _scalar(bias, device) if isinstance(bias, Tensor) else None

    @property
    def tokenizer(self) -> TextTokenizer:
        """Tokenizer that the user passed, or CLIP's own."""
        if self._tokenizer is None or self._text is None:
            raise MissingCapabilityError(
                f"{self.id} does not encode text here: pass from_model(..., tokenizer=...), or "
                "give text features with ClassPrompts(features=...)"
            )
        return self._tokenizer

    @property
    def capabilities(self) -> frozenset[str]:
        """Text if it can be tokenised, LayerNorms if there are any; no prompts."""
        names = set()
        if self._tokenizer is not None and self._text is not None:
            names.add("text")
        if self.visual.layer_norms:
            names.add("norm")
        return frozenset(names)

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
        """Encode strings or token ids as text features (N, E), ``chunk`` (256) rows at a time."""
        if context is not None or deep:
            raise MissingCapabilityError(
                f"{self.id} is wrapped: it takes no learned context"
            )

        ids = texts if isinstance(texts, Tensor) else self.tokenizer(texts)
        assert self._text is not None
        chunks = torch.split(ids.to(self.device), chunk or 256)
        features = torch.cat([self._text(rows) for rows in chunks])
        return l2_normalize(features) if normalize else to_float32(features)


def _find_tokenizer(model: nn.Module, tokenizer: Any) -> TextTokenizer | None:
    """Wrap a tokenizer; without one, use CLIP's where the vocabulary is CLIP's."""
    vocab_size = None
    for name, weight in model.named_parameters():
        if name.endswith("token_embedding.weight"):
            vocab_size = len(weight)
            break
    length = int(getattr(model, "context_length", 0) or 77)
    if tokenizer is not None:
        return RowTokenizer(tokenizer, length, vocab_size)
    if vocab_size is not None and is_clip_vocabulary(vocab_size):
        return Tokenizer(length)
    return None


def _scalar(value: Tensor, device: torch.device) -> nn.Parameter:
    """Make a frozen float32 scalar on a device."""
    plain = value.detach().to(device, torch.float32).reshape(())
    return nn.Parameter(plain, requires_grad=False)


def find_encoder(
    model: nn.Module, names: Mapping[str, str | None]
) -> Callable[[Tensor], Tensor] | None:
    """Return the first of some methods that a model has, giving a tensor."""
    for name, argument in names.items():
        method = getattr(model, name, None)
        if callable(method):
            return partial(_encode, method, argument)
    return None


def _encode(method: Callable[..., Any], argument: str | None, inputs: Tensor) -> Tensor:
    """Call a method that encodes, by the name of its argument if it has one."""
    output = method(inputs) if argument is None else method(**{argument: inputs})
    return _features(output)


def _features(output: Any) -> Tensor:
    """Find the features in what a model returns: newer transformers wrap them."""
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

        self.visual = nn.Identity()
        self.text = None

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
        raise MissingCapabilityError(
            f"{self.id} stands for a model that is not here: it cannot encode images"
        )
