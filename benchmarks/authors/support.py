"""Running authors' code here: parts of their files, our weights in OpenAI's layout, inputs."""

import importlib.machinery
import importlib.util
import math
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cliquetta import (
    CLIP,
    Adapter,
    Batch,
    ClassPrompts,
    create_method,
    create_model,
    get_dataset,
)
from cliquetta.data.views import attach_views
from cliquetta.methods.building.registry import method_config
from cliquetta.types import ViewSpec

TO_CPU = {
    ".cuda()": "",
    ".half()": ".float()",
    "with torch.cuda.amp.autocast():": "if True:",
}
"""Replacements in authors' code that would not run in float32 on a CPU."""
SHIFT = "gaussian_noise:3"
TERMS = 1024
"""More than the terms of any sum over features, patches or hidden units here."""


@dataclass(frozen=True)
class Row:
    """One comparison: what was run, how far the outputs differ, how often predictions agree."""

    case: str
    count: int
    """Images, or other things that were compared."""
    difference: float
    """Largest absolute difference."""
    scale: float
    """Largest absolute value of the authors' output."""
    agreement: float
    """Share of equal predictions, 0 to 1."""
    bound: float
    """Largest difference that rounding explains."""
    reason: str = ""
    """Why the two are not equal, where that is known."""

    @property
    def equal(self) -> bool:
        """Whether all predictions agree and the difference is within its bound."""
        return self.agreement == 1 and self.difference <= self.bound


def rounding(size: float) -> float:
    """How far sums of :data:`TERMS` float32 numbers of this size may be apart, in any order."""
    return TERMS * torch.finfo(torch.float32).eps * size


def compare(case: str, ours: Tensor, theirs: Tensor, *, reason: str = "") -> Row:
    """Compare logits or probabilities (B, N).

    A logit is a sum of products over the features' width. A probability moves by at
    most a quarter of what logits of a scale of 100 do.
    """
    ours, theirs = ours.detach().float(), theirs.detach().float()
    same = (ours.argmax(dim=1) == theirs.argmax(dim=1)).float().mean()
    gap = (ours - theirs).abs().max()
    size = float(theirs.abs().max())
    sums = theirs.sum(dim=1)
    shares = bool((theirs >= 0).all()) and torch.allclose(
        sums, torch.ones_like(sums), atol=1e-3
    )
    bound = rounding(100 / 4) if shares else rounding(size)
    return Row(case, len(ours), float(gap), size, float(same), bound, reason)


def compare_values(case: str, ours: Tensor, theirs: Tensor) -> Row:
    """Compare tensors that are not predictions: they agree if they are within their bound."""
    gap = float((ours - theirs).abs().max())
    size = float(theirs.abs().max())
    bound = rounding(size)
    return Row(case, ours.numel(), gap, size, float(gap <= bound), bound)


