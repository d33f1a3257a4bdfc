"""Large sessions are written as changes: fewer bytes, the same bits, every damage noticed."""

import random
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cliquetta.model.clip import CLIP
from cliquetta.serve import changes
from cliquetta.serve.changes import apply_changes, find_changes
from tests._helpers.serve_setup import Alone, batch_of, local_service, refusal
from tests.serve.conftest import Serve

METHOD = "domain_norm"
SHAPES = {"a": (5, 3, 2), "b": (4,), "c": (), "d": (0, 3), "e": (3, 1)}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "SMALLEST", 0)


def version_files(folder: Path, session: str) -> list[Path]:
    return sorted((folder / session).iterdir())


def bits(value: Tensor) -> bytes:
    return value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
def test_changes_give_the_same_bits(seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: tuple[int, ...]) -> Tensor:
        return torch.randint(-2, 3, shape, generator=generator).to(dtype)

    before = {name: draw(shape) for name, shape in SHAPES.items()}
    now = {name: torch.where(draw(v.shape) > 1, draw(v.shape), v) for name, v in before.items()}
    if dtype.is_floating_point:
        now["a"][0, 0, 0], before["a"][0, 0, 0] = -0.0, 0.0  # equal as numbers
    rows = find_changes(now, before)
    for name in ("a", "e"):  # one vector, of however many dimensions, is one row
        width = SHAPES[name][-1]
        pairs = zip(now[name].view(-1, width), before[name].view(-1, width), strict=True)
        changed = [row for row, (one, other) in enumerate(pairs) if bits(one) != bits(other)]
        assert rows.get(f"rows.{name}", torch.zeros(0)).tolist() == changed  # and no others
        assert rows.get(f"values.{name}", torch.zeros(0, width)).shape == (len(changed), width)
    apply_changes(before, rows)
    assert all(bits(before[name]) == bits(now[name]) for name in SHAPES)


def test_a_stream_of_single_images_is_written_as_changes(
    serve: Serve, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, tiny_clip: CLIP
) -> None:
    """Restored after every image, in memory throughout, or without a service: the same."""
    options = {"step_every": 8}
    alone = Alone(tiny_clip, METHOD, **options)
    with serve() as service:
        session = service.create(METHOD, options=options)
        first = version_files(tmp_path, session)[0].stat().st_size
        for number in range(1, 21):  # more than two learning steps need
            response = service.check(session, batch_of(number, 1), alone, sequence=number)
            if number % 7 == 3:
                copy = tmp_path_factory.mktemp("copy")
                shutil.copytree(tmp_path / session, copy / session)
                with local_service(copy, tiny_clip) as restored:
                    restored.check_state(session, alone)
                    repeat = restored.predict(session, batch_of(number, 1), sequence=number)
                    assert repeat == response
        sizes = sorted(file.stat().st_size for file in version_files(tmp_path, session)[1:])
        assert len(sizes) > 1 and sum(sizes) <= 2 * first
        assert sizes[len(sizes) // 2] < first / 4
        service.check_state(session, alone)
    with serve() as service:
        service.check(session, batch_of(21, 1), alone, sequence=21)
        service.check_state(session, alone)
        assert len(version_files(tmp_path, session)) == 1  # a full version again


@pytest.fixture
def written(serve: Serve, tmp_path: Path) -> tuple[str, list[Path]]:
    """A session with some changes, and their files."""
    with serve() as service:
        session = service.create(METHOD)
        for number in range(4):
            service.predict(session, batch_of(number, 1))
    return session, version_files(tmp_path, session)[1:]


def test_damage_of_a_change_is_noticed(
    serve: Serve, tmp_path: Path, written: tuple[str, list[Path]]
) -> None:
    session, files = written

    def is_noticed() -> bool:
        with serve() as service:
            return refusal(service.send(session, batch_of(9, 1))) == (409, "damaged")

    draw = random.Random(0)
    for path in (files[0], files[-1]):
        data = path.read_bytes()
        for _ in range(4):
            damaged = bytearray(data)
            damaged[draw.randrange(8 + int.from_bytes(data[:8], "little"), len(data))] ^= 4
            path.write_bytes(damaged)
            assert is_noticed()
        path.write_bytes(data)
    first, second = (path.read_bytes() for path in files[:2])
    files[0].write_bytes(second)
    files[1].write_bytes(first)
    assert is_noticed()
    files[0].write_bytes(first)
    files[1].unlink()
    assert is_noticed()
    files[1].write_bytes(second)
    with serve(limits={"resident_sessions": 1}) as service:
        assert service.send(session, batch_of(9, 1)).status_code == 200
        service.create(METHOD)  # the first one is on disk only
        version_files(tmp_path, session)[-1].unlink()
        assert refusal(service.send(session, batch_of(9, 1))) == (409, "damaged")


def test_what_a_kill_left_is_not_read(serve: Serve, written: tuple[str, list[Path]]) -> None:
    session, files = written
    old = {path: path.read_bytes() for path in files}
    with serve() as service:
        service.predict(session, batch_of(9, 1))  # writes a full version again
    for path, data in old.items():  # killed before the versions before it were removed
        path.write_bytes(data)
    left = files[0].with_name(f".{files[0].name}.tmp")
    left.touch()
    with serve() as service:
        assert service.info(session)["sequence"] == 5
        service.predict(session, batch_of(9, 1))
    assert not left.exists() and not files[0].exists()
