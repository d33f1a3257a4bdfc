"""Small changes of a module's source that its tests should notice, found in its syntax tree."""

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

ARROW = " -> "

# A boundary moves, or a condition turns round.
_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
_SCALE = 1.1
# What runs only in an editor or a type checker, or is read by people, changes no behaviour.
_SKIPPED_FIELDS = {"annotation", "returns", "decorator_list", "type_params"}
_EMPTY = {
    "str": '""',
    "bytes": 'b""',
    "list": "[]",
    "Sequence": "[]",
    "dict": "{}",
    "Mapping": "{}",
    "tuple": "()",
    "set": "set()",
}
_WRONG = {
    "bool": "not ({})",
    "int": "({}) + 1",
    "float": "1.1 * ({})",
    "Tensor": "0 * ({})",
}
_QUIET_LOGS = {"debug", "info"}


@dataclass(frozen=True)
class Mutant:
    """One change of one file: ``source[start:stop]``, as bytes, becomes ``text``."""

    file: str
    """relative to the package, with slashes"""
    function: str
    """qualified name of what holds it; empty for the module"""
    kind: str
    change: str
    """source before and after, on one line"""
    line: int
    start: int
    stop: int
    text: str
    number: int = 0
    """how many equal changes of the function come before it"""

    @property
    def folder(self) -> str:
        """Return the folder of the package, or ``.`` for a module at its top."""
        return self.file.split("/")[0] if "/" in self.file else "."

    @property
    def key(self) -> str:
        """Return what finds the mutant again when lines have moved."""
        numbered = f"{self.change} #{self.number}" if self.number else self.change
        return f"{self.file}::{self.function}::{numbered}"

    def apply(self, source: bytes) -> bytes:
        """Return the file with the change."""
        return source[: self.start] + self.text.encode() + source[self.stop :]

    def is_valid(self, source: bytes) -> bool:
        """Tell whether the file with the change is Python."""
        try:
            ast.parse(self.apply(source))
        except SyntaxError:
            return False
        return True


@dataclass(frozen=True)
class _Change:
    kind: str
    node: ast.AST
    after: str


_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
_Rule: TypeAlias = Callable[[Any], Iterator[_Change]]


def find_mutants(file: str, source: bytes) -> list[Mutant]:
    """List all changes that can be made to a module, in the order of its lines.

    Args:
        file: The module's path in the package.
        source: Its bytes.

    Returns:
        The mutants, a few of which may not be Python (:meth:`Mutant.is_valid`).

    """
    # the first byte of every line
    starts = [0]
    for line in source.splitlines(keepends=True):
        last = starts[-1]
        starts.append(last + len(line))

    mutants = []
    seen: Counter[str] = Counter()
    tree = ast.parse(source)
    for function, change in _walk(tree, scope=""):
        mutant = _place(change, function, file, source, starts)
        numbered = replace(mutant, number=seen[mutant.key])
        mutants.append(numbered)
        seen[mutant.key] += 1
    return mutants


def _place(
    change: _Change, function: str, file: str, source: bytes, starts: list[int]
) -> Mutant:
    """Find the bytes of a change."""
    node: Any = change.node
    start = starts[node.lineno - 1] + node.col_offset
    stop = starts[node.end_lineno - 1] + node.end_col_offset
    before = source[start:stop].decode()
    after = change.after
    if change.kind == "with":
        # only the head goes: the body keeps its place
        head = source[start : starts[node.body[0].lineno - 1]].decode()
        before = head.rstrip()
        stop = start + len(before.encode())
    return Mutant(
        file=file,
        function=function,
        kind=change.kind,
        change=f"{_shorten(before)}{ARROW}{_shorten(after)}",
        line=node.lineno,
        start=start,
        stop=stop,
        text=after,
    )


def _shorten(text: str) -> str:
    return " ".join(text.split())


def _walk(
    node: ast.AST, scope: str, function: _Function | None = None
) -> Iterator[tuple[str, _Change]]:
    """Yield the changes below a node, each with the qualified name of what holds it."""
    if _is_inert(node):
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        scope = f"{scope}.{node.name}" if scope else node.name
        function = None if isinstance(node, ast.ClassDef) else node

    # what the node itself can become
    changes: Iterator[_Change] = iter(())
    rule = _RULES.get(type(node))
    if isinstance(node, ast.Call):
        changes = _swaps(node, function)
    elif isinstance(node, ast.Return):
        changes = _wrong_value(node, function)
    elif rule is not None:
        changes = rule(node)
    for change in changes:
        yield scope, change

    # what the nodes below it can become
    for name, value in ast.iter_fields(node):
        if name in _SKIPPED_FIELDS:
            continue
        children = value if isinstance(value, list) else [value]
        for child in children:
            if isinstance(child, ast.AST):
                yield from _walk(child, scope, function)


