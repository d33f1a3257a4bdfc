"""``cliquetta fit``."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from cliquetta.data.catalogue import get_dataset
from cliquetta.methods.building.fit import fit_method
from cliquetta.methods.building.registry import method_config
from cliquetta.methods.building.support_set import FewShot
from cliquetta.model.factory import create_model
from tests._helpers.running import Run


def test_shifted_shots_have_other_noise_than_test_images(
    run: Run, tiny_file: Path, tmp_path: Path
) -> None:
    id = "bundled-fewshot@gaussian_noise:3"
    out = tmp_path / "tip.safetensors"
    made = run(
        *("fit", "--method", "tip_adapter", "--dataset", id, "--shots", "1"),
        *("--model", tiny_file, "--out", out),
    )
    assert made.code == 0
    clip = create_model(str(tiny_file))
    keys = []
    config = method_config("tip_adapter")
    for noise_seed in (0, 1):
        images = get_dataset(id, noise_seed=noise_seed)
        few_shot = FewShot.from_dataset(images, 1, clip.preprocess, 0)
        fitted = fit_method(
            "tip_adapter", clip, images.prompts, few_shot, config
        ).fitted
        keys.append(fitted["keys"])
    learned = load_file(out)["fitted.keys"]
    torch.testing.assert_close(learned, keys[1])
    assert not torch.allclose(learned, keys[0], atol=1e-3)
