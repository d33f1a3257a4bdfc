"""``cliquetta fit``: train a few-shot method on labelled images."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cliquetta.cli.checks import check_datasets, check_methods, check_model
from cliquetta.cli.command import (
    Bounds,
    Common,
    Model,
    Preset,
    Root,
    Settings,
    read_settings,
)
from cliquetta.cli.console import count
from cliquetta.model.names import choose_model

if TYPE_CHECKING:
    from cliquetta.methods.building.few_shot import FitStep

# else image i of a shifted set would be fitted with the noise of test image i
NOISE_SEED = 1
EXAMPLES = """
cliquetta fit --method coop --dataset bundled-fewshot --shots 16 --out coop.safetensors
cliquetta fit --method tip_adapter --dataset folder:flowers --model ViT-B/16 --out tip.safetensors
cliquetta predict photos/ --classes names.txt --model ViT-B/16 --fitted coop.safetensors
"""


def fit(
    common: Common,
    method: Annotated[str, "Few-shot method (see `cliquetta methods`)."],
    dataset: Annotated[str, "Labelled dataset (see `cliquetta datasets`)."],
    out: Annotated[Path, "Output file of the learned tensors (.safetensors)."],
    shots: Annotated[int, Bounds(1), "Images per class."] = 16,
    validation: Annotated[
        str | None, "Dataset with the same classes, for methods that search settings."
    ] = None,
    preset: Preset = None,
    settings: Settings = None,
    model: Model = None,
    root: Root = None,
    seed: Annotated[int, "Seed of the choice of images and of training."] = 0,
) -> None:
    """Fit a few-shot method and save what it learned.

    Pass the file to `predict` and `evaluate` with --fitted. The class list may then
    differ from that of fitting, where the method allows it.
    """
    check_methods(method, preset=preset, settings=settings or ())
    datasets = [dataset] if validation is None else [dataset, validation]
    check_datasets(datasets, root)
    model = choose_model(model, datasets)
    check_model(model)

    from cliquetta.data.catalogue import get_dataset
    from cliquetta.methods.building.fit import fit_method
    from cliquetta.methods.building.registry import method_config
    from cliquetta.methods.building.support_set import FewShot

    config = method_config(method, preset, read_settings(settings or ()))
    images = get_dataset(dataset, root, noise_seed=NOISE_SEED)
    clip = common.model(model)
    held_out = None
    if validation is not None:
        held_out = get_dataset(validation, root, noise_seed=NOISE_SEED)
    few_shot = FewShot.from_dataset(
        images, shots, clip.preprocess, seed, validation=held_out
    )
    with common.terminal.bars() as bars:

        def show(step: "FitStep") -> None:
            bars.show("fit", step.step, step.steps, f"loss {step.loss:.3f}")

        adapter = fit_method(
            method, clip, images.prompts, few_shot, config, seed=seed, on_step=show
        )
    notes = {
        "dataset": images.id,
        "shots": shots,
        "validation": validation,
        "seed": seed,
    }
    adapter.save(out, notes=notes)
    numbers = sum(tensor.numel() for tensor in adapter.fitted.values())
    common.terminal.say(
        f"{method} learned {count(numbers, 'number')} from {count(len(few_shot), 'image')} of "
        f"{images.id}: {out}"
    )
    common.terminal.document(
        {
            "out": str(out),
            "method": method,
            "images": len(few_shot),
            "numbers": numbers,
            **notes,
        }
    )
