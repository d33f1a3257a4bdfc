"""Import torchmetrics although a torchvision may be installed that does not fit this torch.

torchmetrics imports torchvision wherever its metadata are found; we need none of what it is for.
Importing this module first hides a broken one, so that evaluation and reports go on.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import sys
from typing import Any
from unittest.mock import patch

_BROKEN = "torchvision"


def _import() -> None:
    try:
        importlib.import_module("torchmetrics")
    except ModuleNotFoundError:
        raise
    except Exception as error:
        logging.getLogger(__name__).warning("ignoring a broken torchvision (%s)", error)
        _forget("torchmetrics", "lightning_utilities", _BROKEN)
        real = importlib.metadata.version

        def version(name: str) -> Any:
            if name == _BROKEN:
                raise importlib.metadata.PackageNotFoundError(name)
            return real(name)

        with patch("importlib.metadata.version", version):
            sys.modules[_BROKEN] = None  # type: ignore[assignment]  # "there is no such module"
            importlib.import_module("torchmetrics")
        del sys.modules[_BROKEN]


def _forget(*packages: str) -> None:
    """Drop what a failed import left behind."""
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        del sys.modules[name]


_import()
