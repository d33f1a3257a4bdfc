"""Long prediction runs: stopped at any moment, they end as if they never had been."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import signal
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from safetensors.torch import load_file

from cliquetta.atomic import exclusive
from cliquetta.errors import BusyError, UserError
from cliquetta.inference import parts, resumable
from cliquetta.inference.bulk import predict
from cliquetta.inference.parts import Parts
from cliquetta.inference.predictor import Predictor, Reader
from cliquetta.inference.rows import PredictionRun
from cliquetta.methods.registry import create_method
from cliquetta.methods.state import read_header
from cliquetta.methods.zero_shot import ZeroShot
from cliquetta.model.clip import CLIP
from cliquetta.types import Batch, Prediction
from tests._helpers.tolerance import SUM
from tests._helpers.trees import noise, table_rows

Predict = Callable[..., PredictionRun]
NAMES = ["airplane", "cat", "frog"]
IMAGES = 14


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    noise(folder, [f"{place}.png" for place in range(IMAGES)])
    (folder / "5.png").write_bytes(b"damaged")
    return folder


@pytest.fixture
def run(photos: Path, tiny_clip: CLIP, tmp_path: Path) -> Predict:
    """The same command every time: two methods that remember, four images per batch."""

    def call(**changes: object) -> PredictionRun:
        settings = {
            "model": tiny_clip,
            "method": ["tda", "tent"],
            "batch_size": 4,
            "workers": 0,
            "out": tmp_path / "out.csv",
            **changes,
        }
        return predict([photos], NAMES, **settings)  # type: ignore[arg-type]

    return call


@pytest.fixture
def whole(run: Predict, tmp_path: Path) -> bytes:
    """The table of a run that was never stopped."""
    run(out=tmp_path / "whole.csv")
    return (tmp_path / "whole.csv").read_bytes()


STEPS = (
    (parts, "write_atomically"),
    (resumable, "sync_folder"),
    (Predictor, "save"),
    (Path, "rmdir"),
)
"""What a run does to the disk, besides removing states that are no longer needed."""


def in_child(action: Callable[[], object]) -> int:
    """Run in a fork; returns its exit status as :func:`os.waitstatus_to_exitcode` gives it."""
    child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def strike(monkeypatch: pytest.MonkeyPatch, at: int, blow: Callable[[], None]) -> None:
    """Make the ``at``-th step to the disk end in ``blow``, before or after it is done."""
    count = iter(range(10**6))

    def watched(step: Callable[..., object]) -> Callable[..., object]:
        def call(*words: object, **options: object) -> object:
            if next(count) == at:
                blow()
            done = step(*words, **options)
            if next(count) == at:
                blow()
            return done

        return call

    for module, name in STEPS:
        monkeypatch.setattr(module, name, watched(getattr(module, name)))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class HereCluster:
    """One worker, this process; it notes what is left when it is disconnected from."""

    folder: Path
    actors: int = 1
    left: list[str] = field(default_factory=list)

    @contextmanager
    def connect(self) -> Iterator[HereCluster]:
        yield self
        self.left = sorted(path.name for path in self.folder.iterdir())

    def do(self, work: resumable.FileRun) -> None:
        work.do()


def test_a_run_is_over_before_it_leaves_its_cluster(
    run: Predict, whole: bytes, tmp_path: Path
) -> None:
    # which takes seconds: a kill meanwhile left a folder beside a complete table
    cluster = HereCluster(tmp_path)
    run(cluster=cluster)
    assert cluster.left == ["out.csv", "whole.csv"]
    assert (tmp_path / "out.csv").read_bytes() == whole


@pytest.mark.parametrize("later", [False, True], ids=["while adapting", "while reading"])
def test_an_interrupt_loses_nothing_that_was_done(
    run: Predict, whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: bool
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    place, name = (Reader, "batches") if later else (Predictor, "ask")
    original, calls = getattr(place, name), []

    def ask(self: Predictor, read: Any) -> Any:
        rows = original(self, read)
        calls.append(len(read.keys))
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return rows

    def batches(self: Reader, *words: Any) -> Iterator[Any]:
        for read in original(self, *words):
            if len(calls) == 2:
                signal.raise_signal(signal.SIGINT)
            calls.append(len(read.keys))
            yield read

    with monkeypatch.context() as patch:
        patch.setattr(place, name, batches if later else ask)
        with pytest.raises(KeyboardInterrupt):
            run()
    assert run().before == sum(calls) > 0
    assert (tmp_path / "out.csv").read_bytes() == whole


def test_a_full_disk_loses_nothing_that_was_done(
    run: Predict, whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PART_ROWS", 4)

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        strike(patch, 16, full)
        with pytest.raises(OSError, match="No space left"):
            run()
    assert not (tmp_path / "out.csv").exists()
    assert 0 < run().before < IMAGES
    assert (tmp_path / "out.csv").read_bytes() == whole


def test_a_state_file_is_as_exactly_once_as_the_rows(
    run: Predict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PART_ROWS", 4)
    state = tmp_path / "tda.safetensors"
    once = {"method": "tda", "state": state}
    for _ in range(2):
        run(**once, overwrite=True)
    wanted = state.read_bytes(), (tmp_path / "out.csv").read_bytes()
    for at in range(5, 29, 6):
        (tmp_path / "out.csv").unlink()
        state.unlink()
        run(**once)
        with monkeypatch.context() as patch:
            strike(patch, at, die)
            assert in_child(lambda: run(**once, overwrite=True)) == -signal.SIGKILL
        run(**once, overwrite=True)
        assert (state.read_bytes(), (tmp_path / "out.csv").read_bytes()) == wanted


def test_what_a_run_left_that_was_killed_at_its_end_is_removed(
    run: Predict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rmdir", lambda folder: die())
        assert in_child(run) == -signal.SIGKILL
    assert (tmp_path / "out.csv").exists() and (tmp_path / "out.csv.parts").exists()
    with pytest.raises(UserError, match="exists"):
        run()
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]


def test_two_processes_on_one_output_are_kept_apart(run: Predict, tmp_path: Path) -> None:
    with exclusive(tmp_path / "out.csv.parts"), pytest.raises(BusyError, match="another process"):
        run()
    assert run().images == IMAGES


@pytest.mark.parametrize("out", [None, "one.csv"])
def test_two_runs_on_one_state_are_kept_apart(
    run: Predict, tmp_path: Path, out: str | None
) -> None:
    state, refused = tmp_path / "tda.safetensors", []

    def another(*_: int) -> None:
        with pytest.raises(BusyError, match=r"tda\.safetensors"):
            run(method="tda", state=state)
        refused.append(True)

    run(method="tda", state=state, on_progress=another, out=out and tmp_path / out)
    assert refused and read_header(state)["notes"]["images"] > 0
    assert not list(tmp_path.glob(".*"))
    run(method="tda", state=state)


def test_only_the_same_command_continues(
    run: Predict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(parts, "PART_ROWS", 4)
        strike(patch, 16, die)
        in_child(run)
    for changes, what in (
        ({"seed": 1}, "seed"),
        ({"batch_size": 8}, "batch size"),
        ({"top_k": 2}, "top k"),
        ({"method": "tda"}, "method"),
        ({"reject": 0.5}, "share to reject"),
    ):
        with pytest.raises(UserError, match=f"another {what}.*--overwrite"):
            run(**changes)
    assert run(seed=1, overwrite=True).before == 0


def test_an_unknown_suffix_is_no_csv(run: Predict, tmp_path: Path) -> None:
    for shard in ((1, 1), (1, 2)):
        with pytest.raises(UserError, match=r"xlsx.*csv, jsonl, parquet"):
            run(out=tmp_path / "out.xlsx", shard=shard)
    assert not list(tmp_path.glob("out*"))
    run(out=tmp_path / "out.xlsx", file_format="csv")
    run(out=tmp_path / "table", shard=(1, 2))
    assert (tmp_path / "table.1-of-2").read_text().startswith("path,")


def test_an_existing_table_is_not_overwritten(run: Predict, tmp_path: Path) -> None:
    (tmp_path / "out.csv").write_text("mine")
    with pytest.raises(UserError, match=r"exists.*--overwrite"):
        run()
    assert (tmp_path / "out.csv").read_text() == "mine"
    run(overwrite=True)
    assert len((tmp_path / "out.csv").read_text().splitlines()) == IMAGES + 1


def test_places_that_cannot_be_written_are_refused_first(run: Predict, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for changes, match in (
        ({"out": tmp_path / "file" / "out.csv"}, "cannot write"),
        ({"method": "tda", "state": tmp_path / "file" / "x"}, "cannot write"),
        ({"out": tmp_path}, "is a folder"),
        ({"method": "tda", "state": tmp_path / "out.csv"}, "cannot be one file"),
        ({"state": tmp_path / "x"}, "belongs to one method"),
        ({"shard": (3, 2)}, "such as 2/8"),
        ({"method": ["tda", "tda"]}, "named twice"),
    ):
        with pytest.raises(UserError, match=match):
            run(**changes)


def test_shards_cover_the_list_once(run: Predict, tmp_path: Path) -> None:
    run(method="zero_shot", out=tmp_path / "all.csv")
    found: list[str] = []
    for i in (1, 2, 3):
        run(method="zero_shot", shard=(i, 3))
        found += (tmp_path / f"out.{i}-of-3.csv").read_text().splitlines()[1:]
    assert found == (tmp_path / "all.csv").read_text().splitlines()[1:]


def test_groups_share_nothing(photos: Path, tiny_clip: CLIP, tmp_path: Path) -> None:
    """Rows group by group, each with the answers and the state of a run over it alone."""
    once = {"method": "tda", "model": tiny_clip, "batch_size": 4, "workers": 0}
    lines = [f"{photos / f'{place}.png'},{'ab'[place % 3 % 2]}" for place in range(IMAGES)]
    groups = {"all": lines, **{g: [line for line in lines if line.endswith(g)] for g in "ab"}}
    found = {}
    for group, members in groups.items():
        table = tmp_path / f"{group}.csv"
        table.write_text("\n".join(["path,camera", *members]))
        changes = {"group_by": "camera", "state": tmp_path / "states"} if group == "all" else {}
        changes |= {} if group == "all" else {"state": tmp_path / f"{group}.safetensors"}
        predict(table, NAMES, out=tmp_path / f"{group}.out.csv", **once, **changes)  # type: ignore[arg-type]
        found[group] = (tmp_path / f"{group}.out.csv").read_text().splitlines()[1:]
    assert found["all"] == found["a"] + found["b"] and len(found["a"]) > 8
    for group in "ab":
        one = tmp_path / f"states/{group}.safetensors"
        assert one.read_bytes() == (tmp_path / f"{group}.safetensors").read_bytes()


def test_every_group_has_a_state_file_of_its_own(
    photos: Path, tiny_clip: CLIP, tmp_path: Path
) -> None:
    table, once = tmp_path / "table.csv", {"model": tiny_clip, "method": "tda", "workers": 0}
    once |= {"group_by": "camera", "out": tmp_path / "out.csv", "state": tmp_path / "states"}
    table.write_text(f"path,camera\n{photos / '0.png'},_\n{photos / '1.png'},\n")
    predict([table], NAMES, **once)  # type: ignore[arg-type]
    saved = [read_header(path)["notes"]["images"] for path in (tmp_path / "states").iterdir()]
    assert saved == [1, 1]
    table.write_text(f"path,camera\n{photos / '0.png'},{'x' * 300}\n")
    with pytest.raises(UserError, match="too long for the name of a state file"):
        predict([table], NAMES, overwrite=True, **once)  # type: ignore[arg-type]


def test_an_empty_shard_keeps_its_state(run: Predict, tmp_path: Path) -> None:
    state = tmp_path / "state.safetensors"
    for i in range(1, IMAGES + 1):
        run(method="tda", state=state, shard=(i, IMAGES))
    assert read_header(state)["notes"]["images"] == IMAGES - 1  # one is damaged


def test_a_folder_of_somebody_else_is_left_alone(run: Predict, tmp_path: Path) -> None:
    """Its name is that of the folder of parts."""
    inner = tmp_path / "out.csv.parts" / "inner"
    inner.mkdir(parents=True)
    (inner.parent / "notes.txt").touch()
    run()
    assert {path.name for path in inner.parent.iterdir()} == {"inner", "notes.txt"}


def test_a_run_that_ends_while_the_same_one_begins_is_not_repeated(
    run: Predict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Parts.held

    def late(self: Parts) -> AbstractContextManager[None]:
        monkeypatch.setattr(Parts, "held", held)
        run()
        return held(self)

    monkeypatch.setattr(Parts, "held", late)
    with pytest.raises(UserError, match="exists"):
        run()
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]


def test_a_run_is_given_up_as_a_whole(
    run: Predict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bytes
) -> None:
    """Killed while it removes what another run left, it leaves nothing that looks like a run."""
    monkeypatch.setattr(parts, "PART_ROWS", 4)
    with monkeypatch.context() as patch:
        strike(patch, 8, die)
        assert in_child(run) == -signal.SIGKILL
    removed, unlink = iter(range(100)), Path.unlink

    def last(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok=missing_ok)
        if next(removed) == 1:
            die()

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", last)
        assert in_child(lambda: run(seed=1, overwrite=True)) == -signal.SIGKILL
    run()
    assert (tmp_path / "out.csv").read_bytes() == whole


def test_several_methods_answer_as_each_alone(run: Predict) -> None:
    methods = ["zero_shot", "tda", "zero", "tent"]
    together = run(out=None, method=methods, top_k=2, all_probabilities=True).rows
    for method in methods:
        alone = run(out=None, method=method, top_k=2, all_probabilities=True).rows
        for one, many in zip(alone, together, strict=True):
            for column, value in one.items():
                shared = column in ("path", "error")
                assert many[column if shared else f"{method}_{column}"] == value


def test_rows_are_what_the_method_says(photos: Path, tiny_clip: CLIP) -> None:
    adapter = create_method("zero_shot", tiny_clip, NAMES)
    good = [photos / f"{place}.png" for place in range(IMAGES) if place != 5]
    expected = adapter.predict(good).probabilities
    rows = predict(photos, method=adapter, top_k=3, all_probabilities=True).rows
    assert rows[5]["error"] == "not an image in a known format" and rows[5]["prediction"] is None
    read = [row for row in rows if not row["error"]]
    assert [row["path"] for row in read] == [path.as_posix() for path in good]
    found = torch.tensor([[row[f"p_{name}"] for name in NAMES] for row in read])
    torch.testing.assert_close(found, expected, atol=SUM, rtol=0)
    assert [row["prediction"] for row in read] == [NAMES[i] for i in expected.argmax(dim=1)]
    assert all(row["probability"] >= row["probability_2"] >= row["probability_3"] for row in read)


def test_images_in_memory_and_a_model_by_name() -> None:
    run = predict(
        [Image.new("RGB", (9, 7)), np.zeros((7, 9, 3), np.uint8)], ["cat", "dog"], model="micro"
    )
    assert [row["path"] for row in run.rows] == ["0", "1"]
    assert run.rows[0]["prediction"] == run.rows[1]["prediction"]
    assert sum(run.classes["domain_norm"].values()) == 2
    with pytest.raises(UserError, match="no class names"):
        predict([Image.new("RGB", (9, 7))], model="micro")
    with pytest.raises(UserError, match="no model"):
        predict([Image.new("RGB", (9, 7))], ["cat", "dog"])
    with pytest.raises(UserError, match="needs paths"):
        predict([Image.new("RGB", (9, 7))], ["cat", "dog"], model="micro", out="x.csv")


def test_nothing_that_is_not_finite_is_written(
    run: Predict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ZeroShot._predict

    def diverge(self: ZeroShot, batch: Batch) -> Prediction:
        prediction = plain(self, batch)
        spoilt = batch.keys[-1].endswith("/11.png")
        return Prediction(prediction.logits * float("nan")) if spoilt else prediction

    with monkeypatch.context() as patch:
        patch.setattr(ZeroShot, "_predict", diverge)
        patch.setattr(parts, "PART_ROWS", 4)
        with pytest.raises(UserError, match="not finite"):
            run(method="zero_shot")
    assert not (tmp_path / "out.csv").exists()
    assert run(method="zero_shot").before == 8
    assert "nan" not in (tmp_path / "out.csv").read_text()


def test_columns_of_a_table_are_kept_and_formulas_defused(
    photos: Path, run: Predict, tiny_clip: CLIP, tmp_path: Path
) -> None:
    table = tmp_path / "list.csv"
    table.write_text(
        "camera,filepath,error,shift,prediction,input_prediction\n"
        f"=1+1,{photos / '0.png'},none,-3.5,mine,too\n@x,gone\0.png,,+y,mine,too\n",
        encoding="utf-8",
    )
    out = tmp_path / "out.csv"
    done = predict(table, NAMES, method="zero_shot", model=tiny_clip, out=out)
    assert done.images == 2 and done.skipped == 1
    rows = table_rows(out)
    assert [row["camera"] for row in rows] == ["'=1+1", "'@x"]
    assert [row["shift"] for row in rows] == ["-3.5", "'+y"]
    assert [row["input_error"] for row in rows] == ["none", ""]
    assert rows[0]["filepath"] == str(photos / "0.png") and rows[0]["prediction"] in NAMES
    assert rows[1]["error"] == "no such file" and rows[1]["prediction"] == ""
    assert rows[1]["input_prediction"] == "mine" and rows[1]["input_input_prediction"] == "too"


def test_rejection_adds_columns_and_changes_no_other(run: Predict) -> None:
    plain, rejecting = run(out=None), run(out=None, reject=0.5)
    assert plain.rejected == {}
    said = ("rejected", "rejection_score")
    added = {f"{method}_{name}" for method in ("tda", "tent") for name in said}
    for before, after in zip(plain.rows, rejecting.rows, strict=True):
        assert {name: v for name, v in after.items() if name not in added} == before
        assert added <= after.keys()
    for method, count in rejecting.rejected.items():
        assert count == sum(row[f"{method}_rejected"] or 0 for row in rejecting.rows)
        assert 0 < count < IMAGES


def test_rejections_are_those_of_the_method(photos: Path, tiny_clip: CLIP) -> None:
    readable = [path for path in sorted(photos.iterdir()) if path.name != "5.png"]
    rows = predict(readable, NAMES, model=tiny_clip, method="tent", batch_size=4, reject=0.3).rows
    adapter = create_method("tent", tiny_clip, NAMES)
    adapter.enable_rejection(0.3)
    found = [adapter.predict([Image.open(p) for p in readable[i : i + 4]]) for i in (0, 4, 8, 12)]
    rejections = [prediction.rejection for prediction in found if prediction.rejection is not None]
    scores = torch.cat([one.score for one in rejections]).tolist()
    assert [row["rejected"] for row in rows] == torch.cat([r[1] for r in rejections]).tolist()
    assert [row["rejection_score"] for row in rows] == pytest.approx(scores, abs=SUM)


def test_a_stopped_run_that_rejects_ends_as_one_that_was_not(
    run: Predict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, settings = tmp_path / "whole.csv", {"method": "tent", "reject": 0.5}
    run(**settings, out=whole, state=tmp_path / "whole.safetensors")
    monkeypatch.setattr(parts, "PART_ROWS", 4)
    with monkeypatch.context() as patch:
        strike(patch, 12, die)
        in_child(lambda: run(**settings, state=tmp_path / "state.safetensors"))
    assert (tmp_path / "out.csv.parts/run.json").exists()
    done = run(**settings, state=tmp_path / "state.safetensors")
    assert 0 < done.before < IMAGES
    assert (tmp_path / "out.csv").read_bytes() == whole.read_bytes()
    found, wanted = (load_file(tmp_path / f"{n}.safetensors") for n in ("state", "whole"))
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert found["memory.left_out_scores"].isfinite().sum() == IMAGES - 1


@pytest.mark.parametrize("reject", (None, 0.5))
def test_json_lines_and_parquet_hold_the_same(
    run: Predict, tmp_path: Path, reject: float | None
) -> None:
    run(method="zero_shot", reject=reject)
    run(method="zero_shot", reject=reject, out=tmp_path / "out.jsonl")
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    for row, wanted in zip(found, table_rows(tmp_path / "out.csv"), strict=True):
        shown = {
            name: "" if value is None else f"{value:.6f}" if isinstance(value, float) else value
            for name, value in row.items()
        }
        if row.get("rejected") is not None:
            shown["rejected"] = "true" if row["rejected"] else "false"
        assert shown == wanted
    run(method="zero_shot", reject=reject, out=tmp_path / "out.parquet")
    rows = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [{**row, "error": row["error"] or None} for row in rows] == found


def test_names_that_are_not_utf8_and_odd_files(
    photos: Path, tiny_clip: CLIP, tmp_path: Path
) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    name = os.fsdecode(b"caf\xe9.png")
    (folder / name).write_bytes((photos / "0.png").read_bytes())
    os.mkfifo(folder / "pipe.png")
    with (folder / "sparse.png").open("wb") as file:
        file.truncate(20 * 2**30)
    (folder / "photo.heic").write_bytes(b"\0\0\0\x18ftypheic" + b"\0" * 16)
    run = predict(folder, NAMES, method="zero_shot", model=tiny_clip, out=tmp_path / "out.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    by_name = {Path(row["path"]).name: row for row in rows}
    assert by_name["caf\\xe9.png"]["prediction"] in NAMES
    assert "20.0 GB" in by_name["sparse.png"]["error"]
    assert by_name["photo.heic"]["error"]
    assert run.unused == {".png": 1}  # the pipe


def listed(count: int) -> Iterator[str]:
    yield "path\n"
    yield from (f"no/such/image/{place:08d}.png\n" for place in range(count))


def test_memory_does_not_grow_with_the_list(
    tiny_clip: CLIP, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PART_ROWS", 256)
    monkeypatch.setattr(logging.getLogger("cliquetta"), "disabled", True)  # pytest keeps records
    monkeypatch.setattr(logging.getLogger("cliquetta.inference.predictor"), "disabled", True)
    peaks = []

    def collect(done: int, total: int, skipped: int) -> None:
        gc.collect()

    gc.collect()
    gc.freeze()  # with what other tests left, collections are rare, and garbage is not needed
    for count in (1_000, 5_000):
        (tmp_path / "list.csv").write_text("".join(listed(count)))
        tracemalloc.start()
        run = predict(
            tmp_path / "list.csv",
            NAMES,
            method="zero_shot",
            model=tiny_clip,
            out=tmp_path / "out.csv",
            overwrite=True,
            on_progress=collect,
        )
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert run.skipped == run.images == count
    gc.unfreeze()
    assert peaks[1] < 1.3 * peaks[0]


def test_an_unknown_way_to_decode_is_refused(tiny_clip: CLIP, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="way to decode"):
        predict(tmp_path, NAMES, model=tiny_clip, decode="quick")  # type: ignore[arg-type]


def test_features_do_not_discard_an_unfinished_run(
    run: Predict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PART_ROWS", 4)

    def stop(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(on_progress=stop)
    settings = {"text_features": np.eye(3, 8, dtype=np.float32), "method": "tda"}
    features = np.ones((4, 8), np.float32)
    with pytest.raises(UserError, match="unfinished run"):
        predict(features, ["a", "b", "c"], out=tmp_path / "out.csv", **settings)  # type: ignore[arg-type]
    assert (tmp_path / "out.csv.parts/run.json").exists()
