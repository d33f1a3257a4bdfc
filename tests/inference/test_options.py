"""Options of a run: the same from every way in, and refused before anything is read."""

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest

from cliquetta.errors import UserError
from cliquetta.inference.bulk import predict
from cliquetta.inference.options import PredictOptions, shard_path


def test_the_function_takes_every_option_with_its_default() -> None:
    parameters = inspect.signature(predict).parameters
    for field in dataclasses.fields(PredictOptions):
        assert parameters[field.name].default == field.default, field.name


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch_size": 0}, "at least one image"),
        ({"seed": -1}, "seeds"),
        ({"top_k": 0}, "top_k"),
        ({"workers": -1}, "workers"),
        ({"shard": (3, 2)}, "2/8"),
        ({"decode": "quick"}, "decode"),
        ({"order": "random"}, "order"),
        ({"channel_order": "bgra"}, "channel order"),
        ({"file_format": "xlsx"}, "format"),
        ({"out": "table.xlsx"}, "format"),
        ({"multi_label": 0.5, "reject": 0.5}, "leave out"),
        ({"multi_label": 0.5, "calibrate": True}, "leave out"),
        ({"multi_label": 0.5, "labels": "folder"}, "leave out"),
        ({"group_by": "camera", "shard": (1, 2), "out": "x.csv"}, "cut groups apart"),
        ({"group_by": "camera"}, "give an output file"),
        ({"group_by": "camera", "out": "-"}, "give an output file"),
    ],
)
def test_values_that_cannot_be_used_are_refused(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        PredictOptions(**values)


def test_several_labels_are_never_calibrated() -> None:
    assert PredictOptions(multi_label=0.5).calibration is False
    assert PredictOptions(calibrate=True).calibration is True


def test_every_shard_has_a_file_of_its_own() -> None:
    assert shard_path("a/predictions.csv", (2, 8)) == Path("a/predictions.2-of-8.csv")
    assert shard_path("s3://b/p.csv", (2, 8)) == "s3://b/p.2-of-8.csv"
    assert PredictOptions(out="p.csv").target == Path("p.csv")
    assert PredictOptions(out="-").target is None
