"""The help of all commands, and that what README and documents promise is true."""

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

import cliquetta
from cliquetta.cli.main import app
from cliquetta.version import REPOSITORY
from tests._helpers.running import Run


def test_help_has_examples_and_exit_codes_and_there_is_a_version(run: Run) -> None:
    assert run("--version").stdout == f"cliquetta {cliquetta.__version__}\n"
    listed = run("--help").text
    for command in (
        "demo",
        "predict",
        "evaluate",
        "fit",
        "methods",
        "models",
        "datasets",
    ):
        text = run(command, "--help").text
        for words in (
            "Examples",
            f"cliquetta {command}",
            "Exit codes",
            "--json",
            "--quiet",
        ):
            assert words in text and command in listed


@pytest.mark.parametrize("given", [None, "ACTIVE"])
def test_help_loads_no_torch_and_threads_wait_asleep_by_default(
    given: str | None,
) -> None:
    program = (
        "import os, sys, cliquetta; from cliquetta.cli.main import app; dir(cliquetta)\n"
        "assert 'torch' not in sys.modules  # which reads the policy when it is loaded\n"
        "print(os.environ['OMP_WAIT_POLICY'], os.environ['GOMP_SPINCOUNT'])"
    )
    known = {
        name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"
    }
    environment = known | ({"OMP_WAIT_POLICY": given} if given else {})
    start = time.perf_counter()
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True
    )
    assert run.stdout.split() == [(given or "PASSIVE").encode(), b"0"], run.stderr
    assert (
        time.perf_counter() - start < 5
    )  # takes 0.2 s; loading torch on a busy machine, 10


ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands() -> list[str]:
    texts = [
        README,
        *(p.read_text(encoding="utf-8") for p in sorted(ROOT.glob("docs/**/*.md"))),
    ]
    joined = [text.replace("\\\n", " ") for text in texts]
    lines = [
        line for text in joined for line in re.findall(r"^cliquetta .*$", text, re.M)
    ]
    return sorted({line.split("  #")[0].strip() for line in lines})


@pytest.mark.parametrize("line", commands())
def test_commands_of_the_documents_exist_with_their_options(
    run: Run, line: str
) -> None:
    words = shlex.split(line.rstrip("\\"))[1:]
    names = words[:2] if words[0] in ("data", "sessions") else words[:1]
    text = run(*names, "--help").text
    assert f"cliquetta {' '.join(names)}" in text
    for option in re.findall(r"(?<!\S)--[a-z-]+", line):
        assert option in text or option == "--help", f"{option} of {line!r}"


def whole_commands() -> list[str]:
    """Commands of documents and of --help, continued lines joined."""
    examples = [command.epilog or "" for command in app.registered_commands]
    pages = [p.read_text(encoding="utf-8") for p in sorted(ROOT.glob("docs/**/*.md"))]
    text = "\n".join([README, *pages, *examples]).replace("\\\n", " ")
    return re.findall(r"^(?:[^`\n]*\| )?cliquetta .*$", text, re.M)


@pytest.mark.parametrize("line", sorted(set(whole_commands())))
def test_documented_commands_name_a_model_for_data_that_are_not_bundled(
    line: str,
) -> None:
    words = line.partition("cliquetta ")[2].split("  #")[0].split()
    named = "--model" in words or "--text-features" in words or "--state" in words
    if named or words[0] not in (
        "predict",
        "evaluate",
        "fit",
        "ablate",
        "export",
        "serve",
        "app",
    ):
        return
    dataset = line.partition("--dataset ")[2].strip("'")
    assert dataset.startswith("bundled") or "--grid" in words, line


def test_every_command_is_on_the_page_of_commands_and_in_the_changes() -> None:
    page = (ROOT / "docs/commands.md").read_text(encoding="utf-8")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for name in [command.name for command in app.registered_commands]:
        assert f"`{name}`" in changes, name
        assert f"`{name}" in page, f"name `{name}` in docs/commands.md"


def test_the_first_result_fits_one_screen() -> None:
    """A picture of 20 lines counts; a screen has about 50."""
    first = README.partition("## What is measured")[0]
    assert len(first.splitlines()) + 20 <= 55
    notes = README.partition("<!-- /headline -->")[2].partition("\n## ")[0]
    assert len(re.findall(r"\.(?:\s|$)", notes)) <= 3, (
        "notes under the table: three sentences"
    )


def test_the_readme_clones_what_pyproject_names() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (address,) = re.findall(r'^Repository = "(.*)"$', project, re.M)
    assert address == REPOSITORY
    for page in ("README.md", "docs/install.md"):
        (cloned,) = re.findall(
            r"^git clone (\S+)", (ROOT / page).read_text("utf-8"), re.M
        )
        assert cloned == address, page


def test_every_extra_is_on_the_install_page() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = project.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    names = re.findall(r"^([a-z-]+) = ", extras, re.M)
    assert len(names) > 10
    install = (ROOT / "docs/install.md").read_text(encoding="utf-8")
    for name in names:
        assert f"| `{name}` |" in install, name
