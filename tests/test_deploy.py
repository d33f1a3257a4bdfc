"""The container's command and the Kubernetes example, on a machine without a container engine."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from typer.main import get_command

from cliquetta.cli.main import app
from tests._helpers.running import COMMAND
from tests._helpers.serve_setup import free_port, wait_until

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
TOKEN = "0123456789abcdef0123"
AUDIT = """
import os, sys
log = os.open(os.environ["WRITTEN"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def note(event, given):
    writes = event == "open" and given[2] & (os.O_WRONLY | os.O_RDWR)
    if writes and isinstance(given[0], str | bytes):
        os.write(log, os.fsencode(given[0]) + b"\\n")
    elif event in ("os.mkdir", "os.rename", "os.link"):
        os.write(log, os.fsencode(given[event != "os.mkdir"]) + b"\\n")
sys.addaudithook(note)
"""
"""Notes every file that the server writes: the root of the container is read-only."""


def instruction(pattern: str) -> str:
    """The arguments of the last instruction that matches."""
    return " ".join(re.findall(rf"^{pattern} (.*)$", DOCKERFILE, re.M)[-1].split())


@pytest.mark.slow
def test_command_and_health_check_work_as_written(tmp_path: Path) -> None:
    port = str(free_port())
    moved = {"8765": port, "/sessions": str(tmp_path / "sessions")}
    words = [moved.get(word, word) for word in json.loads(instruction("CMD"))]
    check = json.loads(instruction("HEALTHCHECK.* CMD"))
    check = [sys.executable, *(part.replace("8765", port) for part in check[1:])]
    (tmp_path / "sitecustomize.py").write_text(AUDIT)
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", ""), str(ROOT / "src")]
    environment = dict(pair.split("=", 1) for pair in shlex.split(instruction("ENV")))
    environment |= {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(paths)}
    environment |= {"WRITTEN": str(tmp_path / "written"), "CLIQUETTA_TOKEN": TOKEN}
    server = subprocess.Popen(
        [*COMMAND, *words],
        env={**environment, "OMP_NUM_THREADS": "1"},
        cwd="/",
        stderr=subprocess.PIPE,
        text=True,
    )
    try:

        def is_healthy() -> bool:
            assert server.poll() is None, server.stderr.read()
            return subprocess.run(check, capture_output=True).returncode == 0

        assert not is_healthy()  # nobody there yet
        wait_until(is_healthy, 120)
        address, headers = f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {TOKEN}"}
        assert httpx.get(f"{address}/v1/models").status_code == 401
        request = {"classes": ["cat", "dog"], "method": "zero_shot"}
        made = httpx.post(f"{address}/v1/sessions", json=request, headers=headers, timeout=60)
        assert made.status_code == 201
        session = tmp_path / "sessions" / made.json()["id"]
        assert session.exists()
        server.send_signal(getattr(signal, instruction("STOPSIGNAL")))
        assert server.wait(60) in (0, -signal.SIGTERM)
        lines = server.stderr.read().splitlines()
        assert any(json.loads(line).get("route") == "/v1/sessions" for line in lines if "{" in line)
    finally:
        server.kill()
        server.wait(30)
    written = set((tmp_path / "written").read_text().splitlines())
    assert str(session) in written
    allowed = (str(tmp_path / "sessions"), "/tmp/", "/dev/")
    assert not [path for path in written if not path.startswith(allowed)]


@pytest.fixture(scope="module")
def manifests() -> dict[str, dict[str, Any]]:
    """Every document of the example by kind and name."""
    documents = yaml.safe_load_all((ROOT / "deploy/kubernetes.yaml").read_text())
    return {f"{one['kind']}/{one['metadata']['name']}": one for one in documents}


def test_kubernetes_parts_fit_together_and_the_image(manifests: dict[str, dict[str, Any]]) -> None:
    """Names, ports, folders and options agree with each other, with the image and the command."""
    deployment = manifests["Deployment/cliquetta"]["spec"]
    service = manifests["Service/cliquetta"]["spec"]
    pod = deployment["template"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == service["selector"] == labels
    # a folder of sessions has one server at a time
    assert (deployment["replicas"], deployment["strategy"]["type"]) == (1, "Recreate")
    (container,) = pod["containers"]
    (port,) = container["ports"]
    assert str(port["containerPort"]) == instruction("EXPOSE")
    assert service["ports"][0]["targetPort"] == port["name"]
    for probe in ("startupProbe", "readinessProbe"):
        assert container[probe]["httpGet"] == {"path": "/healthz", "port": port["name"]}
    assert pod["terminationGracePeriodSeconds"] > 30  # the server's own time to finish
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    assert {*json.loads(instruction("VOLUME")), "/tmp"} <= set(mounts.values())
    for volume in pod["volumes"]:
        if "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]["claimName"]
            claimed = manifests[f"PersistentVolumeClaim/{claim}"]["spec"]
            assert claimed["resources"]["requests"]["storage"]
    arguments = dict(word.partition("=")[::2] for word in container["args"][1:])
    assert container["args"][0] == "serve" and arguments["--host"] == "0.0.0.0"
    serve = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    assert arguments.keys() <= {option for one in serve.params for option in one.opts}
    assert arguments["--port"] == str(port["containerPort"])
    assert arguments["--state-dir"].startswith(mounts["sessions"] + "/")
    assert arguments["--token-file"].startswith(mounts["tokens"] + "/")


def test_kubernetes_restricts_the_pod_to_the_user_of_the_image(manifests: dict[str, Any]) -> None:
    """As Kubernetes' restricted profile asks for, with a read-only root."""
    pod = manifests["Deployment/cliquetta"]["spec"]["template"]["spec"]
    user, group = map(int, instruction("USER").split(":"))
    wanted: dict[str, Any] = {"runAsUser": user, "runAsGroup": group, "fsGroup": group}
    wanted |= {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert user > 1000 and pod["automountServiceAccountToken"] is False
    assert pod["securityContext"].items() >= wanted.items()
    (container,) = pod["containers"]
    inner = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True}
    assert container["securityContext"] == inner | {"capabilities": {"drop": ["ALL"]}}
    assert "memory" in container["resources"]["limits"]