def _is_inert(node: ast.AST) -> bool:
    """Tell what is not changed: text, assertions for the type checker, quiet logging."""
    if isinstance(node, ast.JoinedStr | ast.Assert | ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    if not isinstance(node, ast.Expr):
        return False
    if isinstance(node.value, ast.Constant):  # a docstring
        return True
    return (
        isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and node.value.func.attr in _QUIET_LOGS
    )


def _compare(node: ast.Compare) -> Iterator[_Change]:
    for index, operator in enumerate(node.ops):
        operators = list(node.ops)
        operators[index] = _COMPARISONS[type(operator)]()
        changed = ast.Compare(node.left, operators, node.comparators)
        yield _Change("comparison", node, _enclosed(changed))


def _bool_op(node: ast.BoolOp) -> Iterator[_Change]:
    operator = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    yield _Change("and/or", node, _enclosed(ast.BoolOp(operator, node.values)))


def _bin_op(node: ast.BinOp) -> Iterator[_Change]:
    operator = _ARITHMETIC.get(type(node.op))
    if operator is None or _is_text(node.left) or _is_text(node.right):
        return
    changed = ast.BinOp(node.left, operator(), node.right)
    yield _Change("arithmetic", node, _enclosed(changed))


def _is_text(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str | bytes)
    return isinstance(node, ast.JoinedStr)


def _constant(node: ast.Constant) -> Iterator[_Change]:
    value = node.value
    if isinstance(value, bool):
        yield _Change("constant", node, repr(not value))
    elif isinstance(value, int):
        yield _Change("constant", node, repr(value + 1))
        if value > 0:
            yield _Change("constant", node, repr(value - 1))
    elif isinstance(value, float):
        changed = value * _SCALE if value else 0.1
        yield _Change("constant", node, f"{changed:.6g}")


def _dropped(node: ast.stmt) -> Iterator[_Change]:
    yield _Change("dropped statement", node, "pass")


def _expression(node: ast.Expr) -> Iterator[_Change]:
    if isinstance(node.value, ast.Call | ast.Await):
        yield from _dropped(node)


def _with(node: ast.With) -> Iterator[_Change]:
    """Run the body without its guard, if nothing in it has a name."""
    if all(item.optional_vars is None for item in node.items):
        yield _Change("with", node, "if True:")


def _swaps(node: ast.Call, function: _Function | None) -> Iterator[_Change]:
    """Swap two neighbours among the arguments that are parameters of one type."""
    types = _parameter_types(function)
    for index in range(len(node.args) - 1):
        first = node.args[index]
        second = node.args[index + 1]
        if not isinstance(first, ast.Name) or not isinstance(second, ast.Name):
            continue

        # of one declared type: otherwise a type checker finds it
        type_of_first = types.get(first.id)
        type_of_second = types.get(second.id)
        if type_of_first is None or type_of_first != type_of_second:
            continue

        swapped = list(node.args)
        swapped[index] = second
        swapped[index + 1] = first
        changed = ast.Call(node.func, swapped, node.keywords)
        if first.id != second.id:
            yield _Change("swapped arguments", node, ast.unparse(changed))


def _parameter_types(function: _Function | None) -> dict[str, str]:
    if function is None:
        return {}
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return {
        one.arg: ast.unparse(one.annotation)
        for one in named
        if one.annotation is not None
    }


def _unary(node: ast.UnaryOp) -> Iterator[_Change]:
    if isinstance(node.op, ast.Not):
        yield _Change("not", node, _enclosed(node.operand))
    elif isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        yield _Change("arithmetic", node, _enclosed(node.operand))


def _condition(node: ast.If | ast.While | ast.IfExp) -> Iterator[_Change]:
    """Turn a condition round that is no comparison and has no ``not`` itself."""
    if not isinstance(node.test, ast.Compare | ast.UnaryOp | ast.BoolOp | ast.Constant):
        changed = ast.UnaryOp(ast.Not(), node.test)
        yield _Change("not", node.test, _enclosed(changed))


def _wrong_value(node: ast.Return, function: _Function | None) -> Iterator[_Change]:
    """Return another value of the same type, so that it is noticed only if looked at."""
    value = node.value
    if value is None or isinstance(value, ast.Constant):
        return  # constants have their own rule
    if function is None or function.returns is None:
        return
    declared = ast.unparse(function.returns)
    kind = declared.partition("[")[0]
    if declared.endswith("| None"):
        wrong = "None"
    elif kind in _EMPTY:
        wrong = _EMPTY[kind]
    elif kind in _WRONG:
        wrong = _WRONG[kind].format(ast.unparse(value))
    else:
        return
    if wrong != ast.unparse(value):
        yield _Change("return value", node, f"return {wrong}")


def _enclosed(node: ast.expr) -> str:
    """Write an expression so that what stands around it cannot divide it."""
    return f"({ast.unparse(node)})"


_RULES: dict[type[ast.AST], _Rule] = {
    ast.Compare: _compare,
    ast.BoolOp: _bool_op,
    ast.BinOp: _bin_op,
    ast.Constant: _constant,
    ast.Expr: _expression,
    ast.AugAssign: _dropped,
    ast.Raise: _dropped,
    ast.With: _with,
    ast.UnaryOp: _unary,
    ast.If: _condition,
    ast.While: _condition,
    ast.IfExp: _condition,
}
