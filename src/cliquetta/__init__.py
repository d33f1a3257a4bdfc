"""Adapt CLIP while it predicts, from the unlabelled images it is given.

>>> from cliquetta import create_method, create_model
>>> model = create_model("micro")
>>> method = create_method("domain_norm", model, ["cat", "dog"])
>>> prediction = method.predict(["a.jpg", "b.jpg"])  # doctest: +SKIP

Or for folders of any size:
``cliquetta.predict("photos", ["cat", "dog"], model="micro")``.

Names are imported when first used, so that ``import cliquetta`` is fast.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from cliquetta.data.catalogue import get_dataset as get_dataset
    from cliquetta.data.catalogue import list_datasets as list_datasets
    from cliquetta.errors import UserError as UserError
    from cliquetta.evaluation.record import Record as Record
    from cliquetta.evaluation.runner import evaluate as evaluate
    from cliquetta.inference.bulk import predict as predict
    from cliquetta.inference.rows import PredictionRun as PredictionRun
    from cliquetta.methods.building.base import Adapter as Adapter
    from cliquetta.methods.building.base import BatchDependence as BatchDependence
    from cliquetta.methods.building.checks import check_method as check_method
    from cliquetta.methods.building.config import MethodConfig as MethodConfig
    from cliquetta.methods.building.fit import fit_method as fit_method
    from cliquetta.methods.building.registry import create_method as create_method
    from cliquetta.methods.building.registry import list_methods as list_methods
    from cliquetta.methods.building.registry import register as register
    from cliquetta.methods.building.state import load_method as load_method
    from cliquetta.methods.building.support_set import FewShot as FewShot
    from cliquetta.model.clip import CLIP as CLIP
    from cliquetta.model.factory import create_model as create_model
    from cliquetta.model.in_memory import from_model as from_model
    from cliquetta.model.names import list_models as list_models
    from cliquetta.pipelines import pipeline as pipeline
    from cliquetta.prompts.classes import ClassPrompts as ClassPrompts
    from cliquetta.types import Batch as Batch
    from cliquetta.types import Prediction as Prediction

_EXPORTS = {
    "data.catalogue": ("get_dataset", "list_datasets"),
    "errors": ("UserError",),
    "evaluation.record": ("Record",),
    "evaluation.runner": ("evaluate",),
    "inference.rows": ("PredictionRun",),
    "inference.bulk": ("predict",),
    "methods.building.base": ("Adapter", "BatchDependence"),
    "methods.building.config": ("MethodConfig",),
    "methods.building.support_set": ("FewShot",),
    "methods.building.checks": ("check_method",),
    "methods.building.fit": ("fit_method",),
    "methods.building.registry": ("create_method", "list_methods", "register"),
    "methods.building.state": ("load_method",),
    "model.clip": ("CLIP",),
    "model.factory": ("create_model",),
    "model.in_memory": ("from_model",),
    "model.names": ("list_models",),
    "pipelines": ("pipeline",),
    "prompts.classes": ("ClassPrompts",),
    "types": ("Batch", "Prediction"),
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    """Import a public name from its module."""
    if name == "__version__":
        from cliquetta.version import installed_version

        return installed_version()
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Public names, whether imported yet or not."""
    return sorted({*globals(), *_MODULE_OF})
