"""The Label Studio backend over a live service, checked by Label Studio's own SDK."""

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from cliquetta.model.clip import CLIP
from cliquetta.serve.client import Client
from tests._helpers.serve_setup import CLASSES, Alone, batch_of, live_service
from tests._helpers.tolerance import FEATURE

pytest.importorskip("label_studio_sdk")

CHOICES = "".join(f'<Choice value="{name}"/>' for name in CLASSES)
CONFIG = f"""
<View><Image name="photo" value="$picture"/>
<Choices name="kind" toName="photo" choice="single">{CHOICES}</Choices></View>
"""


def test_predictions_are_valid_and_those_of_the_method(
    tmp_path: Path, tiny_clip: CLIP
) -> None:
    from label_studio_sdk.label_interface import LabelInterface

    from cliquetta.integrations.label_studio import Backend, create_app

    images = batch_of(1)
    tasks = []
    for index, data in enumerate(images):
        path = tmp_path / f"{index}.png"
        path.write_bytes(data)
        tasks.append({"id": index, "data": {"picture": str(path)}})

    expected = Alone(tiny_clip, "zero_shot").predict(images)
    with live_service(tmp_path / "service", tiny_clip) as url, Client(url) as client:
        backend = Backend(client, method="zero_shot", fetch=str)
        http = TestClient(create_app(backend))
        assert http.get("/health").json()["status"] == "UP"
        assert http.post("/setup", json={"schema": CONFIG}).json()["model_version"]
        request = {"tasks": tasks, "label_config": CONFIG}
        results = http.post("/predict", json=request).json()["results"]
        # one that cannot be read has no prediction; a second request uses the same
        # session
        (tmp_path / "1.png").write_bytes(b"no image")
        again = http.post("/predict", json=request).json()["results"]
        assert len(client.sessions()) == 1

    assert [len(one["result"]) for one in again] == [1, 0, 1, 1]

    interface = LabelInterface(CONFIG)
    for actual, by_class in zip(results, expected, strict=True):
        assert interface.validate_prediction(actual)
        (choice,) = actual["result"][0]["value"]["choices"]
        assert choice == max(by_class, key=by_class.__getitem__)
        assert actual["score"] == pytest.approx(by_class[choice], abs=FEATURE)


def test_a_configuration_without_choices_is_refused(
    tmp_path: Path, tiny_clip: CLIP
) -> None:
    from cliquetta.integrations.label_studio import Backend, create_app

    config = (
        '<View><Text name="t" value="$text"/><TextArea name="a" toName="t"/></View>'
    )
    with live_service(tmp_path / "service", tiny_clip) as url, Client(url) as client:
        http = TestClient(create_app(Backend(client)))
        for wrong in (config, "", "<View>"):
            reply = http.post("/predict", json={"tasks": [], "label_config": wrong})
            assert reply.status_code == 422
            assert "labelling configuration" in reply.text
        assert client.sessions() == []
