"""The container's command and the Kubernetes example, on a machine without a container engine."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from typer.main import get_command

from cliquetta.cli.main import app
from cliquetta.model.clip import CLIP
from cliquetta.serve.client import Client
from tests._helpers.running import COMMAND
from tests._helpers.serve_setup import (
    CLASSES,
    Alone,
    batch_of,
    free_port,
    is_up,
    live_service,
    probabilities,
    wait_until,
)

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
        address = f"http://127.0.0.1:{port}"
        headers = {"Authorization": f"Bearer {TOKEN}"}
        assert httpx.get(f"{address}/v1/models").status_code == 401
        request = {"classes": ["cat", "dog"], "method": "zero_shot"}
        made = httpx.post(
            f"{address}/v1/sessions", json=request, headers=headers, timeout=60
        )
        assert made.status_code == 201
        stopping = time.monotonic()
        server.send_signal(getattr(signal, instruction("STOPSIGNAL")))
        assert server.wait(60) == 0
        assert time.monotonic() - stopping < 10
        lines = server.stderr.read().splitlines()
        assert any(
            json.loads(line).get("route") == "/v1/sessions"
            for line in lines
            if "{" in line
        )
    finally:
        server.kill()
        server.wait(30)
    written = set((tmp_path / "written").read_text().splitlines())
    allowed = (str(tmp_path / "sessions"), "/tmp/", "/dev/")
    assert not [path for path in written if not path.startswith(allowed)]


SINGLE = "kubernetes.yaml"
REPLICAS = "kubernetes-replicas.yaml"


def read_manifests(file: str) -> dict[str, dict[str, Any]]:
    """Every document of an example by kind and name."""
    documents = yaml.safe_load_all((ROOT / "deploy" / file).read_text())
    return {f"{one['kind']}/{one['metadata']['name']}": one for one in documents}


@pytest.mark.parametrize("file", [SINGLE, REPLICAS])
def test_kubernetes_parts_fit_together_and_the_image(file: str) -> None:
    """Names, ports, folders and options agree with each other, with the image and the command."""
    manifests = read_manifests(file)
    deployment = manifests["Deployment/cliquetta"]["spec"]
    service = manifests["Service/cliquetta"]["spec"]
    pod = deployment["template"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == service["selector"] == labels
    (container,) = pod["containers"]
    (port,) = container["ports"]
    assert str(port["containerPort"]) == instruction("EXPOSE")
    assert service["ports"][0]["targetPort"] == port["name"]
    for probe in ("startupProbe", "readinessProbe"):
        assert container[probe]["httpGet"] == {"path": "/healthz", "port": port["name"]}
    assert pod["terminationGracePeriodSeconds"] > 10  # the server's own time to finish
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    assert {"/weights", "/tmp"} <= set(mounts.values())
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
    assert arguments["--token-file"].startswith(mounts["tokens"] + "/")


def test_kubernetes_keeps_sessions_where_the_pods_find_them() -> None:
    """One pod a volume of its own, several the database whose URL is a secret."""
    single = read_manifests(SINGLE)["Deployment/cliquetta"]["spec"]
    assert (single["replicas"], single["strategy"]["type"]) == (1, "Recreate")
    (container,) = single["template"]["spec"]["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert f"--sessions={mounts['sessions']}/state" in container["args"]
    assert mounts["sessions"] in json.loads(instruction("VOLUME"))

    replicas = read_manifests(REPLICAS)
    deployment = replicas["Deployment/cliquetta"]["spec"]
    (container,) = deployment["template"]["spec"]["containers"]
    (variable,) = container["env"]
    assert deployment["replicas"] > 1
    assert not [word for word in container["args"] if word.startswith("--sessions")]
    serve = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    assert variable["name"] in {option.envvar for option in serve.params}
    assert "secretKeyRef" in variable["valueFrom"]
    rule = replicas["Ingress/cliquetta"]["spec"]["rules"][0]["http"]["paths"][0]
    assert rule["backend"]["service"]["name"] in {"cliquetta"}


@pytest.mark.parametrize("file", [SINGLE, REPLICAS])
def test_kubernetes_restricts_the_pod_to_the_user_of_the_image(file: str) -> None:
    """As Kubernetes' restricted profile asks for, with a read-only root."""
    pod = read_manifests(file)["Deployment/cliquetta"]["spec"]["template"]["spec"]
    user, group = map(int, instruction("USER").split(":"))
    wanted: dict[str, Any] = {"runAsUser": user, "runAsGroup": group, "fsGroup": group}
    wanted |= {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert user > 1000 and pod["automountServiceAccountToken"] is False
    assert pod["securityContext"].items() >= wanted.items()
    (container,) = pod["containers"]
    inner = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True}
    assert container["securityContext"] == inner | {"capabilities": {"drop": ["ALL"]}}
    assert "memory" in container["resources"]["limits"]


@pytest.mark.slow
def test_nginx_keeps_sessions_on_replicas_and_goes_on_without_one(
    tmp_path: Path, tiny_clip: CLIP
) -> None:
    """The example as written, but for ports: two replicas on one database, one of which stops."""
    program = shutil.which("nginx")
    if program is None:
        pytest.skip("no nginx here")
    sessions = tmp_path / "sessions"
    ports = [free_port() for _ in range(3)]
    text = (ROOT / "deploy/nginx.conf").read_text()
    for old, new in zip(("8765", "8766", "listen 8080"), ports, strict=True):
        text = text.replace(
            f":{old}" if "listen" not in old else old, _renamed(old, new)
        )
    (tmp_path / "site.conf").write_text(text)
    paths = "".join(
        f"{name}_temp_path {tmp_path}/{name};"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (tmp_path / "nginx.conf").write_text(
        f"pid {tmp_path}/pid; error_log {tmp_path}/error.log; events {{}} "
        f"http {{ access_log off; {paths} include {tmp_path}/site.conf; }}"
    )
    words = [
        program,
        "-e",
        str(tmp_path / "error.log"),
        "-c",
        str(tmp_path / "nginx.conf"),
    ]
    proxy = subprocess.Popen([*words, "-g", "daemon off;"])
    first = live_service(sessions, tiny_clip, port=ports[0], tokens=[TOKEN])
    second = live_service(sessions, tiny_clip, port=ports[1], tokens=[TOKEN])
    address = f"http://127.0.0.1:{ports[2]}"
    try:
        with second as other, Client(address, token=TOKEN, retry_seconds=60) as client:
            with first as one:
                wait_until(lambda: is_up(address))
                created = [
                    client.create_session(CLASSES, method="tent") for _ in range(6)
                ]
                alone = [Alone(tiny_clip) for _ in created]
                for number in range(4):
                    for session, reference in zip(created, alone, strict=True):
                        response = session.predict(batch_of(number), top_k=len(CLASSES))
                        expected = reference.predict(batch_of(number))
                        assert probabilities(response.model_dump()) == expected
                restored = [_restores(replica) for replica in (one, other)]
                assert sum(restored) <= len(
                    created
                )  # each moved once at most, to stay there
            for session, reference in zip(created, alone, strict=True):
                response = session.predict(batch_of(9), top_k=len(CLASSES))
                assert probabilities(response.model_dump()) == reference.predict(
                    batch_of(9)
                )
    finally:
        proxy.terminate()
        proxy.wait(30)


def _renamed(old: str, new: int) -> str:
    return f"listen {new}" if "listen" in old else f":{new}"


def _restores(address: str) -> float:
    """How often a replica has read a session back."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    text = httpx.get(f"{address}/metrics", headers=headers).text
    return float(text.partition("\ncliquetta_restores_total ")[2].split()[0])
