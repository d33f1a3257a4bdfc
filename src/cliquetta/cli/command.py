"""Parts of every command: common options, exit codes, and one sentence per error."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from typer.models import OptionInfo

from cliquetta.cli.console import Terminal
from cliquetta.errors import BusyError, UserError

if TYPE_CHECKING:
    from cliquetta.model.clip import CLIP

FAILED = 1
BAD_INPUT = 2
SKIPPED = 3
EXIT_CODES = (
    "Exit codes: 0 success; 1 failure at run time (disk, network, memory); 2 invalid command or "
    "input; 3 success, but unreadable images were skipped."
)

_PANEL = "Common options"
_TYPES: dict[Any, str] = {int: "N", float: "X", str: "TEXT", Path: "PATH", list[str]: "TEXT"}


@dataclass(frozen=True)
class Common:
    """The options that every command takes, and the terminal configured by them."""

    json: bool = False
    quiet: bool = False
    debug: bool = False
    device: str = "auto"
    dtype: str = "fp32"
    threads: int | None = None
    terminal: Terminal = field(default_factory=Terminal)

    def model(self, name: str) -> CLIP:
        """Load a model onto the chosen device, with a progress bar for downloads."""
        from cliquetta.model.factory import create_model

        with self.terminal.progress() as progress:
            bars: list[Any] = []

            def downloaded(done: int, total: int | None) -> None:
                if not bars:
                    bars.append(progress.add_task(f"download {name}", note="bytes", total=total))
                progress.update(bars[0], completed=done, total=total)

            return create_model(name, device=self.place(), dtype=self.dtype, on_progress=downloaded)

    def place(self) -> str:
        """The device that was asked for, checked."""
        from cliquetta.model.factory import pick_device

        try:
            return str(pick_device(self.device))
        except RuntimeError:
            raise UserError(
                f"no device {self.device!r}: use auto, cpu, mps, cuda or cuda:N"
            ) from None

    def settle(self) -> None:
        """Apply what concerns the whole process; torch is loaded only if needed."""
        if self.threads is None:
            return
        import torch

        torch.set_num_threads(self.threads)


def _option(kind: Any, help: str, *flags: str, least: int | None = None) -> Any:
    return Annotated[kind, typer.Option(*flags, help=help, rich_help_panel=_PANEL, min=least)]


_OPTIONS: dict[str, tuple[Any, Any]] = {
    "json": (_option(bool, "Print one JSON document to stdout.", "--json"), False),
    "quiet": (_option(bool, "Print results and errors only.", "--quiet", "-q"), False),
    "debug": (_option(bool, "Show tracebacks.", "--debug"), False),
}
_COMPUTE: dict[str, tuple[Any, Any]] = {
    "device": (_option(str, "Device: auto, cpu, cuda, cuda:N or mps."), "auto"),
    "dtype": (_option(str, "Precision of the weights: fp32, bf16 or fp16."), "fp32"),
    "threads": (_option(int | None, "CPU threads. (default: all cores)", least=1), None),
}


def command(
    app: typer.Typer,
    name: str,
    *,
    examples: str,
    compute: bool = True,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as a command of ``app``.

    Its first parameter, a :class:`Common`, is filled from the common options; those that concern
    computation are left out for a command that loads no model (``compute=False``). A
    :class:`UserError` ends the command with one sentence and an exit code.
    """
    shared = _OPTIONS | (_COMPUTE if compute else {})

    def enter(function: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
        added = [
            inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)
            for key, (kind, default) in shared.items()
        ]

        @functools.wraps(function)
        def run(**values: Any) -> None:
            chosen = {key: values.pop(key) for key in shared}
            terminal = Terminal(json=chosen["json"], quiet=chosen["quiet"])
            common = Common(**chosen, terminal=terminal)
            with _errors(common), terminal.logging(debug=common.debug), _warnings(terminal):
                common.settle()
                function(common, **values)

        del run.__wrapped__  # typer would look through to the undecorated signature
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + added
        for parameter in parameters:
            _name_type(parameter.annotation)
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        epilog = f"Examples:\n\n{examples.strip()}\n\n{EXIT_CODES}"
        app.command(name, epilog=epilog)(run)
        return function

    return enter


def _name_type(annotation: Any) -> None:
    """Name the type of an option in a word: typer's names leave no room for its description."""
    kind, *notes = get_args(annotation)
    for option in notes:
        if isinstance(option, OptionInfo) and option.metavar is None:
            kinds = (kind, *get_args(kind))
            option.metavar = next((_TYPES[each] for each in kinds if each in _TYPES), None)


@contextmanager
def _errors(common: Common) -> Iterator[None]:
    """Turn errors into one sentence and an exit code; ``--debug`` shows the trace as well."""
    try:
        yield
    except (typer.Exit, typer.Abort, KeyboardInterrupt):
        raise
    except UserError as error:
        _stop(common, str(error), BAD_INPUT, error)
    except BusyError as error:
        _stop(common, str(error), FAILED, error)
    except OSError as error:
        _stop(common, _os_sentence(error), FAILED, error)
    except Exception as error:
        # Torch's class by its name: importing torch is what `--help` does without.
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
            _stop(common, "out of memory: try a smaller --batch-size", FAILED, error)
        sentence = f"{type(error).__name__}: {error}; this looks like a defect, --debug shows where"
        _stop(common, sentence, FAILED, error)


def _stop(common: Common, sentence: str, code: int, error: BaseException) -> None:
    if common.debug:
        common.terminal.err.print_exception()
    common.terminal.fail(sentence)
    common.terminal.document({"error": sentence, "exit_code": code})
    raise typer.Exit(code) from error


def _os_sentence(error: OSError) -> str:
    if error.strerror is None:
        return str(error)  # ours: a sentence already
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror}"


@contextmanager
def _warnings(terminal: Terminal) -> Iterator[None]:
    """Warnings of the package as plain sentences, each once."""

    def show(message: Warning | str, *rest: Any) -> None:
        del rest
        terminal.warn(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("once", category=UserWarning, module=r"cliquetta(\.|$)")
        warnings.showwarning = show  # type: ignore[assignment]
        yield
