"""Downloads: resumed, checked, cached, never offline, from the first source that has them."""

import hashlib
import http.server
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cliquetta.errors import UserError
from cliquetta.model.checkpoints import hub, releases
from cliquetta.model.checkpoints.hub import DownloadError, Fetcher
from cliquetta.model.checkpoints.state import CheckpointError
from cliquetta.model.factory import create_model
from cliquetta.model.preprocess import Preprocess
from tests._helpers.openai_module import OpenAIModule, bare_state, save_open_clip
from tests._helpers.transformers_models import (
    save_open_clip_siglip,
    save_siglip,
    tiny_siglip,
    tiny_transformers,
    word_tokenizer,
)

NOWHERE = "http://127.0.0.1:9"  # the discard port: nothing listens


class FileServer(http.server.ThreadingHTTPServer):
    """Files by path; hangs up after ``limit`` bytes of one."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Files)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.files: dict[str, bytes] = {}
        self.requests: list[tuple[str, str | None]] = []
        self.limit: int | None = None


class Files(http.server.BaseHTTPRequestHandler):
    """Serves the files of its server and honours ranges."""

    server: FileServer

    def do_GET(self) -> None:
        self.server.requests.append((self.path, self.headers.get("Range")))
        data = self.server.files.get(self.path)
        if data is None:
            self.send_response(404)
            repo = "/".join(self.path.split("/")[:3])
            is_known = any(known.startswith(f"{repo}/") for known in self.server.files)
            self.send_header(
                "X-Error-Code", "EntryNotFound" if is_known else "RepoNotFound"
            )
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        asked = self.headers.get("Range")
        start = (
            int(asked.removeprefix("bytes=").rstrip("-").split("-")[0]) if asked else 0
        )
        if asked and start >= len(data):
            self.send_error(416)
            return
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", "a" * 40)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data[start:][: self.server.limit])

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Any]:
    server = FileServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_download_is_resumed_checked_and_cached(server: Any, tmp_path: Path) -> None:
    data = bytes(range(256)) * 4096
    server.files["/m.pt"] = data
    url = f"{server.address}/m.pt"
    sha256 = hashlib.sha256(data).hexdigest()
    seen = []
    fetcher = Fetcher(tmp_path, on_progress=lambda *now: seen.append(now))

    # the server hangs up after 300,000 bytes, then it does not
    server.limit = 300_000
    with pytest.raises(DownloadError, match="goes on"):
        fetcher.file(url, sha256)
    server.limit = None
    path = fetcher.file(url, sha256)
    assert path.read_bytes() == data
    assert server.requests == [("/m.pt", None), ("/m.pt", "bytes=300000-")]
    assert seen[0][0] == 300_000
    assert seen[-1] == (len(data), len(data))

    # from the cache
    assert fetcher.file(url, sha256) == path
    assert len(server.requests) == 2
    assert Fetcher(tmp_path, offline=True).file(f"{NOWHERE}/m.pt", sha256) == path


def test_of_two_that_want_one_checkpoint_one_downloads_and_the_other_waits(
    server: Any, tmp_path: Path
) -> None:
    """The second begins while the first is in the middle of the file."""
    data = bytes(range(256)) * 8192  # two blocks of a mebibyte
    server.files["/m.pt"] = data
    url = f"{server.address}/m.pt"
    sha256 = hashlib.sha256(data).hexdigest()
    late = threading.Thread(
        target=Fetcher(tmp_path).file,
        args=(url, sha256),
        daemon=True,
    )

    def begin_the_other(done: int, total: int | None) -> None:
        if late.ident is None:
            late.start()
            late.join(timeout=0.5)  # enough to download it all
            assert late.is_alive(), "the second did not wait for the first"

    path = Fetcher(tmp_path, on_progress=begin_the_other).file(url, sha256)
    late.join(timeout=30)
    assert not late.is_alive()
    assert server.requests == [("/m.pt", None)]
    assert path.read_bytes() == data


def test_a_damaged_download_is_not_cached(server: Any, tmp_path: Path) -> None:
    server.files["/m.pt"] = b"other"
    url = f"{server.address}/m.pt"
    with pytest.raises(DownloadError, match="SHA-256"):
        Fetcher(tmp_path).file(url, "0" * 64)

    # neither the file nor a part of it is kept
    assert not list(tmp_path.rglob("m.pt"))
    assert not list(tmp_path.rglob("*.pt*.part"))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """No downloads of the machine's own user are seen."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", NOWHERE)
    for proxy in (
        "http_proxy",
        "https_proxy",
        "all_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
    ):
        monkeypatch.delenv(proxy, raising=False)
    monkeypatch.setattr(
        releases, "address", lambda name: (f"{NOWHERE}/ViT-B-16.pt", "0" * 64)
    )
    sources = (
        "timm/vit_base_patch16",
        "openai/clip-vit-base-patch16",
        f"{NOWHERE}/ViT-B-16.pt",
    )
    start = time.monotonic()
    for name, mentioned in (("ViT-B/16", sources), ("hf:a/b", ("a/b",))):
        with pytest.raises(DownloadError) as error:
            create_model(name, cache_dir=tmp_path)
        assert all(word in str(error.value) for word in mentioned)
        assert "\n" not in str(error.value)
        assert error.value.__cause__ is None
        assert error.value.__context__ is None or error.value.__suppress_context__
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("variable", [None, "CLIQUETTA_OFFLINE", "HF_HUB_OFFLINE"])
@pytest.mark.parametrize(
    "name", ["ViT-B/16", "hf:a/b", "open_clip:ViT-B-16/openai", "hf-hub:a/b"]
)
def test_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, variable: Any
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("offline means offline")

    monkeypatch.setattr("socket.create_connection", refuse)
    if variable is not None:
        monkeypatch.setenv(variable, "1")
    with pytest.raises(DownloadError, match="switched off"):
        create_model(name, cache_dir=tmp_path, offline=variable is None)


