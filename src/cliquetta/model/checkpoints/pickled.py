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
# Bytes that an archive may save beyond half: the code of TorchScript does.
_SLACK = 1 << 26
_MOST_OBJECTS = 10_000_000
_MOST_MODULES = 100_000
# Magic number, protocol, system, content, storages: before torch 1.6.
_LEGACY_PICKLES = 5


def read_pt(path: Path) -> tuple[State, bool]:
    """Read named tensors of a ``.pt`` file, and whether it is a TorchScript archive."""
    try:
        size = path.stat().st_size
        state = None
        if zipfile.is_zipfile(path):
            state = _read_torchscript(path, size)
        else:
            with path.open("rb") as file:
                _weigh_legacy(file, size)
        is_archive = state is not None
        if state is None:
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
    # torch.load and zipfile fail in many ways on a damaged file.
    except Exception as error:
        message = f"{path} is not a readable checkpoint: {_first_sentence(error)}"
        raise CheckpointError(message) from None

    claimed = sum(tensor.nbytes for tensor in state.values())
    if claimed > 2 * size:  # twice: weights may be tied
        raise CheckpointError(
            "refused: the tensors of the file claim to be larger than it is"
        )
    return state, is_archive


def _read_torchscript(path: Path, size: int) -> State | None:
    """Read the tensors of a TorchScript archive; ``None`` of any other zip."""
    with zipfile.ZipFile(path) as archive:
        _weigh_archive(archive, size)
        root = _torchscript_root(archive)
        if root is None:
            return None
        return _flatten(_Unpickler(archive, root).load())


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
    # Tuples that name the same tuple twice, and so on, double the time of a hash with
    # every level.
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
            # What the opcode takes from the stack, up to a mark if it takes all.
            first = len(stack) - len(code.stack_before)
            if pickletools.stackslice in code.stack_before or name == "POP_MARK":
                first = marks.pop() - code.stack_before.index(pickletools.markobject)

            # An object weighs what it is made of, and one.
            weight = 1 + sum(stack[max(0, first) :])
            del stack[max(0, first) :]
            if weight > _MOST_OBJECTS:
                raise CheckpointError(
                    "refused: a pickle that names the same objects without end"
                )
            stack += [weight] * len(code.stack_after)


def _first_sentence(error: Exception) -> str:
    """Return the first sentence of an error, without torch's paragraphs of advice."""
    detail = first_line(error)
    for line in str(error).splitlines():
        if "GLOBAL" in line:
            detail = line
            break
    return detail.strip().split(". ")[0]


def _state_dict(loaded: object, path: Path) -> State:
    """Take the state dict out of the containers and prefixes of training programs."""
    # Containers may lie in one another.
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
    """Find the folder of a TorchScript archive's files; ``None`` for any other zip."""
    names = set(archive.namelist())
    for name in names:
        root = name.removesuffix("constants.pkl")
        if root != name and f"{root}data.pkl" in names:
            return root
    return None


class _Record:
    """Stand-in for a scripted module: its attributes, and nothing that could act."""

    attributes: Mapping[str, object] = {}

    def __setstate__(self, state: object) -> None:
        """Take the attributes of a pickle."""
        self.attributes = dict(state) if isinstance(state, dict) else {}


def _first(value: object, *_: object) -> object:
    """Return the value in TorchScript's markers of typed lists and dicts, as it is."""
    return value


def _tensor(storage: Tensor, offset: int, size: Any, stride: Any, *_: object) -> Tensor:
    """View a storage that was read from the archive; torch checks the bounds."""
    if not isinstance(storage, Tensor):
        raise CheckpointError("a tensor of the archive has no storage")
    return torch.as_strided(storage, tuple(size), tuple(stride), int(offset))


# Harmless names that an archive of weights refers to, beside those of modules and
# lists.
_HARMLESS = {
    "collections.OrderedDict": OrderedDict,
    "torch._utils._rebuild_tensor_v2": _tensor,
    **{f"torch.{name}": dtype for name, dtype in _DTYPES.items()},
}


class _Unpickler(pickle.Unpickler):
    """Reads ``data.pkl`` of a TorchScript archive; any name but those below is refused."""

    def __init__(self, archive: zipfile.ZipFile, root: str) -> None:
        super().__init__(io.BytesIO(archive.read(f"{root}data.pkl")))
        self._archive = archive
        self._root = root
        self._storages: dict[str, Tensor] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return a stand-in or a harmless object; refuse all others."""
        if module == "__torch__" or module.startswith("__torch__."):
            return _Record
        if module == "torch.jit._pickle":
            return _first
        if f"{module}.{name}" in _HARMLESS:
            return _HARMLESS[f"{module}.{name}"]
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")

    def persistent_load(self, pid: Any) -> Tensor:
        """Read the storage that ``('storage', dtype, key, device, count)`` names, on the CPU."""
        kind, dtype, key, _, count = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise CheckpointError(
                f"the archive refers to a {kind!r}, expected a storage"
            )

        # Several tensors may share a storage.
        if key not in self._storages:
            data = bytearray(self._archive.read(f"{self._root}data/{key}"))
            self._storages[key] = torch.empty(0, dtype=dtype)
            if count:
                self._storages[key] = torch.frombuffer(
                    data, dtype=dtype, count=int(count)
                )
        return self._storages[key]


def _flatten(record: object) -> State:
    """Collect the tensors of a module's record, named as its state dict would name them."""
    if not isinstance(record, _Record):
        raise CheckpointError("the archive does not hold a module")
    state: State = {}
    waiting = [("", record)]
    modules = 0
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
