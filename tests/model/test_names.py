"""Names of models: where each leads, in every spelling that is clear."""

from pathlib import Path

import pytest

from cliquetta.errors import UnknownNameError, UserError
from cliquetta.model.names import ModelName, choose_model, list_models, resolve_name

LAION = ("hf-hub", "laion/CLIP-ViT-g-14-laion2B-s12B-b42K")


@pytest.mark.parametrize(
    ("name", "family", "rest"),
    [
        ("micro", "micro", "micro"),
        ("ViT-B/16", "openai", "ViT-B/16"),
        ("openai:ViT-B/16", "openai", "ViT-B/16"),
        ("ViT-B-16", "openai", "ViT-B/16"),  # as open_clip spells it
        ("openai:ViT-L-14-336", "openai", "ViT-L/14@336px"),
        ("RN50", "openai", "RN50"),
        (
            "openai/clip-vit-base-patch16",
            "hf",
            "openai/clip-vit-base-patch16",
        ),  # transformers
        ("google/siglip-base-patch16-224", "hf", "google/siglip-base-patch16-224"),
        ("hf:me/mine@main", "hf", "me/mine@main"),
        ("ViT-B-16/laion2b_s34b_b88k", "open_clip", "ViT-B-16/laion2b_s34b_b88k"),
        ("ViT-B-16-SigLIP", "open_clip", "ViT-B-16-SigLIP/webli"),  # its only weights
        ("laion/CLIP-ViT-g-14-laion2B-s12B-b42K", *LAION),
    ],
)
def test_names_as_users_of_other_libraries_type_them(
    name: str, family: str, rest: str
) -> None:
    found = resolve_name(name)
    assert (found.family, found.name) == (family, rest)


def test_every_listed_name_leads_somewhere() -> None:
    for entry in list_models():
        assert resolve_name(entry.name).paths == ()


def test_a_local_folder_comes_before_another_spelling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ViT-B-16").mkdir()
    assert resolve_name("ViT-B-16") == ModelName(
        "files", "ViT-B-16", (Path("ViT-B-16"),)
    )


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "ViT-H-14",
            "such as open_clip:ViT-H-14/",
        ),  # several sets of weights: not clear
        ("me/mine", "is written hf:me/mine"),
        ("./none.pt", "no such file or folder"),
        ("ViT-B-17", "did you mean 'ViT-B/16'"),
    ],
)
def test_what_is_not_clear_names_the_remedy(name: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        resolve_name(name)


def test_only_bundled_images_have_a_default_model() -> None:
    for datasets in (
        ["bundled"],
        ["bundled@fog:3>bundled@contrast:4"],
        ["bundled-fewshot"],
    ):
        assert choose_model(None, datasets) == "micro"
    for datasets in (["folder:photos"], ["bundled", "pets"], ["bundled>folder:x"], []):
        with pytest.raises(UserError, match="no model: name one"):
            choose_model(None, datasets)
    assert choose_model("ViT-B/16", ["folder:photos"]) == "ViT-B/16"
    assert isinstance(UnknownNameError("model", "x", ["y"]), UserError)


def test_a_name_leads_where_its_prefix_says(tmp_path: Path) -> None:
    assert resolve_name(f"local-dir:{tmp_path}") == ModelName(
        "files", str(tmp_path), (tmp_path,)
    )
    assert resolve_name("hf:openai/clip-vit-base-patch16").family == "hf"


@pytest.mark.parametrize(
    "name", ["./gone", "../gone", "~/gone", "/gone", "gone.safetensors", "gone.pt"]
)
def test_a_path_that_is_not_there_is_called_a_path(name: str) -> None:
    with pytest.raises(UserError, match=f"no such file or folder: {name}"):
        resolve_name(name)
