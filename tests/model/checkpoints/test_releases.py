"""The table of releases: what they were trained with, and their names in the list of models."""

from cliquetta.model.checkpoints.releases import HUGGING_FACE, activation_of
from cliquetta.model.names import list_models


def test_activation() -> None:
    exact = {"ViT-B-16": "laion2b_s34b_b88k", "ViT-L-14": "dfn2b_s39b"}
    quick = {"ViT-B-16": "openai", "ViT-B-32": "laion400m_e32", "ViT-L-14": "dfn2b"}
    quick |= {"ViT-B-16-quickgelu": "laion400m_e32"}
    assert {activation_of(arch, tag, None) for arch, tag in exact.items()} == {"gelu"}
    assert {activation_of(arch, tag, None) for arch, tag in quick.items()} == {
        "quick_gelu"
    }
    assert (
        activation_of("ViT-H-14", None, {"model_cfg": {"quick_gelu": True}})
        == "quick_gelu"
    )


def test_the_list_of_models() -> None:
    entries = list_models()
    names = [entry.name for entry in entries]
    assert names[0] == "micro"
    assert entries[0].is_bundled
    assert {"openai:ViT-B/16", "openai:RN50", "hf:openai/clip-vit-base-patch16"} <= set(
        names
    )
    assert "open_clip:ViT-B-16/laion2b_s34b_b88k" in names
    assert len(set(names)) == len(names)
    actual = {entry.name: entry for entry in list_models("openai:*")}
    assert len(actual) == 9
    assert actual["openai:ViT-L/14@336px"].image_size == 336
    assert not actual["openai:RN50x4"].is_vit
    assert actual["openai:ViT-B/32"].is_vit


def test_sizes_of_siglip_2_are_those_of_the_hub() -> None:
    """The repositories that Google published, by the end of their names."""
    prefix = "google/siglip2-"
    sizes = {
        name.removeprefix(prefix): size
        for name, size in HUGGING_FACE.items()
        if name.startswith(prefix)
    }
    assert sizes == {
        "base-patch32-256": 256,
        "base-patch16-224": 224,
        "base-patch16-256": 256,
        "base-patch16-384": 384,
        "base-patch16-512": 512,
        "large-patch16-256": 256,
        "large-patch16-384": 384,
        "large-patch16-512": 512,
        "so400m-patch14-224": 224,
        "so400m-patch14-384": 384,
        "so400m-patch16-256": 256,
        "so400m-patch16-384": 384,
        "so400m-patch16-512": 512,
        "giant-opt-patch16-256": 256,
        "giant-opt-patch16-384": 384,
    }