@dataclass(frozen=True)
class Repository:
    """A work tree of an authors' repository; nothing of it is copied into ours."""

    folder: Path

    @property
    def commit(self) -> str:
        """Short hash of what is checked out, or ``?`` outside of git."""
        command = ["git", "-C", str(self.folder), "rev-parse", "--short=8", "HEAD"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        return result.stdout.strip() or "?"

    def text(
        self,
        path: str,
        start: str = "",
        stop: str | None = None,
        *,
        patches: Mapping[str, str] | None = None,
    ) -> str:
        """The text of a file between two marks, patched to run in float32 on the CPU."""
        text = (self.folder / path).read_text(encoding="utf-8")
        begin = text.index(start)
        text = text[begin : None if stop is None else text.index(stop, begin)]
        for old, new in {**TO_CPU, **(patches or {})}.items():
            text = text.replace(old, new)
        return text

    def module(self, path: str, name: str) -> types.ModuleType:
        """Import one file under ``name``."""
        spec = importlib.util.spec_from_file_location(name, self.folder / path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module


def run_text(text: str, **names: Any) -> dict[str, Any]:
    """Execute authors' text; ``names`` are what it expects to find."""
    space: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "np": np, "math": math}
    space |= {"print": lambda *_: None, **names}
    exec(text, space)
    return space


def stand_in(name: str, **members: Any) -> types.ModuleType:
    """A module of this name for authors' imports, with these members."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(
        name, None
    )  # for those who look it up
    for member, value in members.items():
        setattr(module, member, value)
    sys.modules[name] = module
    return module


def package(repository: Repository, path: str, name: str) -> None:
    """Make a folder of a repository importable as ``name``, without its ``__init__``."""
    for known in [known for known in sys.modules if known.partition(".")[0] == name]:
        del sys.modules[known]
    stand_in(name, __path__=[str(repository.folder / path)])


class Recorder:
    """Keeps the logits that authors' loops hand to ``cls_acc`` and logs."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []
        self.names = {
            "tqdm": lambda x, **_: x,
            "wandb": types.SimpleNamespace(log=lambda *_, **__: None),
        }

    def cls_acc(self, logits: Tensor, _: Tensor) -> float:
        """Stand for their accuracy."""
        self.logits.append(logits.clone())
        return 0.0

    def take(self) -> Tensor:
        """All logits since the last call."""
        result, self.logits = torch.cat(self.logits), []
        return result


def micro(*, scale: float | None = None) -> CLIP:
    """The bundled model; ``scale`` replaces its logit scale (several authors hard-code 100)."""
    model = create_model("micro")
    if scale is not None:
        model.logit_scale.data.fill_(math.log(scale))
    return model


def openai_state(model: CLIP) -> dict[str, Tensor]:
    """The weights under OpenAI's key names."""
    state = model.state_dict()
    result = {
        "visual.class_embedding": state["visual.class_token"],
        "visual.positional_embedding": state["visual.position"],
        "visual.proj": state["visual.projection"],
        "visual.conv1.weight": state["visual.patch.weight"],
        "positional_embedding": state["text.position"],
        "text_projection": state["text.projection"],
        "token_embedding.weight": state["text.tokens.weight"],
        "logit_scale": state["logit_scale"],
    }
    norms = {"visual.ln_pre": "visual.ln_pre", "visual.ln_post": "visual.ln_post"}
    norms["ln_final"] = "text.ln_final"
    names = {"out": "attn.out_proj", "fc": "mlp.c_fc", "proj": "mlp.c_proj"}
    names |= {"ln_1": "ln_1", "ln_2": "ln_2"}
    for kind in ("weight", "bias"):
        for theirs, ours in norms.items():
            result[f"{theirs}.{kind}"] = state[f"{ours}.{kind}"]
        for tower, layers in (
            ("visual.", model.config.vision),
            ("", model.config.text),
        ):
            for at in range(layers.layers):  # type: ignore[arg-type]
                block = f"{tower or 'text.'}blocks.{at}"
                other = f"{tower}transformer.resblocks.{at}"
                result[f"{other}.attn.in_proj_{kind}"] = state[f"{block}.qkv.{kind}"]
                for short, long in names.items():
                    result[f"{other}.{long}.{kind}"] = state[f"{block}.{short}.{kind}"]
    return {name: value.clone() for name, value in result.items()}


def openai_clip(model: CLIP, repository: Repository, *extra: Any) -> Any:
    """The authors' own copy of OpenAI's CLIP class with the weights of ``model``."""
    module = run_text(repository.text("clip/model.py"), __name__="authors_clip")
    vision = model.config.vision
    text = model.config.text
    clip = module["CLIP"](
        *(model.config.embed_dim, vision.image_size, vision.layers, vision.width),
        *(vision.patch_size, text.context_length, text.vocab_size),
        *(text.width, text.heads, text.layers, *extra),
    )
    clip.load_state_dict(openai_state(model), strict=True)
    return clip.float().eval()


def tokenize(model: CLIP) -> Any:
    """``clip.tokenize`` with the bundled tokenizer."""
    return lambda t, *_, **__: model.tokenizer([t] if isinstance(t, str) else list(t))


class WordTokenizer:
    """The part of OpenAI's tokenizer class that authors use to count a name's tokens."""

    def __init__(self, model: CLIP) -> None:
        self.encode = model.tokenizer.encode


@dataclass(frozen=True)
class Inputs:
    """Batches of bundled images under a shift; labels are for the few-shot methods."""

    batches: Sequence[Batch]
    labels: Sequence[Tensor]
    names: tuple[str, ...]


def inputs(
    count: int, size: int, *, shift: str = SHIFT, views: ViewSpec | None = None
) -> Inputs:
    """``count`` batches of ``size`` images, the same at every call."""
    model = create_model("micro")
    dataset = get_dataset(f"bundled@{shift}" if shift else "bundled")
    rows = np.random.default_rng(0).permutation(len(dataset))[: count * size]
    arrays = dataset.arrays(rows.tolist())
    assert arrays is not None and dataset.labels is not None
    pixels = model.preprocess.pixels(np.ascontiguousarray(arrays))
    batches = []
    for part in np.split(np.arange(len(rows)), count):
        batch = Batch(pixels[part], keys=tuple(str(row) for row in rows[part]))
        if views is not None:
            batch = attach_views(batch, views, seed=0, preprocess=model.preprocess)
        batches.append(batch)
    labels = dataset.labels[torch.from_numpy(rows)].split(size)
    return Inputs(batches, labels, tuple(dataset.names))


@dataclass(frozen=True)
class Synthetic:
    """Made-up unit features: text (N, E), views of images (n, V, E), labels (n,)."""

    text: Tensor
    views: Tensor
    labels: Tensor

    @property
    def prompts(self) -> ClassPrompts:
        """Numbered classes with these text features."""
        return ClassPrompts(
            tuple(f"c{i}" for i in range(len(self.text))), features=self.text
        )


def synthetic(
    shape: tuple[int, int, int, int], *, noise: float = 0.6, view_noise: float = 0.5
) -> Synthetic:
    """Images around their class texts, views around their images; shape is (N, E, n, V)."""
    classes, width, images, views = shape
    generator = torch.Generator().manual_seed(sum(shape))

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    text = F.normalize(draw(classes, width) * 0.5 + draw(1, width), dim=-1)
    labels = torch.randint(classes, (images,), generator=generator)
    centre = text[labels] + noise * draw(images, width) * 2 / width**0.5
    result = centre[:, None] + view_noise * draw(images, views, width) * 2 / width**0.5
    result[:, 0] = centre
    return Synthetic(text, F.normalize(result, dim=-1), labels)


def feature_method(
    name: str, data: Synthetic, preset: str | None = None, **options: Any
) -> Any:
    """A method on synthetic features, under the logit scale of 100 that authors hard-code."""
    model = micro(scale=100.0)
    model.embed_dim = data.text.shape[1]
    config = method_config(name, preset, options)
    return create_method(name, model, data.prompts, config)


def predict(adapter: Adapter, data: Inputs) -> Tensor:
    """Logits of all batches."""
    return torch.cat([adapter.predict(batch).logits for batch in data.batches])
