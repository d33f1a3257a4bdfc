"""``cliquetta fit``: train a few-shot method on labelled images."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress, TaskID

from cliquetta.cli.command import Common
from cliquetta.cli.console import count
from cliquetta.cli.options import Model, Preset, Root, Settings, read_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from cliquetta.methods.building.few_shot import FitStep

NOISE_SEED = 1
"""Image i of a shifted set would otherwise be fitted with the very noise of test image i."""
EXAMPLES = """
cliquetta fit --method coop --dataset bundled-fewshot --shots 16 --out coop.safetensors

cliquetta fit --method tip_adapter --dataset folder:flowers --shots 4 --out tip.safetensors

cliquetta predict photos/ --classes names.txt --model ViT-B/16 --fitted coop.safetensors
"""


def fit(
    common: Common,
    method: Annotated[str, typer.Option(help="Few-shot method (see `cliquetta methods`).")],
    dataset: Annotated[str, typer.Option(help="Labelled dataset (see `cliquetta datasets`).")],
    out: Annotated[Path, typer.Option(help="Output file of the learned tensors (.safetensors).")],
    shots: Annotated[int, typer.Option(min=1, help="Images per class.")] = 16,
    validation: Annotated[
        str | None,
        typer.Option(help="Dataset with the same classes, for methods that search settings."),
    ] = None,
    preset: Preset = None,
    settings: Settings = None,
    model: Model = "micro",
    root: Root = None,
    seed: Annotated[int, typer.Option(help="Seed of the choice of images and of training.")] = 0,
) -> None:
    """Fit a few-shot method and save what it learned.

    Pass the file to `predict` and `evaluate` with --fitted. The class list may then differ from
    that of fitting, where the method allows it.
    """
    from cliquetta.data.catalogue import get_dataset
    from cliquetta.methods.building.support_set import FewShot
    from cliquetta.methods.fit import fit_method
    from cliquetta.methods.registry import method_config

    config = method_config(method, preset, read_settings(settings or ()))
    images = get_dataset(dataset, root, noise_seed=NOISE_SEED)
    clip = common.model(model)
    held = None if validation is None else get_dataset(validation, root, noise_seed=NOISE_SEED)
    few_shot = FewShot.from_dataset(images, shots, clip.preprocess, seed, validation=held)
    with common.terminal.progress() as progress:
        adapter = fit_method(
            method, clip, images.prompts, few_shot, config, seed=seed, on_step=_ticker(progress)
        )
    notes = {"dataset": images.id, "shots": shots, "validation": validation, "seed": seed}
    adapter.save(out, notes=notes)
    numbers = sum(tensor.numel() for tensor in adapter.fitted.values())
    common.terminal.say(
        f"{method} learned {count(numbers, 'number')} from {count(len(few_shot), 'image')} of "
        f"{images.id}: {out}"
    )
    common.terminal.document(
        {"out": str(out), "method": method, "images": len(few_shot), "numbers": numbers, **notes}
    )


def _ticker(progress: Progress) -> Callable[[FitStep], None]:
    """A progress bar that appears with the first step."""
    bars: list[TaskID] = []

    def tick(step: FitStep) -> None:
        if not bars:
            bars.append(progress.add_task("fit", total=step.steps, note=""))
        progress.update(
            bars[0], completed=step.step, total=step.steps, note=f"loss {step.loss:.3f}"
        )

    return tick
