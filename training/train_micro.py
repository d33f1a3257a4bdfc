"""Train ``micro``, the small CLIP that the package carries, from CIFAR-10 and CIFAR-100.

    python training/cifar.py CIFAR-10-dataset CIFAR-100-dataset --out packs
    python training/train_micro.py packs --out build/micro --epochs 160

Captions are made from the finer nouns in the original file names of the images
(``tabby`` for a cat) and from the class names, in neutral templates; nothing in
training looks like a corruption, so that corruptions remain a shift. All images of a
caption's class count as its positives.
"""

import argparse
import copy
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from cifar import load_packs
from torch import Tensor

from cliquetta.model.checkpoints.local import save_model
from cliquetta.model.clip import CLIP, initialise
from cliquetta.model.config import CLIPConfig, TextConfig, VisionConfig
from cliquetta.model.factory import create_model
from cliquetta.prompts.classes import ClassPrompts

MERGES = 3582  # 512 byte tokens + merges + 2 specials = 4096
CONFIG = CLIPConfig(
    embed_dim=256,
    vision=VisionConfig(
        image_size=32, patch_size=4, width=256, layers=8, heads=4, hidden=1024
    ),
    text=TextConfig(
        context_length=32,
        vocab_size=512 + MERGES + 2,
        width=192,
        layers=4,
        heads=3,
        hidden=768,
        merges=MERGES,
    ),
)
TEMPLATES = (
    "a photo of a {}.",
    "a photo of the {}.",
    "a good photo of a {}.",
    "a bad photo of the {}.",
    "a photo of my {}.",
    "a photo of one {}.",
    "a close-up photo of a {}.",
    "a cropped photo of the {}.",
    "a low resolution photo of a {}.",
    "itap of a {}.",
    "a photo of a small {}.",
    "a photo of the large {}.",
    "a photo of a nice {}.",
    "a photo of the cool {}.",
    "{}.",
    "a {}.",
)


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights, written into the log."""

    epochs: int = 160
    minutes: float = 6.0
    """The schedule is shortened if the measured speed would overrun this."""
    batch: int = 1024
    lr: float = 1e-3
    weight_decay: float = 0.05
    warmup: float = 0.05
    average: float = 0.999
    """Decay of the weight average that is saved."""
    cutmix: float = 0.5
    """Share of batches whose images get a patch of another image."""
    cutout: int = 8
    seed: int = 0


def captions(noun: str, label: str) -> list[str]:
    """All captions of an image: its noun, its class, and both, in every template."""
    noun, label = noun.replace("_", " "), label.replace("_", " ")
    forms = (
        [noun, label] if noun == label else [noun, label, f"{noun}, a type of {label}"]
    )
    return [template.replace("{}", form) for form in forms for template in TEMPLATES]


def augment(images: Tensor, recipe: Recipe, generator: torch.Generator) -> Tensor:
    """Float images (B, 3, 32, 32) in [0, 1] from uint8: shift, flip, light, contrast, cut-out."""
    B, device = len(images), images.device

    def uniform(low: float, high: float) -> Tensor:
        draw = torch.rand(B, 1, 1, 1, device=device, generator=generator)
        return draw * (high - low) + low

    x = F.pad(images.float() / 255, (4, 4, 4, 4), mode="reflect")
    size = torch.arange(32, device=device)
    dy, dx = torch.randint(0, 9, (2, B, 1), device=device, generator=generator)
    columns = size + dx
    flip = torch.rand(B, 1, device=device, generator=generator) < 0.5
    columns = torch.where(flip, columns.flip(1), columns)
    rows = size + dy
    batch = torch.arange(B, device=device)[:, None, None]
    x = x.permute(0, 2, 3, 1)[batch, rows[:, :, None], columns[:, None, :]].permute(
        0, 3, 1, 2
    )
    x = x * uniform(0.7, 1.3)
    mean = x.mean(dim=(1, 2, 3), keepdim=True)
    x = (x - mean) * uniform(0.7, 1.3) + mean
    cy, cx = torch.randint(0, 32, (2, B, 1), device=device, generator=generator)
    half = recipe.cutout // 2
    hole = ((size - cy).abs() < half)[:, :, None] & ((size - cx).abs() < half)[
        :, None, :
    ]
    keep = torch.rand(B, 1, 1, device=device, generator=generator) < 0.5
    x = torch.where((hole & keep)[:, None], mean.expand_as(x), x)
    return x.clamp(0, 1)


def contrastive_loss(
    image: Tensor, text: Tensor, positives: Tensor, scale: Tensor
) -> Tensor:
    """Cross-entropy in both directions against all positives of a row, weights summing to one."""
    logits = scale * image @ text.T
    forward = (
        -(positives / positives.sum(1, keepdim=True) * logits.log_softmax(1))
        .sum(1)
        .mean()
    )
    backward = (
        -(
            positives
            / positives.sum(0, keepdim=True).clamp_min(1e-6)
            * logits.log_softmax(0)
        )
        .sum(0)
        .mean()
    )
    return (forward + backward) / 2


@torch.no_grad()
def accuracy(
    model: CLIP, pixels: Tensor, labels: Tensor, prompts: ClassPrompts
) -> float:
    """Zero-shot top-1 in percent."""
    classifier = model.classifier(prompts)
    hits = 0
    for part, answer in zip(pixels.split(1000), labels.split(1000), strict=True):
        found = (model.encode_image(part, normalize=True) @ classifier.T).argmax(1)
        hits += int((found == answer).sum())
    return 100 * hits / len(labels)


def main() -> None:
    """Train, average, quantise, evaluate, write weights and log."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packs", type=Path)
    parser.add_argument("--out", type=Path, default=Path("build/micro"))
    parser.add_argument("--epochs", type=int, default=Recipe.epochs)
    parser.add_argument("--minutes", type=float, default=Recipe.minutes)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    options = parser.parse_args()
    recipe = Recipe(epochs=options.epochs, minutes=options.minutes, seed=options.seed)
    device = torch.device(options.device)
    torch.manual_seed(recipe.seed)
    generator = torch.Generator(device).manual_seed(recipe.seed)
    torch.set_float32_matmul_precision("high")

    data = load_packs(options.packs)
    images = torch.from_numpy(data.images).permute(0, 3, 1, 2).contiguous().to(device)
    model = initialise(CLIP(CONFIG, id="micro"), recipe.seed).to(device)
    mean = torch.tensor(model.preprocess.mean, device=device).view(1, 3, 1, 1)
    std = torch.tensor(model.preprocess.std, device=device).view(1, 3, 1, 1)

    rows, image_pair = np.unique(
        np.stack([data.noun, data.label], axis=1), axis=0, return_inverse=True
    )
    pairs = [(data.nouns[noun], data.classes[label]) for noun, label in rows]
    image_pair = torch.from_numpy(image_pair.reshape(-1)).to(device)
    image_class = torch.from_numpy(data.label).to(device)
    most = 3 * len(TEMPLATES)
    texts = [(captions(*pair) * 3)[:most] for pair in pairs]
    table = model.tokenizer([text for group in texts for text in group])
    length = int((table.argmax(1)).max()) + 1
    table = table.view(len(pairs), most, -1)[:, :, :length].to(device)

    model.requires_grad_(True).train()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    other = [p for p in model.parameters() if p.ndim <= 1]
    groups = [
        {"params": decayed, "weight_decay": recipe.weight_decay},
        {"params": other, "weight_decay": 0.0},
    ]
    optimiser = torch.optim.AdamW(
        groups, lr=recipe.lr, betas=(0.9, 0.98), fused=device.type == "cuda"
    )
    average = copy.deepcopy(model).requires_grad_(False)
    visual = torch.compile(model.visual) if device.type == "cuda" else model.visual
    encode = (
        torch.compile(model.text.encode) if device.type == "cuda" else model.text.encode
    )
    per_epoch = len(images) // recipe.batch
    steps = recipe.epochs * per_epoch
    log: list[dict[str, float]] = []
    started = time.time()
    step, total, mark = 0, 0.0, 0.0
    while step < steps:
        order = torch.randperm(len(images), device=device, generator=generator)
        for rows in order[: per_epoch * recipe.batch].split(recipe.batch):
            if step >= steps:
                break
            progress = step / steps
            factor = min(
                progress / recipe.warmup, 0.5 * (1 + math.cos(math.pi * progress))
            )
            for group in optimiser.param_groups:
                group["lr"] = recipe.lr * factor
            x = augment(images[rows], recipe, generator)
            own = image_class[rows]
            same = (own[:, None] == own[None, :]).float()
            if torch.rand((), generator=None).item() < recipe.cutmix:
                mate = torch.randperm(len(rows), device=device, generator=generator)
                side = int(32 * math.sqrt(np.random.beta(1.0, 1.0)))
                top, left = (
                    np.random.randint(0, 33 - side, size=2) if side < 32 else (0, 0)
                )
                x[:, :, top : top + side, left : left + side] = x[mate][
                    :, :, top : top + side, left : left + side
                ]
                share = 1 - side * side / 1024
                same = share * same + (1 - share) * same[mate]
            choice = torch.randint(
                0, most, (len(rows),), device=device, generator=generator
            )
            ids = table[image_pair[rows], choice]
            with torch.autocast(device.type, torch.bfloat16):
                image = F.normalize(visual((x - mean) / std).float(), dim=-1)
                text = encode(model.text.tokens(ids), ids.argmax(-1))
                text = F.normalize(text.float(), dim=-1)
            loss = contrastive_loss(image, text, same, model.logit_scale.exp())
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            with torch.no_grad():
                model.logit_scale.clamp_(0, math.log(100))
                decay = min(recipe.average, (1 + step) / (10 + step))
                torch._foreach_lerp_(
                    list(average.parameters()),
                    [p.detach() for p in model.parameters()],
                    1 - decay,
                )
            total += float(loss.detach()) if step % 50 == 0 else 0.0
            step += 1
            if step == 100:
                mark = time.time()
            if step == 400 and mark:
                pace = (time.time() - mark) / 300
                fits = (
                    int((recipe.minutes * 60 - (time.time() - started)) / pace) + step
                )
                if fits < steps:
                    print(
                        f"{pace * 1000:.1f} ms a step: {steps} steps shortened to {fits}"
                    )
                    steps = fits
            if step % 1000 == 0:
                entry = {
                    "step": step,
                    "loss": float(loss.detach()),
                    "scale": float(model.logit_scale.exp()),
                    "seconds": time.time() - started,
                }
                log.append(entry)
                print(json.dumps(entry), flush=True)

    average.eval()
    options.out.mkdir(parents=True, exist_ok=True)
    save_model(average.cpu(), options.out / "micro-float.safetensors", quantise=False)
    save_model(average, options.out / "micro.safetensors", quantise=True)
    result: dict[str, object] = {
        "recipe": asdict(recipe),
        "steps": steps,
        "seconds": time.time() - started,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "images": len(images),
        "captions": len(pairs) * most,
        "parameters": sum(p.numel() for p in average.parameters()),
        "log": log,
    }
    for name, path in (
        ("float", "micro-float.safetensors"),
        ("int8", "micro.safetensors"),
    ):
        candidate = create_model(options.out / path).to(device)
        for split, pixels, labels, names in (
            ("cifar10", data.test10_images, data.test10_label, data.classes[:10]),
            (
                "cifar100",
                data.test100_images,
                data.test100_label - 10,
                data.classes[10:],
            ),
        ):
            x = torch.from_numpy(pixels).permute(0, 3, 1, 2).to(device).float() / 255
            answer = torch.from_numpy(np.asarray(labels)).to(device)
            prompts = ClassPrompts(tuple(names))
            result[f"{split} {name}"] = accuracy(
                candidate, (x - mean) / std, answer, prompts
            )
            if split == "cifar10":
                for sigma in (0.05, 0.10):
                    noise = torch.randn(
                        x.shape, generator=torch.Generator().manual_seed(0)
                    )
                    noisy = (x + sigma * noise.to(device)).clamp(0, 1)
                    result[f"{split} {name} noise {sigma}"] = accuracy(
                        candidate, (noisy - mean) / std, answer, prompts
                    )
                grey = x.mean(1, keepdim=True).expand_as(x)
                result[f"{split} {name} grey"] = accuracy(
                    candidate, (grey - mean) / std, answer, prompts
                )
    (options.out / "log.json").write_text(json.dumps(result, indent=1))
    print(json.dumps({k: v for k, v in result.items() if k != "log"}, indent=1))


if __name__ == "__main__":
    main()
