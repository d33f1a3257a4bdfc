"""``predict``: images and models of any kind, groups, one run per state file."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from cliquetta.errors import BusyError, UserError
from cliquetta.inference.bulk import predict
from cliquetta.methods.building.state import read_header
from tests.inference.conftest import IMAGES, Predict


@pytest.mark.parametrize("out", [None, "one.csv"])
def test_two_runs_on_one_state_exclude_each_other(
    run: Predict, tmp_path: Path, out: str | None
) -> None:
    state = tmp_path / "tda.safetensors"
    refused = []

    def another(*_: int) -> None:
        with pytest.raises(BusyError):
            run(method="tda", state=state)
        refused.append(True)

    run(method="tda", state=state, on_progress=another, out=out and tmp_path / out)
    assert refused and read_header(state)["notes"]["images"] > 0
    assert not list(tmp_path.glob(".*"))
    run(method="tda", state=state)


def test_groups_share_nothing(photos: Path, run: Predict, tmp_path: Path) -> None:
    """Rows group by group, each with the predictions and the state of a run over it alone."""
    lines = [
        f"{photos / f'{number}.png'},{'ab'[number % 3 % 2]}" for number in range(IMAGES)
    ]
    groups = {
        "all": lines,
        **{g: [line for line in lines if line.endswith(g)] for g in "ab"},
    }
    rows = {}
    for group, members in groups.items():
        table = tmp_path / f"{group}.csv"
        out = tmp_path / f"{group}.out.csv"
        table.write_text("\n".join(["path,camera", *members]))
        state: dict[str, Any] = {"state": tmp_path / f"{group}.safetensors"}
        if group == "all":
            state = {"group_by": "camera", "state": tmp_path / "states"}
        run(table, method="tda", out=out, **state)
        rows[group] = out.read_text().splitlines()[1:]
    assert rows["all"] == rows["a"] + rows["b"] and len(rows["a"]) > 8
    for group in "ab":
        one = tmp_path / f"states/{group}.safetensors"
        assert one.read_bytes() == (tmp_path / f"{group}.safetensors").read_bytes()


def test_every_group_has_its_own_state_file(
    photos: Path, run: Predict, tmp_path: Path
) -> None:
    table = tmp_path / "table.csv"
    states = tmp_path / "states"
    once = {"method": "tda", "group_by": "camera", "state": states, "overwrite": True}
    table.write_text(f"path,camera\n{photos / '0.png'},_\n{photos / '1.png'},\n")
    run(table, **once)
    assert [read_header(path)["notes"]["images"] for path in states.iterdir()] == [1, 1]
    table.write_text(f"path,camera\n{photos / '0.png'},{'x' * 300}\n")
    with pytest.raises(UserError, match="too long"):
        run(table, **once)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classes": None}, "class names"),
        ({"model": None}, "no model"),
        ({"out": "x.csv"}, "needs paths"),
        ({"decode": "quick"}, "decode"),
    ],
)
def test_what_cannot_be_predicted_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    settings: dict[str, Any] = {"classes": ["cat", "dog"], "model": "micro", **changes}
    with pytest.raises(UserError, match=message):
        predict([Image.new("RGB", (9, 7))], **settings)


def test_a_table_can_go_to_standard_output(
    run: Predict, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    run(out="-")
    lines = capsysbinary.readouterr().out.splitlines()
    assert lines[0].startswith(b"path,")
    assert len(lines) == 1 + IMAGES
