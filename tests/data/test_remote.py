"""Files behind URLs: a network that fails, and paths that count from a folder."""

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from cliquetta.data.images import ImageError
from cliquetta.data.remote import (
    Member,
    expand_glob,
    fetch_image,
    join_url,
    naming,
    open_listed,
    open_named,
    read_listed,
    read_location,
    require_exists,
)
from cliquetta.errors import UserError
from tests._helpers.trees import encoded


@pytest.fixture
def bucket() -> Iterator[str]:
    """Three files in fsspec's memory."""
    store = fsspec.filesystem("memory")
    for number, data in enumerate((encoded(0), b"__" + encoded(1), b"damaged")):
        store.pipe(f"/bucket/{number}.png", data)
    yield "memory://bucket"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def test_a_failing_network_is_tried_again(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = MemoryFileSystem.cat_file
    calls = []

    def fail_twice(self: Any, *words: Any, **options: Any) -> bytes:
        calls.append(words)
        if len(calls) < 3:
            raise TimeoutError("slow")
        return bytes(plain(self, *words, **options))

    monkeypatch.setattr("cliquetta.data.remote.time.sleep", lambda seconds: None)
    monkeypatch.setattr(MemoryFileSystem, "cat_file", fail_twice)
    assert read_location(f"{bucket}/2.png") == b"damaged"
    assert len(calls) == 3


def test_a_part_of_a_file_is_read(bucket: str) -> None:
    assert read_location(f"{bucket}/2.png", offset=1, size=3) == b"ama"


def test_an_image_of_a_url_or_inside_of_a_file(bucket: str) -> None:
    assert open_listed(f"{bucket}/0.png").getpixel((0, 0)) == (0, 0, 0)
    inside = Member(f"{bucket}/1.png", 2, len(encoded(1)))
    image = open_named(read_listed("x.png", inside), "x.png")
    assert image.getpixel((0, 0)) == (1, 1, 1)
    for path in (f"{bucket}/2.png", f"{bucket}/9.png"):
        with pytest.raises(ImageError, match=path):
            open_listed(path)


def test_what_is_not_there_is_named(bucket: str) -> None:
    assert expand_glob(f"{bucket}/[01].png") is None  # brackets belong to names
    assert expand_glob(f"{bucket}/*.png") == [
        f"memory:///bucket/{n}.png" for n in range(3)
    ]
    require_exists(f"{bucket}/0.png")
    for refuse, missing in ((require_exists, "9.png"), (expand_glob, "*.jpg")):
        with pytest.raises(UserError, match="bucket"):
            refuse(f"{bucket}/{missing}")
    with pytest.raises(OSError, match=f"{bucket}/x"), naming(f"{bucket}/x"):
        raise RuntimeError("closed")


def test_paths_in_a_table_count_from_its_folder() -> None:
    assert join_url("s3://bucket/lists", "a/b.png") == "s3://bucket/lists/a/b.png"
    assert join_url("s3://bucket/lists", "../b.png") == "s3://bucket/b.png"
    assert join_url("s3://bucket/lists", "gs://other/b.png") == "gs://other/b.png"


class EndlessImage(BaseHTTPRequestHandler):
    """A reply that does not say how long it is."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        for _ in range(100):
            try:
                self.wfile.write(b"x" * 1000)
            except OSError:  # nobody reads on
                return

    def log_message(self, *_: Any) -> None:
        pass


def test_an_image_of_unknown_size_is_given_up_when_it_is_too_large() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), EndlessImage)
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}/image.png"
    with pytest.raises(ImageError, match="too large"):
        fetch_image(address, max_bytes=99_999)
    assert len(fetch_image(address, max_bytes=100_000)) == 100_000
    server.shutdown()
    server.server_close()
