"""Mutation testing: small mistakes of the source that the tests notice or miss.

A seeded sample of changes (`benchmarks.mutations`), shared out over the folders of the
package by their size, is made one at a time in a copy of the checkout. Each is run
against the tests of its module, and one that they do not notice against the fast tests
of its folder. `mutmut` changes nothing outside functions, where our presets stand, and
`cosmic-ray` runs one test command for all modules: neither serves.

Results are kept one line per run in `--out`, so a run that is interrupted continues.
Mutants that change nothing that can be observed are named, with the reason, in
`mutants-equivalent.json`, by file, function and change.

    python -m benchmarks.mutants --seed 26 --count 300 --jobs 2 --out build/mutants.jsonl
"""

import argparse
import importlib
import importlib.util
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.mutations import Mutant, find_mutants

ROOT = Path(__file__).parents[1]
EQUIVALENT = Path(__file__).with_name("mutants-equivalent.json")
FAST = "not slow and not browser and not parity"
OWN = "own"
FOLDER = "folder"
LIMITS = {OWN: 240.0, FOLDER: 900.0}
"""Seconds that the tests of a stage may take, on a machine that does other things."""
ASSERTIONS = ("AssertionError", "Failed")  # `Failed`: what should raise or warn did not
FOUND = "found"
PASSED = "passed"
NO_TESTS = 5  # exit status of pytest when nothing is selected
_POLL = 0.05
_LEFT_OUT = (
    *(".git", ".venv*", "build", "dist", "runs", "demo", "__pycache__"),
    *(".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"),
)
# Imported once, before tests are forked: most of the seconds that a start takes.
_PRELOADED = (
    *("torch", "numpy", "PIL.Image", "pytest", "hypothesis", "torchmetrics"),
    *("fastapi", "starlette.testclient", "sqlalchemy", "matplotlib.pyplot", "typer"),
)


@dataclass(frozen=True)
class Project:
    """A checkout with a package in ``src`` and its mirror in ``tests``."""

    root: Path = ROOT
    package: str = "cliquetta"

    @property
    def source(self) -> Path:
        """Return the folder of the package."""
        return self.root / "src" / self.package

    def mutants(self) -> list[Mutant]:
        """List all mutants of the package."""
        listed = []
        for path in sorted(self.source.rglob("*.py")):
            file = path.relative_to(self.source).as_posix()
            listed += find_mutants(file, path.read_bytes())
        return listed

    def own_tests(self, file: str) -> list[str]:
        """List the test files that are named after a module, and its docstrings."""
        module = Path(file).with_suffix("")
        tests = self.root / "tests"
        words = module.name.split("_")

        # report/headline_figure.py: test_headline_figure*.py, else test_headline*.py
        found: list[Path] = []
        while words and not found:
            name = "_".join(words)
            found = self._named(tests / module.parent, name)
            words.pop()

        # methods/scap/config.py: test_scap*.py beside the folder, and what is in it
        if not found:
            folder = tests / module.parent
            beside = self._named(folder.parent, folder.name)
            inside = sorted(folder.glob("test_*.py"))
            found = [*beside, *inside]

        # examples in docstrings are tests as well
        source = self.source / file
        if ">>> " in source.read_text():
            found.append(source)
        return self._relative(found)

    def _relative(self, paths: Sequence[Path]) -> list[str]:
        return [path.relative_to(self.root).as_posix() for path in paths]

    @staticmethod
    def _named(folder: Path, name: str) -> list[Path]:
        exact = folder / f"test_{name}.py"
        return [exact] * exact.exists() + sorted(folder.glob(f"test_{name}_*.py"))

    def folder_tests(self, file: str) -> list[str]:
        """List the other tests of a module's folder, those that name the module first."""
        module = Path(file).with_suffix("")
        tests = self.root / "tests"
        if len(module.parts) > 1:
            folder = tests / module.parts[0]
            files = sorted(folder.rglob("test_*.py"))
        else:
            files = sorted(tests.glob("test_*.py"))

        # False comes before True
        name = ".".join((self.package, *module.parts))
        not_naming = {path: name not in path.read_text() for path in files}
        files.sort(key=not_naming.__getitem__)

        own = self.own_tests(file)
        paths = self._relative(files)
        return [path for path in paths if path not in own]

    def tests(self, file: str, stage: str) -> list[str]:
        """List the tests of a stage."""
        return self.own_tests(file) if stage == OWN else self.folder_tests(file)


