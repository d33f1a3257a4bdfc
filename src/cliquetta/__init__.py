"""Adapt CLIP while it predicts, from the unlabelled images it is given.

>>> from cliquetta import create_method, create_model
>>> model = create_model("micro")
>>> method = create_method("domain_norm", model, ["cat", "dog"])
>>> prediction = method.predict(["a.jpg", "b.jpg"])  # doctest: +SKIP

Or for whole folders, of any size: ``cliquetta.predict("photos", ["cat", "dog"])``.

Names are imported when first used, so that ``import cliquetta`` is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from cliquetta.data.catalogue import get_dataset as get_dataset
    from cliquetta.data.catalogue import list_datasets as list_datasets
    from cliquetta.data.dataset import ArrayDataset as ArrayDataset
    from cliquetta.data.dataset import Dataset as Dataset
    from cliquetta.data.dataset import FileDataset as FileDataset
    from cliquetta.data.features import FeatureDataset as FeatureDataset
    from cliquetta.data.features import feature_dataset as feature_dataset
    from cliquetta.data.files import folder_dataset as folder_dataset
    from cliquetta.data.images import ImageError as ImageError
    from cliquetta.data.images import open_image as open_image
    from cliquetta.data.stream import Stream as Stream
    from cliquetta.data.views import attach_views as attach_views
    from cliquetta.errors import UnknownNameError as UnknownNameError
    from cliquetta.errors import UserError as UserError
    from cliquetta.evaluation.record import Record as Record
    from cliquetta.evaluation.record import load_record as load_record
    from cliquetta.evaluation.runner import evaluate as evaluate
    from cliquetta.export import export_model as export_model
    from cliquetta.inference.bulk import predict as predict
    from cliquetta.methods.base import Adapter as Adapter
    from cliquetta.methods.base import BatchDependence as BatchDependence
    from cliquetta.methods.building.support_set import FewShot as FewShot
    from cliquetta.methods.checks import check_method as check_method
    from cliquetta.methods.fewshot_io import create_fitted as create_fitted
    from cliquetta.methods.fewshot_io import fit_method as fit_method
    from cliquetta.methods.fewshot_io import save_fitted as save_fitted
    from cliquetta.methods.registry import create_method as create_method
    from cliquetta.methods.registry import list_methods as list_methods
    from cliquetta.methods.registry import method_config as method_config
    from cliquetta.methods.registry import register as register
    from cliquetta.methods.state import load_state as load_state
    from cliquetta.methods.state import merge_states as merge_states
    from cliquetta.methods.state import restore_method as restore_method
    from cliquetta.methods.state import save_state as save_state
    from cliquetta.model.checkpoints.native import save_model as save_model
    from cliquetta.model.clip import CLIP as CLIP
    from cliquetta.model.factory import create_model as create_model
    from cliquetta.model.factory import list_models as list_models
    from cliquetta.model.features_only import FeaturesOnly as FeaturesOnly
    from cliquetta.model.in_memory import from_model as from_model
    from cliquetta.model.preprocess import Preprocess as Preprocess
    from cliquetta.pipelines import ZeroShotImageClassification as ZeroShotImageClassification
    from cliquetta.pipelines import pipeline as pipeline
    from cliquetta.prompts.classes import ClassPrompts as ClassPrompts
    from cliquetta.types import Batch as Batch
    from cliquetta.types import Prediction as Prediction
    from cliquetta.types import ViewSpec as ViewSpec

_EXPORTS = {
    "data.catalogue": ("get_dataset", "list_datasets"),
    "data.dataset": ("ArrayDataset", "Dataset", "FileDataset"),
    "data.features": ("FeatureDataset", "feature_dataset"),
    "data.files": ("folder_dataset",),
    "data.images": ("ImageError", "open_image"),
    "data.views": ("attach_views",),
    "errors": ("UnknownNameError", "UserError"),
    "inference.bulk": ("predict",),
    "evaluation.record": ("Record", "load_record"),
    "evaluation.runner": ("evaluate",),
    "data.stream": ("Stream",),
    "export": ("export_model",),
    "methods.base": ("Adapter", "BatchDependence"),
    "methods.checks": ("check_method",),
    "methods.registry": ("create_method", "list_methods", "method_config", "register"),
    "methods.fewshot_io": ("create_fitted", "fit_method", "save_fitted"),
    "methods.state": ("load_state", "merge_states", "restore_method", "save_state"),
    "methods.building.support_set": ("FewShot",),
    "model.checkpoints.native": ("save_model",),
    "model.clip": ("CLIP",),
    "model.factory": ("create_model", "list_models"),
    "model.features_only": ("FeaturesOnly",),
    "model.in_memory": ("from_model",),
    "model.preprocess": ("Preprocess",),
    "pipelines": ("ZeroShotImageClassification", "pipeline"),
    "prompts.classes": ("ClassPrompts",),
    "types": ("Batch", "Prediction", "ViewSpec"),
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
