"""Tensors of ``.pt`` files without running what is pickled in them.

A plain state dict goes through ``torch.load(weights_only=True)``. Of OpenAI's
TorchScript archives only ``data.pkl`` is read, by an unpickler that knows inert
records, lists and tensors. A small file may ask for much: pickles are weighed before
they are read, and tensors may not exceed the file.
"""

import io
import pickle
import pickletools
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from cliquetta.errors import first_line
from cliquetta.model.checkpoints.state import CheckpointError, State

_DTYPES = {
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "DoubleStorage": torch.float64,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_PREFIXES = ("module.", "_orig_mod.")
_CONTAINERS = ("state_dict", "model_state_dict", "model")
_NESTED = 8
_SLACK = (
    1 << 26
)  # bytes that an archive may save beyond half: the code of TorchScript does
_MOST_OBJECTS = 10_000_000
_MOST_MODULES = 100_000
# magic number, protocol, system, content, storages: before torch 1.6
_LEGACY_PICKLES = 5


def read_pt(path: Path) -> tuple[State, bool]:
    """Named tensors of a ``.pt`` file, and whether it is a TorchScript archive."""
    try:
        size, root = path.stat().st_size, None
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                _weigh_archive(archive, size)
                root = _torchscript_root(archive)
                state = (
                    {} if root is None else _flatten(_Unpickler(archive, root).load())
                )
        else:
            with path.open("rb") as file:
                _weigh_legacy(file, size)
        if root is None:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
            state = _state_dict(loaded, path)
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is refused: it holds pickled objects other than tensors, which could run code "
            f"({_first_sentence(error)}). Save its state dict as safetensors, on a machine that "
            "trusts it"
        ) from None
    except (
        Exception
    ) as error:  # torch.load and zipfile fail in many ways on a damaged file
        message = f"{path} is not a readable checkpoint: {_first_sentence(error)}"
        raise CheckpointError(message) from None
    if (
        sum(tensor.nbytes for tensor in state.values()) > 2 * size
    ):  # twice: weights may be tied
        raise CheckpointError(
            "refused: the tensors of the file claim to be larger than it is"
        )
    return state, root is not None


def _weigh_archive(archive: zipfile.ZipFile, size: int) -> None:
    """Refuse an archive that unpacks to more than it is, or whose pickles do."""
    if sum(entry.file_size for entry in archive.infolist()) > 2 * size + _SLACK:
        raise CheckpointError(
            f"{archive.filename} is refused: it would unpack to more than it is"
        )
    for entry in archive.infolist():
        if entry.filename.endswith(".pkl"):
            with archive.open(entry) as file:
                _weigh(file, size)


def _weigh_legacy(file: IO[bytes], size: int) -> None:
    """Weigh the pickles of a file before torch 1.6; what is not one is left to torch to refuse."""
    try:
        for _ in range(_LEGACY_PICKLES):
            _weigh(file, size)
    except CheckpointError:
        raise
    except (ValueError, IndexError):
        return


def _weigh(file: IO[bytes], size: int) -> None:
    """Refuse a pickle whose objects, each counted wherever it is used, are beyond all measure."""
    # tuples that name the same tuple twice, and so on, double the time of a hash with
    # every level
    stack: list[float] = []
    marks: list[int] = []
    memo: dict[int, float] = {}
    for code, argument, _ in pickletools.genops(file):
        name = code.name
        if name == "MARK":
            marks.append(len(stack))
        elif "GET" in name:
            stack.append(memo.get(int(argument or 0), 1))
        elif "PUT" in name or name == "MEMOIZE":
            slot = len(memo) if argument is None else int(argument)
            if slot > size:
                raise CheckpointError(
                    "refused: a pickle that numbers more objects than it holds"
                )
            memo[slot] = stack[-1] if stack else 1
        else:
            first = len(stack) - len(code.stack_before)
            if pickletools.stackslice in code.stack_before or name == "POP_MARK":
                first = marks.pop() - code.stack_before.index(pickletools.markobject)
            weight = 1 + sum(stack[max(0, first) :])
            del stack[max(0, first) :]
            if weight > _MOST_OBJECTS:
                raise CheckpointError(
                    "refused: a pickle that names the same objects without end"
                )
            stack += [weight] * len(code.stack_after)