@dataclass(frozen=True)
class Result:
    """What the tests of a stage said of a mutant."""

    key: str
    stage: str
    outcome: str
    """`found` or `passed`"""
    error: str = ""
    """type of the first error, or `time limit`"""
    test: str = ""
    """the first test that failed"""
    seconds: float = 0.0

    @property
    def by_assertion(self) -> bool:
        """Tell whether a test said what is wrong, rather than fell over it."""
        return self.error in ASSERTIONS


def draw(project: Project, count: int, seed: int) -> list[Mutant]:
    """Draw a sample, shared out over folders by the number of their mutants.

    Within a folder a kind of change has a weight of the root of its number, so that
    constants do not drown the locks.

    Args:
        project: Whose mutants.
        count: How many, at least one of every folder.
        seed: Equal seeds draw equal samples of equal sources.

    Returns:
        The sample, in random order: any beginning of it is a sample as well.

    """
    generator = random.Random(seed)
    by_folder: dict[str, list[Mutant]] = defaultdict(list)
    mutants = project.mutants()
    for mutant in mutants:
        by_folder[mutant.folder].append(mutant)

    sample = []
    for folder in sorted(by_folder):
        of_folder = by_folder[folder]
        share = count * len(of_folder) / len(mutants)
        wanted = max(1, round(share))
        sample += _draw_from(of_folder, wanted, project, generator)
    generator.shuffle(sample)
    return sample


def _draw_from(
    mutants: Sequence[Mutant], count: int, project: Project, generator: random.Random
) -> list[Mutant]:
    """Draw from one folder, without repetition."""
    by_kind: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        by_kind[mutant.kind].append(mutant)
    weights = {kind: len(those) ** 0.5 for kind, those in by_kind.items()}

    drawn: list[Mutant] = []
    while len(drawn) < count and by_kind:
        # first a kind of change
        kinds = sorted(by_kind)
        weights_left = [weights[kind] for kind in kinds]
        (kind,) = generator.choices(kinds, weights_left)

        # then one of them, which does not return
        those = by_kind[kind]
        number = generator.randrange(len(those))
        mutant = those.pop(number)
        if not those:
            del by_kind[kind]

        source = project.source / mutant.file
        if mutant.is_valid(source.read_bytes()):
            drawn.append(mutant)
    return drawn


