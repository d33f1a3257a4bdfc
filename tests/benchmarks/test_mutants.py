"""The mutation program, on a package of one small module that the test writes."""

import json
from pathlib import Path

import pytest

from benchmarks.mutants import (
    FOLDER,
    FOUND,
    OWN,
    PASSED,
    Plan,
    Project,
    Result,
    Results,
    Tally,
    draw,
    make_report,
    read_equivalent,
    run,
)
from benchmarks.mutations import Mutant, find_mutants

MODULE = b'''\
"""A module."""

import threading

LIMIT = 3
_lock = threading.Lock()


def is_full(count: int, *, strict: bool = False) -> bool:
    """Tell whether it is."""
    if not strict:
        raise ValueError(f"one of {count + 1}")
    with _lock:
        return count >= LIMIT and strict


def between(low: float, high: float) -> float:
    return clip(low, high) * 0.5
'''


def changes(source: bytes) -> list[str]:
    return [mutant.change for mutant in find_mutants("a/b.py", source)]


def test_changes_of_a_module() -> None:
    """All of them, in order; neither docstrings nor messages are touched."""
    assert changes(MODULE) == [
        "3 -> 4",
        "3 -> 2",
        "False -> True",
        "not strict -> (strict)",
        'raise ValueError(f"one of {count + 1}") -> pass',
        "with _lock: -> if True:",
        "return count >= LIMIT and strict -> return not (count >= LIMIT and strict)",
        "count >= LIMIT and strict -> (count >= LIMIT or strict)",
        "count >= LIMIT -> (count > LIMIT)",
        "return clip(low, high) * 0.5 -> return 1.1 * (clip(low, high) * 0.5)",
        "clip(low, high) * 0.5 -> (clip(low, high) / 0.5)",
        "clip(low, high) -> clip(high, low)",
        "0.5 -> 0.55",
    ]


def test_a_change_is_applied_where_it_was_found() -> None:
    """Columns are counted in bytes, of which an umlaut has two."""
    source = 'x = "ä" * 2, 3 < n\n'.encode()
    by_change = {mutant.change: mutant for mutant in find_mutants("a.py", source)}
    assert by_change["3 < n -> (3 <= n)"].apply(source).decode() == (
        'x = "ä" * 2, (3 <= n)\n'
    )


@pytest.mark.parametrize(
    "source",
    [
        "assert x > 1\n",
        "if TYPE_CHECKING:\n    y = 1 + 2\n",
        "def f(x: Literal[1]) -> Literal[2]: ...\n",
        "_log.info('read %d', 1 + 2)\n",
        "@decorate(1)\ndef f() -> None: ...\n",
    ],
)
def test_what_no_run_depends_on_is_not_changed(source: str) -> None:
    assert changes(source.encode()) == []