@pytest.fixture
def hub_server(server: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The Hugging Face client pointed at the local server."""
    hub._is_reachable.cache_clear()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.address)
    template = server.address + "/{repo_id}/resolve/{revision}/{filename}"
    for module in (
        "constants",
        "file_download",
    ):  # older releases keep a copy in the second
        name = f"huggingface_hub.{module}.HUGGINGFACE_CO_URL_TEMPLATE"
        monkeypatch.setattr(name, template, raising=False)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    return server


def files_of(repo: str, folder: Path) -> dict[str, bytes]:
    """A folder as a repository: contents by address."""
    return {
        f"/{repo}/resolve/main/{path.name}": path.read_bytes()
        for path in folder.iterdir()
    }


def test_hub_repositories(hub_server: Any, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    tiny_transformers().save_pretrained(tmp_path / "clip")
    save_open_clip(bare_state(OpenAIModule(activation="gelu")), tmp_path / "open")
    for name in ("clip", "open"):
        hub_server.files |= files_of(f"owner/{name}", tmp_path / name)
    for name in ("hf:owner/clip", "hf-hub:owner/open"):
        model = create_model(name, cache_dir=cache)
        assert model.id == name
        local = create_model(tmp_path / name.partition("/")[2])
        assert model.fingerprint == local.fingerprint
        assert model.config == local.config
        offline = create_model(name, cache_dir=cache, offline=True)
        assert offline.fingerprint == model.fingerprint
    with pytest.raises(CheckpointError, match="hf-hub:owner/open"):
        create_model("hf:owner/open", cache_dir=cache)


def test_hub_repositories_of_siglip(hub_server: Any, tmp_path: Path) -> None:
    """Tokenizer files come from the repository, or from the one that its config names."""
    # older ones have another SiglipConfig
    pytest.importorskip("transformers", minversion="5")
    theirs = tiny_siglip()
    (tmp_path / "words").mkdir()
    word_tokenizer(tmp_path / "words" / "tokenizer.json")
    folder = save_open_clip_siglip(theirs, tmp_path / "open", "owner/words")
    hub_server.files = files_of("owner/siglip", save_siglip(theirs, tmp_path / "hf"))
    hub_server.files |= files_of("owner/open", folder)
    hub_server.files |= files_of("owner/words", tmp_path / "words")
    cache = tmp_path / "cache"
    first = create_model("hf:owner/siglip", cache_dir=cache)
    second = create_model("hf-hub:owner/open", cache_dir=cache)
    assert first.fingerprint == second.fingerprint
    assert first.tokenizer(["the cat"]).equal(second.tokenizer(["the cat"]))
    offline = create_model("hf-hub:owner/open", cache_dir=cache, offline=True)
    assert offline.tokenizer(["the cat"]).equal(second.tokenizer(["the cat"]))


@pytest.mark.parametrize("name", ["hf:owner/siglip", "hf-hub:owner/open"])
def test_a_missing_extra_is_named_before_weights_are_downloaded(
    hub_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pytest.importorskip("transformers", minversion="5")
    hub_server.files = files_of(
        "owner/siglip", save_siglip(tiny_siglip(), tmp_path / "hf")
    )
    folder = save_open_clip_siglip(tiny_siglip(), tmp_path / "open")
    hub_server.files |= files_of("owner/open", folder)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"cliquetta\[siglip\]"):
        create_model(name, cache_dir=tmp_path / "cache")
    assert not any("safetensors" in path for path, _ in hub_server.requests)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Files of each source of ``ViT-B/16``, by address, and the model that is in them."""
    folder = tmp_path_factory.mktemp("sources")
    timm = folder / "timm"
    save_open_clip(bare_state(OpenAIModule(seed=1)), timm, quick_gelu=True)
    of_timm = files_of("timm/vit_base_patch16_clip_224.openai", timm)

    hub = folder / "hub"
    tiny_transformers().save_pretrained(hub)
    of_hub = files_of("openai/clip-vit-base-patch16", hub)

    original = folder / "ViT-B-16.pt"
    torch.save(OpenAIModule(seed=3).state_dict(), original)
    of_openai = {"/ViT-B-16.pt": original.read_bytes()}
    return [
        (of_timm, create_model(timm)),
        (of_hub, create_model(hub)),
        (of_openai, create_model(original)),
    ]


@pytest.fixture
def openai_server(
    hub_server: Any, sources: Any, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Hub and OpenAI's address on the local server; ``ViT-B/16`` is small, and not there yet."""
    usual = releases.ARCHITECTURES["ViT-B-16"]
    small = replace(usual, width=128, patch_size=8)
    monkeypatch.setitem(releases.ARCHITECTURES, "ViT-B-16", small)
    (data,) = sources[2][0].values()
    sha256 = hashlib.sha256(data).hexdigest()
    location = (f"{hub_server.address}/ViT-B-16.pt", sha256)
    monkeypatch.setattr(releases, "address", lambda name: location)
    return hub_server


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_the_first_source(
    openai_server: Any, sources: Any, tmp_path: Path, gone: int
) -> None:
    for files, _ in sources[gone:]:
        openai_server.files |= files
    _, wanted = sources[gone]
    cache = tmp_path / "cache"
    model = create_model("ViT-B/16", cache_dir=cache)
    assert model.id == "openai:ViT-B/16"
    assert model.fingerprint == wanted.fingerprint
    assert model.config == wanted.config
    assert model.preprocess == Preprocess.openai(32)

    # what was downloaded stays
    openai_server.files.clear()
    same = create_model("openai:ViT-B/16", cache_dir=cache, offline=True)
    assert same.fingerprint == model.fingerprint


@pytest.mark.usefixtures("openai_server")
def test_the_cache_of_openais_package_is_used(
    sources: Any, home: Any, tmp_path: Path
) -> None:
    files, wanted = sources[2]
    cached = home / ".cache" / "clip" / "ViT-B-16.pt"
    cached.parent.mkdir(parents=True)
    data = files["/ViT-B-16.pt"]
    cached.write_bytes(data)
    model = create_model("ViT-B/16", cache_dir=tmp_path / "cache", offline=True)
    assert model.fingerprint == wanted.fingerprint

    cached.write_bytes(data[:-1000])  # a download that was cut off
    with pytest.raises(DownloadError, match="cache"):
        create_model("ViT-B/16", cache_dir=tmp_path / "cache", offline=True)
