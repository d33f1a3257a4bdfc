"""The image and the Kubernetes example, as far as a machine without a container engine can tell."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from typer.main import get_command

from cliquetta.cli.main import app

ROOT = Path(__file__).parents[1]
TOKEN = "0123456789abcdef0123"


def instructions() -> list[tuple[str, str]]:
    """Word and arguments of every instruction of the Dockerfile."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    found = [line.split(None, 1) for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(word, " ".join(rest.split())) for word, rest in found]


def stages() -> list[list[tuple[str, str]]]:
    found: list[list[tuple[str, str]]] = []
    for word, rest in instructions():
        if word == "FROM":
            found.append([])
        found[-1].append((word, rest))
    return found


def only(word: str, stage: int = -1) -> str:
    (rest,) = (rest for found, rest in stages()[stage] if found == word)
    return rest


def is_sent(path: str) -> bool:
    """Whether a file reaches the builder: the last line of .dockerignore that fits decides."""
    sent = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        if not line or line.startswith("#"):
            continue
        names = [path, *map(str, Path(path).parents)]
        if any(fnmatch.fnmatch(name, pattern.removeprefix("**/")) for name in names):
            sent = line.startswith("!")
    return sent


def test_everything_that_is_copied_exists_and_is_sent() -> None:
    copied = [rest.split()[:-1] for word, rest in stages()[0] if word == "COPY"]
    sources = [source for group in copied for source in group]
    assert {"src", "pyproject.toml", "constraints/serve.txt"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists() and is_sent(source), source
    assert is_sent("src/cliquetta/serve/asgi.py")
    for path in ("tests/x.py", ".git/config", "tokens.txt", "src/cliquetta/__pycache__/x.pyc"):
        assert not is_sent(path), path
    # what the package's metadata names must be there when it is built
    assert {"README.md", "LICENSE", "NOTICE"} <= set(sources)


def test_only_locked_packages_are_installed() -> None:
    installs = [
        shlex.split(command)
        for word, rest in instructions()
        if word == "RUN"
        for command in re.findall(r"pip install [^;&]*", rest)
    ]
    assert len(installs) == 4
    for command in installs[:-1]:
        assert "--require-hashes" in command and "--no-deps" in command
        for place, part in enumerate(command):
            if part == "-r":
                assert "--hash=sha256:" in (ROOT / command[place + 1]).read_text()
    assert installs[-1][-1] == "." and "--no-build-isolation" in installs[-1]
    assert "-r constraints/cuda.txt" in " ".join(installs[1])  # what CUDA's torch needs besides


def test_the_image_runs_as_nobody_in_particular() -> None:
    user, _, group = only("USER").partition(":")
    assert int(user) > 1000 and int(group) > 1000
    after = [word for word, _ in stages()[-1]]
    assert "RUN" not in after[after.index("USER") :]
    assert json.loads(only("VOLUME")) == ["/sessions", "/weights"]
    assert f"-o {user} -g {group}" in only("RUN") and f"--uid {user}" in only("RUN")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


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


@contextmanager
def started(folder: Path, port: int, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """What the image starts, with its port and its folder of sessions moved."""
    words = [*json.loads(only("ENTRYPOINT")), *json.loads(only("CMD"))]
    assert words[0] == "cliquetta"
    code = "from cliquetta.cli.main import main; main()"
    words = [sys.executable, "-c", code, *words[1:]]
    moved = {"8765": str(port), "/sessions": str(folder / "sessions")}
    (folder / "sitecustomize.py").write_text(AUDIT)
    paths = [str(folder), os.environ.get("PYTHONPATH", ""), str(ROOT / "src")]
    stated = dict(pair.split("=", 1) for pair in shlex.split(only("ENV")))
    stated |= {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    server = subprocess.Popen(
        [moved.get(word, word) for word in words],
        env={**stated, "WRITTEN": str(folder / "written"), "OMP_NUM_THREADS": "1", **environment},
        cwd="/",
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield server
    finally:
        server.kill()
        server.wait(30)


@pytest.mark.slow
def test_command_and_health_check_work_as_written(tmp_path: Path) -> None:
    port = free_port()
    check = json.loads(only("HEALTHCHECK").partition(" CMD ")[2])
    check = [sys.executable, *(part.replace("8765", str(port)) for part in check[1:])]
    assert subprocess.run(check, capture_output=True).returncode != 0  # nobody there
    with started(tmp_path, port, CLIQUETTA_TOKEN=TOKEN) as server:
        end = time.monotonic() + 120
        while subprocess.run(check, capture_output=True).returncode != 0:
            assert time.monotonic() < end and server.poll() is None, server.stderr.read()
            time.sleep(0.5)
        address, headers = f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {TOKEN}"}
        assert httpx.get(f"{address}/v1/models").status_code == 401
        made = httpx.post(
            f"{address}/v1/sessions",
            json={"classes": ["cat", "dog"], "method": "zero_shot"},
            headers=headers,
            timeout=60,
        )
        assert made.status_code == 201
        kept = tmp_path / "sessions" / made.json()["id"]
        assert kept.exists()
        server.send_signal(getattr(signal, only("STOPSIGNAL")))
        assert server.wait(60) in (0, -signal.SIGTERM)
        lines = server.stderr.read().splitlines()
        assert any(json.loads(line).get("route") == "/v1/sessions" for line in lines if "{" in line)
    written = set((tmp_path / "written").read_text().splitlines())
    assert str(kept) in written
    allowed = (str(tmp_path / "sessions"), "/tmp/", "/dev/")
    assert not [path for path in written if not path.startswith(allowed)]


@pytest.mark.slow
def test_without_a_token_the_container_does_not_start(tmp_path: Path) -> None:
    with started(tmp_path, free_port()) as server:
        assert server.wait(120) == 2
        assert "CLIQUETTA_TOKEN" in server.stderr.read()


@pytest.mark.slow
def test_the_build_steps_install_a_working_package(tmp_path: Path) -> None:
    """The RUN steps of the first stage for a CPU, in an environment of its own."""
    environment = {**os.environ, "PATH": f"{tmp_path / 'venv/bin'}:{os.environ['PATH']}"}
    environment |= {"TORCH": "cpu", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    environment.pop("PYTHONPATH", None)
    for word, rest in stages()[0]:
        if word == "COPY":
            *sources, target = rest.split()
            for source in sources:
                place = tmp_path / "build" / target / (Path(source).name if target != "src" else "")
                place.parent.mkdir(parents=True, exist_ok=True)
                subprocess.run(["cp", "-r", str(ROOT / source), str(place)], check=True)
        if word == "RUN":
            (tmp_path / "build").mkdir(exist_ok=True)
            command = rest.replace("/opt/cliquetta", str(tmp_path / "venv"))
            # the wheel's index may be out of reach here; its hash is the same anywhere
            command = command.replace("--extra-index-url https://download.pytorch.org/whl/cpu", "")
            command = command.replace("python -m venv", f"{sys.executable} -m venv")
            subprocess.run(
                ["sh", "-ec", command], cwd=tmp_path / "build", env=environment, check=True
            )
    for words in (["cliquetta", "serve", "--help"], ["cliquetta", "methods"], ["pip", "check"]):
        subprocess.run(words, cwd=tmp_path, env=environment, check=True, capture_output=True)


def manifests() -> dict[tuple[str, str], dict[str, Any]]:
    documents = yaml.safe_load_all((ROOT / "deploy/kubernetes.yaml").read_text())
    return {(one["kind"], one["metadata"]["name"]): one for one in documents}


def test_kubernetes_parts_fit_each_other_and_the_image() -> None:
    found = manifests()
    deployment = found["Deployment", "cliquetta"]["spec"]
    pod = deployment["template"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == labels
    assert found["Service", "cliquetta"]["spec"]["selector"] == labels
    # a folder of sessions has one server at a time
    assert (deployment["replicas"], deployment["strategy"]["type"]) == (1, "Recreate")
    (container,) = pod["containers"]
    (port,) = container["ports"]
    assert str(port["containerPort"]) == only("EXPOSE")
    assert found["Service", "cliquetta"]["spec"]["ports"][0]["targetPort"] == port["name"]
    for probe in ("startupProbe", "readinessProbe"):
        assert container[probe]["httpGet"] == {"path": "/healthz", "port": port["name"]}
    assert pod["terminationGracePeriodSeconds"] > 30  # the server's own time to finish
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    assert set(json.loads(only("VOLUME"))) <= set(mounts.values()) and "/tmp" in mounts.values()
    for volume in pod["volumes"]:
        if "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]["claimName"]
            assert found["PersistentVolumeClaim", claim]["spec"]["resources"]["requests"]["storage"]
    arguments = dict(word.partition("=")[::2] for word in container["args"][1:])
    assert container["args"][0] == "serve" and arguments["--host"] == "0.0.0.0"
    serve = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    assert arguments.keys() <= {option for one in serve.params for option in one.opts}
    assert arguments["--port"] == str(port["containerPort"])
    assert arguments["--state-dir"].startswith(mounts["sessions"] + "/")
    assert arguments["--token-file"].startswith(mounts["tokens"] + "/")


def test_kubernetes_restricts_the_pod() -> None:
    """The fields that Kubernetes' restricted profile asks for, and a read-only root."""
    pod = manifests()["Deployment", "cliquetta"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    user, _, group = only("USER").partition(":")
    inner, outer = container["securityContext"], pod["securityContext"]
    assert outer["runAsNonRoot"] is True
    assert (outer["runAsUser"], outer["runAsGroup"], outer["fsGroup"]) == (
        int(user),
        int(group),
        int(group),
    )
    assert outer["seccompProfile"] == {"type": "RuntimeDefault"}
    assert inner["allowPrivilegeEscalation"] is False and inner["readOnlyRootFilesystem"] is True
    assert inner["capabilities"] == {"drop": ["ALL"]}
    assert pod["automountServiceAccountToken"] is False
    assert not any(pod.get(name) for name in ("hostNetwork", "hostPID", "hostIPC"))
    assert "memory" in container["resources"]["limits"]
