"""Every method can be served: configs survive the wire, sessions survive a restart."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter

from cliquetta.errors import UserError
from cliquetta.methods.registry import method_config
from cliquetta.model.clip import CLIP
from cliquetta.serve.batches import summarise
from cliquetta.serve.factory import build_adapter, create_session, resolve_config
from cliquetta.serve.schema import SessionRequest
from cliquetta.serve.settings import Settings, served_methods
from tests._helpers.serve_setup import batch_of, local_service, probabilities

METHODS = served_methods()


@pytest.mark.parametrize("name", sorted(METHODS))
def test_configs_come_back_equal(name: str) -> None:
    entry = METHODS[name]
    for preset in (None, *entry.presets):
        plain = resolve_config(entry, preset, {})
        assert TypeAdapter(entry.config).validate_python(plain) == method_config(name, preset)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_sessions_of_every_method_go_on_after_a_restart(
    name: str, tmp_path: Path, tiny_clip: CLIP
) -> None:
    fields = {field.name for field in dataclasses.fields(METHODS[name].config)}
    options = {"views": 3} if "views" in fields else {}
    with local_service(tmp_path, tiny_clip) as service:
        halted, whole = (service.create(name, options=options) for _ in range(2))
        first = service.predict(halted, batch_of(0, 2), evidence=True)
        assert probabilities(first) == probabilities(service.predict(whole, batch_of(0, 2)))
        expected = probabilities(service.predict(whole, batch_of(1, 2)))
    with local_service(tmp_path, tiny_clip) as service:
        assert probabilities(service.predict(halted, batch_of(1, 2))) == expected


def test_a_session_with_unknown_settings_is_refused(tiny_clip: CLIP) -> None:
    settings = Settings({"tiny": tiny_clip})
    info, _ = create_session(SessionRequest(classes=["cat", "dog"], method="tpt"), settings, "00")
    other = info.model_copy(update={"config": {"momentum": 0.9}})
    with pytest.raises(UserError, match="does not know \\(momentum\\)"):
        build_adapter(other, settings)


def test_methods_that_need_labelled_images_are_not_served() -> None:
    assert "coop" not in METHODS and "scap" in METHODS
    assert list(served_methods(["tent"])) == ["tent"]
    with pytest.raises(KeyError, match="coop"):
        served_methods(["coop"])


def test_evidence_is_json_of_bounded_size() -> None:
    @dataclasses.dataclass
    class Inner:
        weights: torch.Tensor
        label: str

    found = summarise(
        {
            "small": torch.tensor([[1.0, float("nan")], [2.0, float("inf")]]),
            "large": torch.arange(1000),
            "inner": Inner(torch.tensor(3), "x"),
            "many": tuple(range(1000)),
            "object": object(),
            "deep": [[[[[1]]]]],
        }
    )
    assert found["small"] == [[1.0, None], [2.0, None]]
    assert found["large"] == {"shape": [1000], "mean": 499.5, "min": 0.0, "max": 999.0}
    assert found["inner"] == {"weights": 3, "label": "x"}
    assert found["many"]["length"] == 1000 and len(found["many"]["first"]) == 512
    assert found["object"] == "object"
    assert found["deep"] == [[["list"]]]