class Slot:
    """A copy of the checkout in which one mutant at a time is tested."""

    def __init__(self, project: Project, folder: Path) -> None:
        self._original = project
        self.copy = Project(folder / "checkout", project.package)
        self._report = folder / "report.json"
        self._output = folder / "output.txt"
        self._stamp = time.time()
        ignored = shutil.ignore_patterns(*_LEFT_OUT)
        shutil.copytree(project.root, self.copy.root, ignore=ignored, symlinks=True)

    def begin(self, mutant: Mutant | None, tests: Sequence[str]) -> int:
        """Start the tests of a mutant, or of the source itself; return the process."""
        self._report.unlink(missing_ok=True)
        if mutant is not None:
            path = self.copy.source / mutant.file
            path.write_bytes(mutant.apply(path.read_bytes()))
            # a second of its own for each: compiled files are told apart by seconds
            self._stamp += 2
            os.utime(path, (self._stamp, self._stamp))
        process = os.fork()
        if process == 0:
            self._run(tests, first_only=mutant is not None)
        return process

    def restore(self, mutant: Mutant) -> None:
        """Undo a mutant."""
        original = self._original.source / mutant.file
        shutil.copy2(original, self.copy.source / mutant.file)

    def failures(self) -> list[dict[str, str]]:
        """Return what failed: test and type of error, in order."""
        if not self._report.exists():
            return []
        failures: list[dict[str, str]] = json.loads(self._report.read_text())
        return failures

    def _run(self, tests: Sequence[str], *, first_only: bool) -> None:
        """Run tests in a forked process, which never returns."""
        status = 1
        try:
            os.setsid()
            output = os.open(self._output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(output, sys.stdout.fileno())
            os.dup2(output, sys.stderr.fileno())
            self._enter()
            status = self._run_pytest(tests, first_only=first_only)
        finally:
            sys.stdout.flush()
            os._exit(status)

    def _enter(self) -> None:
        """Import the package and the tests from the copy, here and in child processes."""
        root = self.copy.root
        os.chdir(root)
        source = str(root / "src")
        os.environ["PYTHONPATH"] = source
        os.environ["OMP_NUM_THREADS"] = "1"

        # nothing of the checkout itself may be found
        original = str(self._original.root)
        others = []
        for path in sys.path:
            if path and not path.startswith(original):
                others.append(path)
        sys.path[:] = [source, str(root), *others]

        # nor what the program has imported from there
        ours = (self.copy.package, "tests", "benchmarks")
        for name in list(sys.modules):
            top = name.partition(".")[0]
            if top in ours:
                del sys.modules[name]

    def _run_pytest(self, tests: Sequence[str], *, first_only: bool) -> int:
        import pytest

        words = ["-q", "-p", "no:cacheprovider", "-m", FAST]
        words.append(f"--basetemp={self.copy.root.parent / 'tmp'}")
        if first_only:
            words.append("-x")
        if importlib.util.find_spec("xdist"):
            words += ["-n", "0"]
        recorder = _Recorder(self._report)
        return int(pytest.main([*words, *tests], plugins=[recorder]))


class _Recorder:
    """Plugin of pytest that writes what failed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failures: list[dict[str, str]] = []

    def pytest_exception_interact(self, node: Any, call: Any) -> None:
        """Note a test or a file that failed, as it fails: the process may be killed."""
        error = call.excinfo.typename
        self._failures.append({"test": node.nodeid, "error": error})
        self._path.write_text(json.dumps(self._failures))


@dataclass
class _Running:
    mutant: Mutant
    stage: str
    slot: Slot
    process: int
    since: float = field(default_factory=time.monotonic)

    def poll(self) -> Result | None:
        """Return the result when the tests have ended, or their time has."""
        done, status = os.waitpid(self.process, os.WNOHANG)
        now = time.monotonic()
        seconds = now - self.since
        limit = LIMITS[self.stage]
        late = seconds > limit
        if not done and not late:
            return None

        # whatever processes the tests have left
        with suppress(ProcessLookupError):
            os.killpg(self.process, signal.SIGKILL)
        if not done:
            os.waitpid(self.process, 0)
        self.slot.restore(self.mutant)
        code = os.waitstatus_to_exitcode(status)
        return self._judge(code, seconds, late=late)

    def _judge(self, code: int, seconds: float, *, late: bool) -> Result:
        failures = self.slot.failures()
        first = failures[0] if failures else {"test": "", "error": f"exit {code}"}
        if late:
            first = {"test": "", "error": "time limit"}
        passed = code in (0, NO_TESTS) and not late and not failures
        return Result(
            key=self.mutant.key,
            stage=self.stage,
            outcome=PASSED if passed else FOUND,
            error="" if passed else first["error"],
            test="" if passed else first["test"],
            seconds=round(seconds, 1),
        )


class Results:
    """What is known so far, in a file of one line per run; the last line counts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[tuple[str, str], Result] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                self._keep(Result(**json.loads(line)))

    def _keep(self, result: Result) -> None:
        self._known[result.key, result.stage] = result

    def add(self, result: Result) -> None:
        """Keep a result, here and on disk."""
        self._keep(result)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")

    def get(self, mutant: Mutant, stage: str) -> Result | None:
        """Return the result of a stage, if it has run."""
        return self._known.get((mutant.key, stage))

    def verdict(self, mutant: Mutant) -> Result | None:
        """Return the result that counts: the first that found it, else the last stage."""
        own = self.get(mutant, OWN)
        if own is None or own.outcome == FOUND:
            return own
        return self.get(mutant, FOLDER) or own

    def is_pending(self, mutant: Mutant, stage: str) -> bool:
        """Tell whether a stage has to run."""
        if stage == FOLDER:
            own = self.get(mutant, OWN)
            if own is None or own.outcome == FOUND:
                return False
        return self.get(mutant, stage) is None

    def finders(self, sample: Sequence[Mutant]) -> list[str]:
        """Return the tests that found a mutant."""
        tests = set()
        for mutant in sample:
            result = self.verdict(mutant)
            if result is not None and result.test:
                tests.add(result.test)
        return sorted(tests)

    def missed(self, sample: Sequence[Mutant]) -> list[Mutant]:
        """Return the mutants that the tests of their module did not notice."""
        missed = []
        for mutant in sample:
            own = self.get(mutant, OWN)
            if own is not None and own.outcome == PASSED:
                missed.append(mutant)
        return missed

    def forget(self, mutants: Sequence[Mutant]) -> None:
        """Let what noticed nothing run again; the lines stay in the file."""
        for mutant in mutants:
            for stage in (OWN, FOLDER):
                result = self.get(mutant, stage)
                if result is not None and result.outcome == PASSED:
                    del self._known[mutant.key, stage]


def run_stage(
    stage: str,
    mutants: Sequence[Mutant],
    slots: Sequence[Slot],
    results: Results,
    deadline: float,
) -> None:
    """Run one stage of all mutants for which it is pending, one per slot at a time."""
    waiting = [mutant for mutant in mutants if results.is_pending(mutant, stage)]
    waiting.reverse()
    free = list(slots)
    running: list[_Running] = []
    while running or waiting:
        if time.time() > deadline:
            waiting.clear()
        while free and waiting:
            slot = free.pop()
            mutant = waiting.pop()
            tests = slot.copy.tests(mutant.file, stage)
            running.append(_Running(mutant, stage, slot, slot.begin(mutant, tests)))
        time.sleep(_POLL)
        for one in list(running):
            result = one.poll()
            if result is None:
                continue
            running.remove(one)
            free.append(one.slot)
            results.add(result)
            print(_progress(result, len(waiting)), flush=True)


def _progress(result: Result, waiting: int) -> str:
    return f"{waiting:4d} {result.outcome:6s} {result.seconds:6.1f} s  {result.key}"


def find_unsound(tests: Sequence[str], slot: Slot) -> set[str]:
    """Run tests on the source itself; return those that fail."""
    if not tests:
        return set()
    os.waitpid(slot.begin(None, tests), 0)
    return {failure["test"] for failure in slot.failures()}


def read_equivalent(path: Path) -> dict[str, str]:
    """Read the reasons of mutants that change nothing, by key."""
    if not path.exists():
        return {}
    reasons = {}
    for entry in json.loads(path.read_text()):
        key = f"{entry['file']}::{entry['function']}::{entry['change']}"
        reasons[key] = entry["reason"]
    return reasons


@dataclass
class Tally:
    """Counts of a folder, or of all."""

    drawn: int = 0
    equivalent: int = 0
    own: int = 0
    folder: int = 0
    survived: int = 0
    open: int = 0
    by_assertion: int = 0

    def count(self, result: Result) -> None:
        """Count the verdict of one mutant."""
        by_own = result.stage == OWN
        if result.outcome == FOUND:
            self.by_assertion += result.by_assertion
        if result.outcome == FOUND and by_own:
            self.own += 1
        elif result.outcome == FOUND:
            self.folder += 1
        elif by_own:
            self.open += 1
        else:
            self.survived += 1

    def row(self, name: str) -> str:
        """Write a line of the table."""
        found = self.own + self.folder
        judged = found + self.survived + self.open
        cells = [
            name,
            str(judged),
            str(self.equivalent),
            str(self.own),
            str(self.folder),
            str(self.survived),
            str(self.open),
            _percent(found, judged),
            _percent(self.own, judged),
            _percent(self.by_assertion, found),
        ]
        return f"| {' | '.join(cells)} |"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


_HEAD = """\
| folder | mutants | equivalent | own tests | folder's | survived | open | found | own | assertion |
|---|---|---|---|---|---|---|---|---|---|"""


def make_report(
    sample: Sequence[Mutant],
    results: Results,
    equivalent: dict[str, str],
    unsound: Collection[str] = (),
) -> str:
    """Write the table by folder, and a line for every survivor.

    ``found`` and ``own`` are shares of the mutants that are not equivalent,
    ``assertion`` is the share of the found ones. ``open`` are those that their module's
    tests missed and their folder's have not run. Finds by tests that are ``unsound`` do
    not count.
    """
    tallies: dict[str, Tally] = defaultdict(Tally)
    total = Tally()
    survivors = []
    missing = 0
    for mutant in sample:
        of_folder = tallies[mutant.folder]
        if mutant.key in equivalent:
            of_folder.equivalent += 1
            total.equivalent += 1
            continue

        result = results.verdict(mutant)
        if result is None or result.test in unsound:
            missing += 1
            continue

        of_folder.count(result)
        total.count(result)
        if result.outcome == PASSED:
            survivors.append(_describe(mutant))

    rows = [tally.row(name) for name, tally in sorted(tallies.items())]
    table = [_HEAD, *rows, total.row("all")]
    parts = ["\n".join(table)]
    if missing:
        words = f"{missing} of {len(sample)} drawn mutants have no valid result."
        parts.append(words)
    parts.append(_kinds(sample))
    if survivors:
        survivors.sort()
        parts.append("\n".join(["Survived:", *survivors]))
    return "\n\n".join(parts)


def _describe(mutant: Mutant) -> str:
    return f"{mutant.file}:{mutant.line} {mutant.function}: {mutant.change}"


def _kinds(sample: Sequence[Mutant]) -> str:
    """Say what was drawn."""
    kinds = Counter(mutant.kind for mutant in sample)
    counts = []
    for kind, number in kinds.most_common():
        counts.append(f"{number} {kind}")
    return "Drawn: " + ", ".join(counts)


def _preload() -> None:
    """Import other people's packages, so that forked tests need not."""
    for name in _PRELOADED:
        with suppress(ImportError):
            importlib.import_module(name)


def _slots(project: Project, jobs: int, folder: Path) -> Iterator[Slot]:
    for number in range(jobs):
        place = folder / str(number)
        place.mkdir()
        yield Slot(project, place)


@dataclass(frozen=True)
class Plan:
    """What to run, where results go, and for how long."""

    seed: int
    count: int
    jobs: int
    out: Path
    again: bool = False
    minutes: float = float("inf")
    folders: tuple[str, ...] = ()
    project: Project = field(default_factory=Project)
    equivalent: Path = EQUIVALENT


def run(plan: Plan) -> str:
    """Run all that is pending, check the tests that found something, and report.

    Args:
        plan: The sample and the resources.

    Returns:
        The report.

    """
    deadline = time.time() + 60 * plan.minutes
    sample = draw(plan.project, plan.count, plan.seed)
    if plan.folders:
        sample = [mutant for mutant in sample if mutant.folder in plan.folders]

    # equivalent ones are counted, not run
    equivalent = read_equivalent(plan.equivalent)
    judged = [mutant for mutant in sample if mutant.key not in equivalent]
    results = Results(plan.out)
    if plan.again:
        missed = results.missed(judged)
        results.forget(missed)

    _preload()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        slots = list(_slots(plan.project, plan.jobs, Path(folder)))
        for stage in (OWN, FOLDER):
            run_stage(stage, judged, slots, results, deadline)
        unsound = find_unsound(results.finders(judged), slots[0])

    report = make_report(sample, results, equivalent, unsound)
    if not unsound:
        return report
    names = "\n".join(sorted(unsound))
    return f"{report}\n\nThese tests fail without any mutant: what they found is void:\n{names}"


def main() -> None:
    """Run the program's words."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=26)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutants.jsonl")
    parser.add_argument("--folders", nargs="*", default=[], help="only these")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument(
        "--again",
        action="store_true",
        help="run what their modules' tests missed once more",
    )
    words = parser.parse_args()
    plan = Plan(
        seed=words.seed,
        count=words.count,
        jobs=words.jobs,
        out=words.out,
        again=words.again,
        minutes=words.minutes,
        folders=tuple(words.folders),
    )
    print(run(plan))


if __name__ == "__main__":
    main()