def test_equal_changes_of_a_function_are_told_apart() -> None:
    """Their keys do not name lines: these move."""
    first = find_mutants("a.py", b"def f():\n    g(1)\n    g(1)\n")
    moved = find_mutants("a.py", b"\n\ndef f():\n    g(1)\n    g(1)\n")
    keys = [mutant.key for mutant in first]
    assert keys == [mutant.key for mutant in moved]
    assert "a.py::f::1 -> 2" in keys
    assert "a.py::f::1 -> 2 #1" in keys
    assert len(set(keys)) == len(keys)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A checkout whose tests look at one of its two functions."""
    source = tmp_path / "checkout/src/small/sums"
    source.mkdir(parents=True)
    (source.parent / "__init__.py").touch()
    (source / "__init__.py").touch()
    (source / "pair.py").write_text(
        "def larger(a, b):\n    return a if a > b else b\n\n\n"
        "def doubled(a):\n    return a * 2\n\n\n"
        "def unseen(a):\n    return a * 3\n"
    )
    tests = tmp_path / "checkout/tests/sums"
    tests.mkdir(parents=True)
    (tests / "test_pair.py").write_text(
        "from small.sums.pair import doubled\n\n\n"
        "def test_doubled():\n    assert doubled(4) == 8\n"
    )
    (tests / "test_others.py").write_text(
        "import small.sums.pair\n\n\n"
        "def test_larger():\n    assert small.sums.pair.larger(4, 3) == 4\n"
    )
    return Project(tmp_path / "checkout", package="small")


def test_tests_of_a_module_are_those_named_after_it(project: Project) -> None:
    assert project.own_tests("sums/pair.py") == ["tests/sums/test_pair.py"]
    assert project.folder_tests("sums/pair.py") == ["tests/sums/test_others.py"]


def test_tests_of_a_module_without_a_file_of_its_own(project: Project) -> None:
    tests = project.root / "tests/sums"
    (project.source / "sums/pair_figure.py").touch()
    (project.source / "sums/__init__.py").touch()
    (tests.parent / "test_sums.py").touch()
    assert project.own_tests("sums/pair_figure.py") == ["tests/sums/test_pair.py"]
    (project.source / "sums/config.py").touch()
    assert project.own_tests("sums/config.py") == [
        "tests/test_sums.py",
        "tests/sums/test_others.py",
        "tests/sums/test_pair.py",
    ]


def test_a_sample_is_that_of_its_seed(project: Project) -> None:
    drawn = draw(project, count=5, seed=3)
    assert len(drawn) == 5
    assert drawn == draw(project, count=5, seed=3)
    assert drawn != draw(project, count=5, seed=4)


@pytest.mark.slow
def test_mutants_are_found_by_the_modules_tests_then_by_the_folders(
    project: Project, tmp_path: Path
) -> None:
    """`a * 2` by its own test, `a > b` by the other file, `a * 3` by none."""
    plan = Plan(
        seed=0,
        count=100,
        jobs=2,
        out=tmp_path / "results.jsonl",
        project=project,
        equivalent=tmp_path / "none.json",
    )
    before = (project.source / "sums/pair.py").read_bytes()
    report = run(plan)
    results = Results(plan.out)
    by_change = {mutant.change: mutant for mutant in draw(project, 100, 0)}
    own = results.verdict(by_change["a * 2 -> (a / 2)"])
    assert own is not None
    assert (own.stage, own.outcome, own.error) == (OWN, FOUND, "AssertionError")
    assert own.test == "tests/sums/test_pair.py::test_doubled"
    unseen = results.verdict(by_change["a * 3 -> (a / 3)"])
    assert unseen is not None
    assert (unseen.stage, unseen.outcome) == (FOLDER, PASSED)
    assert "sums/pair.py:10 unseen: a * 3 -> (a / 3)" in report
    assert (project.source / "sums/pair.py").read_bytes() == before
    # all is known now: the second run adds no line
    lines = plan.out.read_text()
    assert run(plan) == report
    assert plan.out.read_text() == lines


def mutant_of(file: str, change: str) -> Mutant:
    """A mutant whose place does not matter."""
    return Mutant(
        file=file,
        function="f",
        kind="constant",
        change=change,
        line=7,
        start=0,
        stop=0,
        text="",
    )


def test_results_continue_and_the_last_line_counts(tmp_path: Path) -> None:
    mutant = mutant_of("a/b.py", "1 -> 2")
    results = Results(tmp_path / "out.jsonl")
    assert results.is_pending(mutant, OWN)
    assert not results.is_pending(mutant, FOLDER)  # its own tests come first
    results.add(Result(mutant.key, OWN, PASSED))
    results.add(Result(mutant.key, OWN, FOUND, error="AssertionError"))
    read = Results(tmp_path / "out.jsonl")
    assert read.verdict(mutant) == Result(mutant.key, OWN, FOUND, "AssertionError")
    assert not read.is_pending(mutant, FOLDER)


def test_what_was_missed_can_be_run_again(tmp_path: Path) -> None:
    """What the folder's tests have found stays found."""
    missed = mutant_of("a/b.py", "1 -> 2")
    found = mutant_of("a/b.py", "2 -> 3")
    results = Results(tmp_path / "out.jsonl")
    results.add(Result(missed.key, OWN, PASSED))
    results.add(Result(missed.key, FOLDER, FOUND))
    results.add(Result(found.key, OWN, FOUND))
    assert results.missed([missed, found]) == [missed]
    results.forget([missed])
    assert results.is_pending(missed, OWN)
    assert results.get(missed, FOLDER) == Result(missed.key, FOLDER, FOUND)


def test_the_report_counts_by_folder_and_names_survivors(tmp_path: Path) -> None:
    """By assertion, by a crash in the folder, survived, open, equivalent, not run."""
    asserted = mutant_of("a/b.py", "1 -> 2")
    crashed = mutant_of("a/b.py", "2 -> 3")
    survived = mutant_of("c.py", "3 -> 4")
    halfway = mutant_of("a/b.py", "6 -> 7")
    same = mutant_of("c.py", "4 -> 5")
    waiting = mutant_of("c.py", "5 -> 6")
    results = Results(tmp_path / "out.jsonl")
    results.add(Result(asserted.key, OWN, FOUND, error="Failed"))
    results.add(Result(crashed.key, OWN, PASSED))
    results.add(Result(crashed.key, FOLDER, FOUND, error="KeyError", test="t"))
    results.add(Result(survived.key, OWN, PASSED))
    results.add(Result(survived.key, FOLDER, PASSED))
    results.add(Result(halfway.key, OWN, PASSED))
    sample = [asserted, crashed, survived, halfway, same, waiting]
    report = make_report(sample, results, {same.key: "a reason"})
    assert "| . | 1 | 1 | 0 | 0 | 1 | 0 | 0 % | 0 % | - |" in report
    assert "| a | 3 | 0 | 1 | 1 | 0 | 1 | 67 % | 33 % | 50 % |" in report
    assert "| all | 4 | 1 | 1 | 1 | 1 | 1 | 50 % | 25 % | 50 % |" in report
    assert "1 of 6 drawn mutants have no valid result" in report
    assert report.endswith("Survived:\na/b.py:7 f: 6 -> 7\nc.py:7 f: 3 -> 4")
    # a find by a test that fails anyway is none
    unsound = make_report(sample, results, {}, unsound=["t"])
    assert "| a | 2 | 0 | 1 | 0 | 0 | 1 | 50 % | 50 % | 100 % |" in unsound


def test_an_empty_tally_has_no_shares() -> None:
    assert Tally().row("x") == "| x | 0 | 0 | 0 | 0 | 0 | 0 | - | - | - |"


def test_equivalent_mutants_are_named_with_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "equivalent.json"
    entry = {"file": "a.py", "function": "f", "change": "1 -> 2", "reason": "same"}
    path.write_text(json.dumps([entry]))
    assert read_equivalent(path) == {"a.py::f::1 -> 2": "same"}
    assert read_equivalent(tmp_path / "none.json") == {}
