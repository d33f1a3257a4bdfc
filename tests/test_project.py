"""Files around the code: CI, templates, versions and addresses that belong together."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from cliquetta.version import REPOSITORY

ROOT = Path(__file__).parents[1]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_pull_requests_run_what_contributors_run() -> None:
    workflow: dict[str, Any] = yaml.safe_load(read(".github/workflows/ci.yml"))
    steps = [
        step.get("run") for job in workflow["jobs"].values() for step in job["steps"]
    ]
    assert ".ci/run" in steps and (ROOT / ".ci/run").stat().st_mode & 0o111


def test_every_stage_of_ci_is_a_target_that_contributing_names() -> None:
    # Two stages may run beside each other: make --jobs 2 ONE OTHER.
    lines = re.findall(r"^make (?:--jobs 2 )?([\w -]+)$", read(".ci/run"), re.M)
    stages = [stage for line in lines for stage in line.split()]
    assert len(stages) >= 6
    for stage in stages:
        assert re.search(rf"^{stage}:", read("Makefile"), re.M), stage
        assert f"make {stage} " in read("CONTRIBUTING.md"), stage


def test_the_gpu_suite_has_every_file_whose_tests_ask_for_cuda() -> None:
    """Tests that a GPU would only stand in the way of are skipped where there is one."""
    asks = re.compile(
        r"skipif\(\s*not torch\.cuda\.is_available|DEVICE = .*cuda\.is_available"
    )
    files = [
        path for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)
    ]
    needed = {
        str(path.relative_to(ROOT))
        for path in files
        if asks.search(path.read_text("utf-8"))
    }
    listed = re.search(r"^GPU_TESTS := ((?:.*\\\n)*.*)$", read("Makefile"), re.M)
    assert listed
    named = set(listed[1].replace("\\", " ").split())
    assert len(needed) >= 3 and needed <= named
    assert all((ROOT / name).exists() for name in named)


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
)
def test_issue_templates_can_be_read(path: Path) -> None:
    template = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.name != "config.yml":
        assert template["name"] and template["description"]
        assert all(entry["attributes"]["label"] for entry in template["body"])


def test_pre_commit_checks_with_the_locked_tools() -> None:
    (repository,) = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"]
    lock = read("constraints/test.txt")
    for hook in repository["hooks"]:
        tool = hook["entry"].split()[0].removeprefix(".venv/bin/")
        assert re.search(rf"^{tool}==", lock, re.M), tool


def test_one_version_and_one_address() -> None:
    (version,) = re.findall(r'^version = "(.*)"$', read("pyproject.toml"), re.M)
    assert f"\nversion: {version}\n" in read("CITATION.cff")
    assert re.findall(r"^## (\d\S+?),? ", read("CHANGELOG.md"), re.M)[0] == version
    for name in ("SECURITY.md", ".github/ISSUE_TEMPLATE/config.yml", "pyproject.toml"):
        addresses = re.findall(r"https://github\.com/cliquetta/\w+", read(name))
        assert addresses and set(addresses) == {REPOSITORY}, name


def test_scripts_of_ci_are_valid_shell() -> None:
    for script in (".ci/run", ".ci/wheel"):
        subprocess.run(["bash", "-n", ROOT / script], check=True)
