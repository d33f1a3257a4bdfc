"""Parts of commands: options that they share, exit codes, and one sentence per error."""

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from typer.models import OptionInfo

from cliquetta.cli.checks import check_device, check_dtype
from cliquetta.cli.console import Terminal
from cliquetta.errors import BusyError, UserError
from cliquetta.methods.building.index import name_plug_in_files

# What loads torch is imported when it is needed: `--help` does without.
if TYPE_CHECKING:
    from cliquetta.evaluation.grid import RunSpec
    from cliquetta.methods.building.spec import MethodSpec
    from cliquetta.model.clip import CLIP

FAILED = 1
BAD_INPUT = 2
SKIPPED = 3
EXIT_CODES = (
    "Exit codes: 0 success; 1 failure at run time (disk, network, memory); 2 invalid command or "
    "input; 3 success, but unreadable images were skipped."
)
_COMPUTE = ("device", "dtype", "threads")
_TYPES: dict[Any, str] = {
    int: "N",
    float: "X",
    str: "TEXT",
    Path: "PATH",
    list[str]: "TEXT",
}
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print results and errors only.")
]


@dataclass(frozen=True)
class Bounds:
    """Least and largest value of an option."""

    least: float | None = None
    most: float | None = None


Model = Annotated[
    str | None,
    "Model name (see `cliquetta models`) or path; for bundled data micro by default.",
]
Preset = Annotated[str | None, "Preset of the method's config."]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a config field: KEY=VALUE (repeatable)."),
]
Fitted = Annotated[Path | None, "File written by `cliquetta fit`, instead of --method."]
Templates = Annotated[
    list[str] | None,
    "Prompt with {}, file of prompts, or known set: openai-80 (repeatable).",
]
Root = Annotated[Path | None, "Root directory of your datasets."]
BatchSize = Annotated[int, Bounds(1), "Images per batch."]
Workers = Annotated[
    int | None,
    Bounds(0),
    "Processes that decode images; 0: none (default: one per core for a GPU, else two threads).",
]
Seeds = Annotated[str, "Seeds of order, views and methods: 0,1,2."]
Out = Annotated[Path, "Output directory; completed runs are reused."]
Limit = Annotated[int | None, Bounds(1), "Use at most N images per dataset."]
RUNS = Path("runs")


@dataclass
class Common:
    """The options that every command takes, and the terminal configured by them."""

    json: Annotated[bool, "Print one JSON document to stdout."] = False
    quiet: Quiet = False
    debug: Annotated[bool, "Show tracebacks."] = False
    device: Annotated[str, "Device: auto, cpu, cuda, cuda:N or mps."] = "auto"
    dtype: Annotated[str, "Precision of the weights: fp32, bf16 or fp16."] = "fp32"
    threads: Annotated[int | None, Bounds(1), "CPU threads. (default: all cores)"] = (
        None
    )
    plugin: Annotated[
        list[str] | None, "File of Python that registers methods of yours (repeatable)."
    ] = None

    def __post_init__(self) -> None:
        """Configure the terminal."""
        self.terminal = Terminal(json=self.json, quiet=self.quiet)

    def check(self) -> None:
        """Refuse what is misspelt, and name plug-ins to the registry, before torch is imported."""
        check_device(self.device)
        check_dtype(self.dtype)
        if self.plugin:
            name_plug_in_files(self.plugin)

    def model(self, name: str) -> "CLIP":
        """Load a model onto the chosen device, with a progress bar for downloads."""
        from cliquetta.model.factory import create_model

        device = self.checked_device()
        with self.terminal.bars() as bars:
            downloaded = partial(bars.show, f"download {name}", note="bytes")
            return create_model(
                name, device=device, dtype=self.dtype, on_progress=downloaded
            )

    def checked_device(self) -> str:
        """Return the device that was asked for, if it can be used; limit threads from here on."""
        import torch

        from cliquetta.model.factory import pick_device

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        return str(pick_device(self.device))


def add_command(
    app: typer.Typer,
    name: str,
    function: Callable[..., None],
    examples: str,
    *,
    compute: bool = True,
    plugins: bool = False,
) -> None:
    """Register ``function``, whose first parameter is a :class:`Common`, as a command of ``app``.

    ``examples`` holds one per line. Options that concern computation are left out for a
    command that loads no model (``compute=False``), ``--plugin`` unless it names
    methods (``plugins``).
    """
    _, *options = inspect.signature(function, eval_str=True).parameters.values()
    common_options = inspect.signature(Common, eval_str=True).parameters.values()

    # A command that loads no model takes no option about computing.
    absent = [] if compute else list(_COMPUTE)
    if not (compute or plugins):
        absent.append("plugin")
    shared = [option for option in common_options if option.name not in absent]

    @functools.wraps(function)
    def run(**values: Any) -> None:
        common = Common(**{option.name: values.pop(option.name) for option in shared})
        if values.get("log_format") == "json":
            common.terminal = replace(common.terminal, json_log=True)
        terminal = common.terminal
        with _errors(common), terminal.logging(debug=common.debug), _warnings(terminal):
            common.check()
            function(common, **values)

    del run.__wrapped__  # typer would look through to the undecorated signature
    parameters = [_as_option(parameter) for parameter in (*options, *shared)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}

    paragraphs = ["Examples:", *examples.strip().splitlines(), EXIT_CODES]
    app.command(name, epilog="\n\n".join(paragraphs))(run)


