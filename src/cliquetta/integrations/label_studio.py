"""Pre-labels in Label Studio: a backend that is a client of ``cliquetta serve``.

Run it beside the service and add its address under *Settings, Model* of a project::

    cliquetta serve --model ViT-B/16 --port 8765
    python -m cliquetta.integrations.label_studio --service http://127.0.0.1:8765 --port 9090

The classes are those of the project's ``<Choices>``. Every project has a session of the
service, which goes on adapting; a backend that is started again finds it there.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, HTTPException
from label_studio_sdk._extensions.label_studio_tools.core.utils.io import get_local_path
from label_studio_sdk.label_interface import LabelInterface
from starlette.concurrency import run_in_threadpool

from cliquetta.serve.client import Client, RemoteSession
from cliquetta.serve.schema import ImagePrediction
from cliquetta.version import installed_version

BATCH = 64  # images per request to the service


@dataclass(frozen=True)
class Control:
    """Question of a labelling configuration: one of ``labels`` for an image."""

    from_name: str
    to_name: str
    image: str  # Field of a task's data with the image.
    labels: tuple[str, ...]

    @classmethod
    def parse(cls, config: str) -> Control:
        """Parse a labelling configuration with ``<Image>`` and ``<Choices>``."""
        try:
            for control in LabelInterface(config).controls:
                for target in control.objects if control.tag == "Choices" else ():
                    if target.tag == "Image":
                        return cls(
                            from_name=control.name,
                            to_name=target.name,
                            image=target.value_name,
                            labels=tuple(control.labels),
                        )
        except Exception as error:  # the package raises what its XML parser does
            raise HTTPException(
                422, f"unusable labelling configuration: {error}"
            ) from error
        raise HTTPException(
            422, "the labelling configuration has no <Choices> for an <Image>"
        )

    def prediction(
        self, predicted: ImagePrediction | None, version: str
    ) -> dict[str, Any]:
        """Write a prediction in Label Studio's format; empty if unreadable."""
        if predicted is None:
            return {"result": [], "score": 0.0, "model_version": version}
        score = predicted.probability
        result = {
            "from_name": self.from_name,
            "to_name": self.to_name,
            "type": "choices",
            "value": {"choices": [predicted.label]},
            "score": score,
        }
        return {"result": [result], "score": score, "model_version": version}


class Backend:
    """Predicts tasks of Label Studio through sessions of the service.

    Args:
        client: The service.
        method: Method of new sessions.
        model: Model of new sessions; the first of the service if not given.
        fetch: Path of the image of a task, from its address; Label Studio's own rule,
            with ``LABEL_STUDIO_URL`` and ``LABEL_STUDIO_API_KEY``, if not given.

    """

    def __init__(
        self,
        client: Client,
        *,
        method: str = "domain_norm",
        model: str | None = None,
        fetch: Callable[[str], str] | None = None,
    ) -> None:
        self.client = client
        self.method = method
        self.model = model
        self.fetch = fetch or fetch_image
        self.version = f"cliquetta {installed_version()} {method}"

    def predict(
        self, tasks: Sequence[dict[str, Any]], control: Control
    ) -> list[dict[str, Any]]:
        """Predict every task, in order."""
        session = self.session(control.labels)
        results: list[dict[str, Any]] = []
        for start in range(0, len(tasks), BATCH):
            part = tasks[start : start + BATCH]

            # A session takes paths of files on this machine.
            addresses = [str(task["data"][control.image]) for task in part]
            paths = [self.fetch(address) for address in addresses]
            reply = session.predict(paths, top_k=1)

            # Images that could not be read are missing in the reply.
            by_index = {one.index: one for one in reply.predictions}
            for index in range(len(part)):
                result = control.prediction(by_index.get(index), self.version)
                results.append(result)
        return results

    def session(self, labels: Sequence[str]) -> RemoteSession:
        """Find the latest session of these classes in the service, or create one."""
        for info in reversed(self.client.sessions()):
            is_same_method = info.method == self.method
            is_same_model = self.model in (None, info.model)
            is_same_list = info.classes == list(labels)
            if is_same_list and is_same_method and is_same_model:
                return self.client.session(info.id)

        return self.client.create_session(labels, method=self.method, model=self.model)


def fetch_image(address: str) -> str:
    """Copy a task's image to this machine, by Label Studio's own rule."""
    host = os.environ.get("LABEL_STUDIO_URL")
    token = os.environ.get("LABEL_STUDIO_API_KEY")
    return str(get_local_path(address, hostname=host, access_token=token))


def create_app(backend: Backend) -> FastAPI:
    """Create the endpoints that Label Studio asks of a machine-learning backend."""
    app = FastAPI(title="CliqueTTA for Label Studio", openapi_url=None)

    @app.get("/")
    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "UP", "model_class": "cliquetta"}

    @app.post("/setup")
    def setup(request: dict[str, Any]) -> dict[str, str]:
        if request.get("schema"):
            Control.parse(request["schema"])
        return {"model_version": backend.version}

    @app.post("/predict")
    async def predict(request: dict[str, Any]) -> dict[str, Any]:
        control = Control.parse(str(request.get("label_config") or ""))
        results = await run_in_threadpool(
            backend.predict, request.get("tasks") or [], control
        )
        return {"results": results, "model_version": backend.version}

    @app.post("/webhook")
    def webhook(request: dict[str, Any]) -> dict[str, str]:
        del request  # labels of annotators are not learned from
        return {"status": "ignored"}

    return app


def main() -> None:
    """Run the backend."""
    import uvicorn

    parser = argparse.ArgumentParser(
        description="Label Studio backend over `cliquetta serve`."
    )
    parser.add_argument(
        "--service", default="http://127.0.0.1:8765", help="Its address."
    )
    parser.add_argument(
        "--method", default="domain_norm", help="Method of new sessions."
    )
    parser.add_argument("--model", help="Model of new sessions.")
    parser.add_argument("--host", default="127.0.0.1", help="Where to listen.")
    parser.add_argument("--port", type=int, default=9090, help="Where to listen.")
    args = parser.parse_args()
    client = Client(args.service, os.environ.get("CLIQUETTA_TOKEN"))
    backend = Backend(client, method=args.method, model=args.model)
    uvicorn.run(create_app(backend), host=args.host, port=args.port)


if __name__ == "__main__":
    main()
