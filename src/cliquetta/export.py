"""Adapted models for use without this package: ONNX, or a program of ``torch.export``.

Preprocessed pixels in, logits out, for any batch size, as :meth:`Adapter.frozen_model`
computes them; class names and preprocessing are in the file's metadata.
"""

import copy
import io
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cliquetta.atomic import write_atomically
from cliquetta.errors import UserError
from cliquetta.methods.building.base import Adapter
from cliquetta.methods.building.state import describe
from cliquetta.model.clip import FrozenModel
from cliquetta.version import installed_version

METADATA = "cliquetta.json"
"""Name of the metadata in a ``.pt2`` archive; in ONNX they are entries of the model."""
LARGEST_ONNX = 2**31 - 2**24  # bytes of weights that fit into one protobuf file


@dataclass(frozen=True)
class Exported:
    """The file that :func:`export_model` wrote."""

    path: Path
    bytes: int
    opset: int | None
    """Version of ONNX's default domain; ``None`` for a ``.pt2`` file."""
    metadata: dict[str, Any]


def check_format(path: Path) -> str:
    """The suffix of an output file, ``.onnx`` or ``.pt2``, if what writes it is installed."""
    if path.suffix not in (".onnx", ".pt2"):
        raise UserError(
            f"{path.name}: end its name in .onnx (ONNX) or .pt2 (torch.export)"
        )
    if path.suffix == ".onnx":
        try:
            import onnx  # noqa: F401
            import onnxscript  # noqa: F401
        except ImportError as error:
            raise UserError(
                f"writing ONNX needs {error.name}: pip install 'cliquetta[export]', or choose .pt2"
            ) from error
    return path.suffix


def export_model(adapter: Adapter, path: Path | str, *, half: bool = False) -> Exported:
    """Write what an adapter has learned as a model of its own.

    Args:
        adapter: An adapter with something to export, see :meth:`Adapter.frozen_model`.
        path: Output file, ``.onnx`` or ``.pt2``; replaced completely or not at all.
        half: Store and run the image tower in float16; pixels and logits stay float32.

    Returns:
        Path, size, opset and metadata of the file.

    Raises:
        UserError: The method has nothing to export, the suffix is neither, or a package
            is missing.

    """
    path = Path(path)
    suffix = check_format(path)
    # A copy: the adapter's own weights may be on another device or of another
    # precision.
    frozen = copy.deepcopy(adapter.frozen_model()).cpu().float()
    if half:
        frozen.visual.half()
    metadata = _describe(adapter, half=half)
    with _quietly():
        program = _trace(frozen, adapter.model.image_size, adapter.model.id)
        if suffix == ".onnx":
            data, opset = _as_onnx(program, metadata)
        else:
            file = io.BytesIO()
            opset = None
            extra = {METADATA: json.dumps(metadata, ensure_ascii=False)}
            torch.export.save(program, file, extra_files=extra)
            data = file.getvalue()
    write_atomically(path, data)
    return Exported(path, len(data), opset, metadata)


def _describe(adapter: Adapter, *, half: bool) -> dict[str, Any]:
    """The description of an exported model for its users, as JSON types."""
    facts = describe(adapter)
    return {
        "cliquetta": installed_version(),
        **{key: facts[key] for key in ("method", "model", "weights")},
        "classes": list(adapter.prompts.names),
        "templates": list(adapter.prompts.templates),
        "preprocess": adapter.model.preprocess.to_dict(),
        "input": "pixels: float32 (batch, 3, size, size), RGB / 255, less mean, over std",
        "output": "logits: float32 (batch, classes); softmax gives probabilities"
        + ("; sigmoid gives independent ones" if adapter.model.bias else ""),
        "precision": "float16" if half else "float32",
    }


def _trace(frozen: FrozenModel, size: int, name: str) -> torch.export.ExportedProgram:
    """The program of a model for any number of images."""
    example = torch.zeros(2, 3, size, size)
    batch = torch.export.Dim("batch")
    try:
        return torch.export.export(
            frozen, (example,), dynamic_shapes=({0: batch},), strict=False
        )
    except Exception as error:
        # Towers of other libraries are traced as they are, and some cannot be.
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"the image tower of {name} cannot be traced: {reason}"
        ) from error


def _as_onnx(
    program: torch.export.ExportedProgram, metadata: dict[str, Any]
) -> tuple[bytes, int | None]:
    weights = sum(v.numel() * v.element_size() for v in program.state_dict.values())
    if weights > LARGEST_ONNX:
        raise UserError(
            f"{weights / 2**30:.1f} GiB of weights do not fit into one ONNX file (2 GiB): pass "
            "--half, or choose .pt2"
        )
    names = {"input_names": ["pixels"], "output_names": ["logits"]}
    onnx = torch.onnx.export(program, dynamo=True, verbose=False, **names)  # type: ignore[arg-type]
    assert onnx is not None
    model = onnx.model_proto
    for key, value in metadata.items():
        entry = model.metadata_props.add()
        entry.key = key
        entry.value = (
            value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        )
    (opset,) = (
        entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")
    )
    return model.SerializeToString(), opset


@contextmanager
def _quietly() -> Iterator[None]:
    """Without torch's remarks on packages that are not needed here."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