def _as_option(parameter: inspect.Parameter) -> inspect.Parameter:
    """Write a parameter of a command as typer takes it.

    A text beside its type (and :class:`Bounds`) is the help of an option, or of a flag
    that has no ``--no-`` form for a ``bool``.
    """
    kind, *notes = get_args(parameter.annotation)
    note = notes[-1]
    if isinstance(note, str):
        bounds = notes[0] if len(notes) > 1 else Bounds()
        note = typer.Option(help=note, min=bounds.least, max=bounds.most)
        if kind is bool:
            note.param_decls = (f"--{parameter.name.replace('_', '-')}",)
    if isinstance(note, OptionInfo) and note.metavar is None:
        # typer's own names of types leave no room for the help
        kinds = (kind, *get_args(kind))
        names = [_TYPES[each] for each in kinds if each in _TYPES]
        note.metavar = names[0] if names else None
    return parameter.replace(
        kind=inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[kind, note]
    )


@contextmanager
def _errors(common: Common) -> Iterator[None]:
    """Turn errors into one sentence and an exit code; ``--debug`` shows the trace as well."""
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        sentence = _explain(error)
        code = BAD_INPUT if isinstance(error, UserError) else FAILED
        if common.debug:
            common.terminal.trace()
        common.terminal.fail(sentence)
        common.terminal.document({"error": sentence, "exit_code": code})
        raise typer.Exit(code) from error


def _explain(error: Exception) -> str:
    """Explain an error in one sentence."""
    if isinstance(error, UserError | BusyError):
        return str(error)
    if isinstance(error, OSError):
        if error.strerror is None:
            return str(error)  # ours: a sentence already
        about = f"{error.filename}: " if error.filename else ""
        return f"{about}{error.strerror}"
    # Torch's class by its name: importing torch is what `--help` does without.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "out of memory: try a smaller --batch-size"
    return f"{type(error).__name__}: {error}; this looks like a defect, --debug shows where"


@contextmanager
def _warnings(terminal: Terminal) -> Iterator[None]:
    """Show warnings of the package as plain sentences, each once."""

    def show(message: Warning | str, *rest: Any) -> None:
        del rest
        terminal.warn(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for category in (UserWarning, FutureWarning):  # the latter: what is deprecated
            warnings.filterwarnings(
                "once", category=category, module=r"cliquetta(\.|$)"
            )
        warnings.showwarning = show  # type: ignore[assignment]
        yield


def read_settings(texts: Sequence[str]) -> dict[str, str]:
    """Read the ``key=value`` pairs of ``--set``."""
    pairs = {}
    for setting in texts:
        key, equals, value = setting.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--set takes key=value, got {setting!r}")
        pairs[key.strip()] = value.strip()
    return pairs


def read_methods(
    method: str | None,
    fitted: Path | None,
    settings: Sequence[str],
    preset: str | None = None,
) -> "list[MethodSpec]":
    """Read the methods that were asked for, their configs checked; the default if none was."""
    from cliquetta.methods.building.registry import DEFAULT_METHOD
    from cliquetta.methods.building.spec import MethodSpec

    names = [] if method is None else split_list(method, "methods")
    if len(names) > 1 and (settings or fitted or preset):
        raise UserError(
            f"--set, --preset and --fitted are for one method, got {', '.join(names)}"
        )
    if fitted is not None:
        spec = MethodSpec.from_fitted(fitted)
        if settings or preset or ":" in "".join(names):
            raise UserError(
                f"{fitted} was fitted with its settings: leave out presets and --set"
            )
        if names not in ([], [spec.method]):
            raise UserError(
                f"{fitted} was fitted for {spec.method}: leave out --method {names[0]}"
            )
        return [spec]
    suffix = f":{preset}" if preset else ""
    specs = [MethodSpec.parse(f"{name}{suffix}") for name in names or [DEFAULT_METHOD]]
    if settings:
        options = dict(specs[0].options) | read_settings(settings)
        specs = [specs[0].with_options(options)]
    return specs


def read_cells(
    base: "RunSpec", method: str | None, fitted: Path | None, settings: Sequence[str]
) -> "list[RunSpec]":
    """Return a cell of a grid for every method that was asked for."""
    from cliquetta.evaluation.grid import with_spec

    specs = read_methods(method, fitted, settings)
    return [with_spec(base, spec) for spec in specs]


def read_seeds(text: str) -> list[int]:
    """Read the integers of ``0,1,2``."""
    try:
        return [int(seed) for seed in split_list(text, "seeds")]
    except ValueError:
        raise UserError(
            f"--seeds takes whole numbers such as 0,1,2, got {text!r}"
        ) from None


def read_shard(text: str) -> tuple[int, int]:
    """Read ``(i, n)`` of ``i/n``, counted from 1."""
    first, _, second = text.partition("/")
    if first.isdecimal() and second.isdecimal():
        number = int(first)
        shards = int(second)
        if 1 <= number <= shards:
            return number, shards
    raise UserError(f"--shard takes I/N such as 2/8, got {text!r}")


def split_list(text: str, what: str) -> list[str]:
    """Split ``a,b,c`` into parts, each once; empty lists are refused."""
    parts = [part.strip() for part in text.split(",")]
    named = [part for part in dict.fromkeys(parts) if part]
    if not named:
        raise UserError(f"no {what} given")
    return named
