"""The plan of the package: which room may import which, and no module in a circle."""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import cliquetta

ROOT = Path(cliquetta.__path__[0])
TESTS = Path(__file__).parent
ROOMS = (
    ("decimals", "errors", "version", "deprecation"),
    ("types",),
    ("atomic", "ray_connection", "significance", "tensor_file", "tensor_tree"),
    ("prompts",),
    ("model",),
    ("data",),
    ("methods",),
    ("inference", "export"),
    ("evaluation",),
    ("report",),
    ("pipelines",),
    ("serve",),
    ("app",),
    ("integrations",),
    ("__init__",),
    ("cli",),
    ("__main__",),
)
"""From the ground up: a room imports from rooms before it only."""
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}


def modules() -> dict[str, Path]:
    """Dotted names of all modules below the package, packages as ``name.__init__``."""
    paths = sorted(ROOT.rglob("*.py"))
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths
    }


def imports(path: Path, *, at_import_time: bool) -> Iterator[str]:
    """Modules of ours that a file imports, without the package's own name."""
    nodes = list(ast.parse(path.read_text(encoding="utf-8")).body)
    while nodes:
        node = nodes.pop()
        guard = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if at_import_time and (guard or inside):
            continue
        nodes.extend(ast.iter_child_nodes(node))  # type: ignore[arg-type]
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            "cliquetta"
        ):
            assert node.module is not None
            base = node.module.removeprefix("cliquetta").removeprefix(".")
            yield from (f"{base}.{name.name}".removeprefix(".") for name in node.names)
        if isinstance(node, ast.Import):
            names = [
                name.name for name in node.names if name.name.startswith("cliquetta.")
            ]
            yield from (name.removeprefix("cliquetta.") for name in names)


@pytest.mark.parametrize(("name", "path"), modules().items())
def test_imports_point_to_lower_rooms_only(name: str, path: Path) -> None:
    room = name.partition(".")[0]
    for imported in imports(path, at_import_time=False):
        target = imported.partition(".")[0]
        if target in LEVEL and target != room:
            assert LEVEL[target] < LEVEL[room], f"{name} imports {imported}"


def test_nothing_in_the_package_imports_programs_of_the_repository() -> None:
    for path in modules().values():
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"^\s*(from|import) (benchmarks|tests)\b", text, re.M), (
            path
        )


def test_every_room_has_a_level() -> None:
    assert {name.partition(".")[0] for name in modules()} == set(LEVEL)


@pytest.mark.parametrize("name", [n for n in modules() if not n.endswith("__init__")])
def test_every_module_has_a_test_of_its_name(name: str) -> None:
    """Named as the module or by its first words; a package below a room may have one for all."""
    if name == "version":  # a constant
        return
    *rooms, module = name.split(".")
    words = module.lstrip("_").split("_")
    folder = TESTS.joinpath(*rooms)
    names = ["_".join(words[:count]) for count in range(1, len(words) + 1)]
    wanted = [folder / f"test_{first}.py" for first in names]
    wanted += folder.glob(f"test_{module}_*.py")
    wanted += [folder.parent / f"test_{rooms[-1]}.py"] if len(rooms) > 1 else []
    assert any(path.exists() for path in wanted), f"no test of {name}: add {wanted[-1]}"


def test_the_public_names_are_few_and_all_can_be_imported() -> None:
    assert len(cliquetta.__all__) <= 25
    assert all(getattr(cliquetta, name) for name in cliquetta.__all__)


def test_no_circle_of_modules() -> None:
    known = modules()
    graph: dict[str, set[str]] = {}
    for name, path in known.items():
        imported_modules = set()
        for imported in imports(path, at_import_time=True):
            candidates = (imported, imported.rpartition(".")[0], f"{imported}.__init__")
            imported_modules |= {
                candidate for candidate in candidates if candidate in known
            }
        graph[name] = imported_modules - {name}
    circle: list[str] = []
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle = error.args[1]
    assert not circle, " -> ".join(circle)
