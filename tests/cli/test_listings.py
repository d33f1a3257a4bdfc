"""The commands that list models, datasets and methods."""

import json
import re
from dataclasses import dataclass

from cliquetta.methods.building.config import config_fields
from cliquetta.methods.building.registry import method_entries
from tests._helpers.running import Run


def test_models_are_listed_and_filtered(run: Run) -> None:
    entries = json.loads(run("models", "--json").stdout)
    names = [entry["name"] for entry in entries]
    assert names[0] == "micro" and entries[0]["is_bundled"]
    assert "openai:ViT-B/16" in names
    fewer = json.loads(run("models", "openai:RN*", "--json").stdout)
    assert fewer and all(not entry["is_vit"] for entry in fewer)
    assert "micro" in run("models").text


def test_datasets_come_with_their_shifts(run: Run) -> None:
    document = json.loads(run("datasets", "--json").stdout)
    bundled = {entry["id"]: entry for entry in document["datasets"]}["bundled"]
    assert bundled["expected"] == {"images": 2000} and not bundled["needs_root"]
    assert len(document["shifts"]) >= 17
    text = run("datasets").text
    assert "gaussian_noise" in text and "bundled" in text


def test_every_method_is_listed_and_has_a_page_of_its_own(run: Run) -> None:
    names = [entry.name for entry in method_entries()]
    assert [
        entry["name"] for entry in json.loads(run("methods", "--json").stdout)
    ] == names
    text = run("methods").text
    for name in names:
        document = json.loads(run("methods", name, "--json").stdout)
        assert name in text and document["name"] == name
        assert (
            document["summary"] and document["paper"] and run("methods", name).code == 0
        )


def test_method_shows_its_options(run: Run) -> None:
    (option,) = json.loads(run("methods", "zero_shot", "--json").stdout)["options"]
    values = (option["name"], option["type"], option["default"])
    assert values == ("temperature", "float, above 0", 1.0)
    assert "never the prediction" in option["doc"]
    text = run("methods", "zero_shot").text
    assert "temperature" in text and "1.0" in text and "Radford" in text


@dataclass(frozen=True)
class Config:
    steps: int = 1
    """How many
    steps."""
    rate: float = 0.5  # of each step
    plain: bool = False


def test_field_documents_are_read_from_source() -> None:
    fields = [(field.name, field.default, field.doc) for field in config_fields(Config)]
    assert fields == [
        ("steps", 1, "How many steps."),
        ("rate", 0.5, "of each step"),
        ("plain", 0, ""),
    ]


def test_datasets_are_listed_with_their_classes(run: Run) -> None:
    listed = run("datasets").stdout
    assert "dataset" in listed and "classes" in listed
    assert re.search(r"bundled\s", listed)
    assert re.search(r"imagenet-a\s+200\s", listed)