def _first_sentence(error: Exception) -> str:
    """First sentence of an error, without torch's paragraphs of advice."""
    lines = str(error).splitlines()
    detail = next((line for line in lines if "GLOBAL" in line), first_line(error))
    return detail.strip().split(". ")[0]


def _state_dict(loaded: object, path: Path) -> State:
    """The state dict itself, out of the containers and prefixes of training programs."""
    for _ in range(_NESTED):
        inner = loaded if isinstance(loaded, Mapping) else {}
        name = next((k for k in _CONTAINERS if isinstance(inner.get(k), Mapping)), None)
        if name is None:
            break
        loaded = inner[name]
    if not isinstance(loaded, Mapping):
        raise CheckpointError(
            f"{path} holds a {type(loaded).__name__}, expected a state dict"
        )
    state = {
        str(key): value for key, value in loaded.items() if isinstance(value, Tensor)
    }
    for prefix in _PREFIXES:
        if all(key.startswith(prefix) for key in state):
            state = {key.removeprefix(prefix): value for key, value in state.items()}
    if not state:
        raise CheckpointError(f"{path} holds no tensors")
    return state


def _torchscript_root(archive: zipfile.ZipFile) -> str | None:
    """The folder of a TorchScript archive's files; ``None`` for any other zip."""
    names = set(archive.namelist())
    roots = (
        n.removesuffix("constants.pkl") for n in names if n.endswith("constants.pkl")
    )
    return next((root for root in roots if f"{root}data.pkl" in names), None)


class _Record:
    """Stand-in for a scripted module: its attributes, and nothing that could act."""

    attributes: Mapping[str, object] = {}

    def __setstate__(self, state: object) -> None:
        self.attributes = dict(state) if isinstance(state, dict) else {}


def _first(value: object, *_: object) -> object:
    """TorchScript's markers of typed lists and dicts: the value is already what it says."""
    return value


def _tensor(storage: Tensor, offset: int, size: Any, stride: Any, *_: object) -> Tensor:
    """A view into a storage that was read from the archive; torch checks the bounds."""
    if not isinstance(storage, Tensor):
        raise CheckpointError("a tensor of the archive has no storage")
    return torch.as_strided(storage, tuple(size), tuple(stride), int(offset))


_KNOWN = {
    "collections.OrderedDict": OrderedDict,
    "torch._utils._rebuild_tensor_v2": _tensor,
    **{f"torch.{name}": dtype for name, dtype in _DTYPES.items()},
}
"""The harmless names that an archive of weights refers to, beside those of modules and lists."""


class _Unpickler(pickle.Unpickler):
    """Reads ``data.pkl`` of a TorchScript archive; any name but those below is refused."""

    def __init__(self, archive: zipfile.ZipFile, root: str) -> None:
        super().__init__(io.BytesIO(archive.read(f"{root}data.pkl")))
        self._archive, self._root = archive, root
        self._storages: dict[str, Tensor] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "__torch__" or module.startswith("__torch__."):
            return _Record
        if module == "torch.jit._pickle":
            return _first
        if f"{module}.{name}" in _KNOWN:
            return _KNOWN[f"{module}.{name}"]
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")

    def persistent_load(self, pid: Any) -> Tensor:
        """The storage that ``('storage', dtype, key, device, count)`` names, on the CPU."""
        kind, dtype, key, _, count = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise CheckpointError(
                f"the archive refers to a {kind!r}, expected a storage"
            )
        if key not in self._storages:
            data = bytearray(self._archive.read(f"{self._root}data/{key}"))
            self._storages[key] = torch.empty(0, dtype=dtype)
            if count:
                self._storages[key] = torch.frombuffer(
                    data, dtype=dtype, count=int(count)
                )
        return self._storages[key]


def _flatten(record: object) -> State:
    """All tensors of a module's record, named as its state dict would name them."""
    if not isinstance(record, _Record):
        raise CheckpointError("the archive does not hold a module")
    state: State = {}
    waiting, modules = [("", record)], 0
    while waiting:
        prefix, module = waiting.pop()
        modules += 1
        if modules > _MOST_MODULES:
            raise CheckpointError(
                "refused: the modules of the archive contain each other"
            )
        for name, value in module.attributes.items():
            if isinstance(value, Tensor):
                state[f"{prefix}{name}"] = value
            elif isinstance(value, _Record):
                waiting.append((f"{prefix}{name}.", value))
    return state
