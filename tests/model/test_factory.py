"""Names, devices, dtypes and the network: every wrong one is answered in one sentence."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from cliquetta.data.bundled import load_bundled
from cliquetta.errors import UnknownNameError, UserError
from cliquetta.model import factory
from cliquetta.model.checkpoints import hub, open_clip_zoo, openai
from cliquetta.model.checkpoints.hub import DownloadError, Fetcher
from cliquetta.model.checkpoints.native import save_model
from cliquetta.model.checkpoints.state import CheckpointError
from cliquetta.model.clip import CLIP
from cliquetta.model.factory import create_model, list_models, pick_device, pick_dtype
from cliquetta.model.preprocess import Preprocess
from tests._helpers.openai_module import OpenAIModule, bare_state
from tests._helpers.siglip import save_open_clip_siglip, save_siglip, tiny_siglip, word_tokenizer

NOWHERE = "http://127.0.0.1:9"  # the discard port: nothing listens


def test_the_bundled_model_says_once_what_it_is_for(caplog: pytest.LogCaptureFixture) -> None:
    factory._note_micro.cache_clear()
    for _ in range(2):
        create_model("micro")
    assert [record.getMessage() for record in caplog.records] == [factory.MICRO_NOTE]


def test_micro_is_bundled_and_works() -> None:
    model = create_model("micro")
    assert model.id == "micro" and model.image_size == 32
    assert model.capabilities >= {"text", "visual-prefix"}
    bundled = load_bundled()
    pixels = model.preprocess.pixels(bundled.images[::20])
    texts = model.encode_text([f"a photo of a {n}." for n in bundled.names], normalize=True)
    answers = (model.encode_image(pixels, normalize=True) @ texts.T).argmax(dim=1)
    assert (answers == torch.tensor(bundled.labels[::20])).float().mean() > 0.75


def test_the_list_of_models() -> None:
    entries = list_models()
    names = [entry.name for entry in entries]
    assert names[0] == "micro" and entries[0].is_bundled
    assert {"openai:ViT-B/16", "openai:RN50", "hf:openai/clip-vit-base-patch16"} <= set(names)
    assert "open_clip:ViT-B-16/laion2b_s34b_b88k" in names
    assert len(set(names)) == len(names)
    found = {entry.name: entry for entry in list_models("openai:*")}
    assert len(found) == 9
    assert found["openai:ViT-L/14@336px"].image_size == 336
    assert not found["openai:RN50x4"].is_vit and found["openai:ViT-B/32"].is_vit


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("micr", "micro"),
        ("ViT-B/17", "ViT-B/16"),
        ("openai:ViT-B16", "ViT-B/16"),
        ("open_clip:ViT-B-17/openai", "ViT-B-16"),
        ("open_clip:ViT-B-16/laion2b_s34b", "laion2b_s34b_b88k"),
    ],
)
def test_unknown_names(name: str, nearest: str) -> None:
    with pytest.raises(UnknownNameError, match=f"did you mean '{nearest}'"):
        create_model(name)


@pytest.mark.parametrize("name", ["./no.pt", "no.safetensors", "/no/such/folder"])
def test_missing_paths(name: str) -> None:
    with pytest.raises(CheckpointError, match="no such file or folder"):
        create_model(name)


def test_folders_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no .safetensors or .pt file"):
        create_model(tmp_path)
    for name in ("a.pt", "b.pt"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match="2 pickled files: name one"):
        create_model(tmp_path)
    with pytest.raises(CheckpointError, match=r"give one .pt file"):
        create_model([tmp_path / "a.pt", tmp_path / "b.pt"])
    with pytest.raises(CheckpointError, match="no files"):
        create_model([])


def test_devices_and_dtypes(tiny_clip: CLIP, tmp_path: Path) -> None:
    save_model(tiny_clip, tmp_path / "m.safetensors")
    assert pick_device("auto").type in {"cpu", "cuda", "mps"}
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_dtype("bf16") is torch.bfloat16 and pick_dtype(torch.float16) is torch.float16
    model = create_model(tmp_path / "m.safetensors", device="cpu", dtype="fp16")
    assert model.dtype == torch.float16 and model.device.type == "cpu"
    with pytest.raises(UnknownNameError, match="did you mean 'bf16'"):
        create_model("micro", dtype="bf1")
    with pytest.raises(UnknownNameError, match="did you mean 'gelu'"):
        create_model("micro", activation="gelo")  # type: ignore[arg-type]
    other = create_model(tmp_path / "m.safetensors", activation="gelu")
    assert other.config.vision.activation == other.config.text.activation == "gelu"


# The network


class FileServer(http.server.ThreadingHTTPServer):
    """Files by path; hangs up after ``limit`` bytes of one."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Files)
        self.files: dict[str, bytes] = {}
        self.requests: list[tuple[str, str | None]] = []
        self.limit: int | None = None


class Files(http.server.BaseHTTPRequestHandler):
    """Serves the files of its server and honours ranges."""

    server: FileServer

    def do_HEAD(self) -> None:
        self.reply(body=False)

    def do_GET(self) -> None:
        self.reply(body=True)

    def reply(self, body: Any) -> None:
        self.server.requests.append((self.path, self.headers.get("Range")))
        data = self.server.files.get(self.path)
        if data is None:
            self.send_response(404)
            repo = "/".join(self.path.split("/")[:3])
            if any(known.startswith(f"{repo}/") for known in self.server.files):
                self.send_header("X-Error-Code", "EntryNotFound")
            else:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        asked = self.headers.get("Range")
        start = int(asked.removeprefix("bytes=").rstrip("-").split("-")[0]) if asked else 0
        if asked and start >= len(data):
            self.send_error(416)
            return
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", "a" * 40)
        self.end_headers()
        if body:
            self.wfile.write(data[start:][: self.server.limit])

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


@pytest.fixture
def address(server: Any) -> Any:
    return f"http://127.0.0.1:{server.server_port}"


def test_a_download_is_resumed_checked_and_kept(server: Any, address: Any, tmp_path: Path) -> None:
    data = bytes(range(256)) * 4096
    server.files["/m.pt"] = data
    sha256 = hashlib.sha256(data).hexdigest()
    seen = []
    fetcher = Fetcher(tmp_path, on_progress=lambda done, total: seen.append((done, total)))
    server.limit = 300_000
    with pytest.raises(DownloadError, match=r"goes on where it stopped"):
        fetcher.file(f"{address}/m.pt", sha256)
    server.limit = None
    path = fetcher.file(f"{address}/m.pt", sha256)
    assert path.read_bytes() == data
    assert server.requests == [("/m.pt", None), ("/m.pt", "bytes=300000-")]
    assert seen[-1] == (len(data), len(data)) and seen[0][0] == 300_000
    assert fetcher.file(f"{address}/m.pt", sha256) == path
    assert len(server.requests) == 2  # from the cache
    assert Fetcher(tmp_path, offline=True).file(f"{NOWHERE}/m.pt", sha256) == path


def test_a_damaged_download_is_not_kept(server: Any, address: Any, tmp_path: Path) -> None:
    server.files["/m.pt"] = b"other"
    with pytest.raises(DownloadError, match="SHA-256 differs"):
        Fetcher(tmp_path).file(f"{address}/m.pt", "0" * 64)
    assert not list(tmp_path.rglob("*.pt*.part")) and not list(tmp_path.rglob("m.pt"))


def one_sentence(error: Any) -> None:
    """No newline, and no chain of other exceptions behind it."""
    assert "\n" not in str(error.value)
    assert error.value.__cause__ is None
    assert error.value.__context__ is None or error.value.__suppress_context__


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """No downloads of the machine's own user are found."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", NOWHERE)
    for proxy in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(proxy, raising=False)
    monkeypatch.setattr(openai, "address", lambda name: (f"{NOWHERE}/ViT-B-16.pt", "0" * 64))
    with pytest.raises(DownloadError, match="none of its sources answers") as error:
        create_model("ViT-B/16", cache_dir=tmp_path)
    one_sentence(error)
    for source in ("timm/vit_base_patch16_clip_224.openai (", "openai/clip-vit-base-patch16 ("):
        assert source in str(error.value)
    assert f"{NOWHERE}/ViT-B-16.pt (" in str(error.value)
    assert "give the path of the file: openai:PATH/ViT-B-16.pt" in str(error.value)
    start = time.monotonic()
    with pytest.raises(DownloadError, match="cannot reach the Hugging Face hub for a/b") as error:
        create_model("hf:a/b", cache_dir=tmp_path)
    one_sentence(error)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("variable", [None, "CLIQUETTA_OFFLINE", "HF_HUB_OFFLINE"])
@pytest.mark.parametrize("name", ["ViT-B/16", "hf:a/b", "open_clip:ViT-B-16/openai", "hf-hub:a/b"])
def test_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, variable: Any) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("offline means offline")

    monkeypatch.setattr("socket.create_connection", refuse)
    if variable is not None:
        monkeypatch.setenv(variable, "1")
    with pytest.raises(DownloadError, match="network is switched off") as error:
        create_model(name, cache_dir=tmp_path, offline=variable is None)
    assert "\n" not in str(error.value)


@pytest.fixture
def hub_server(server: Any, address: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The Hugging Face client pointed at the local server."""
    hub._answers.cache_clear()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    for module in ("constants", "file_download"):  # older releases keep a copy in the second
        monkeypatch.setattr(
            f"huggingface_hub.{module}.HUGGINGFACE_CO_URL_TEMPLATE",
            address + "/{repo_id}/resolve/{revision}/{filename}",
            raising=False,
        )
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    return server


def serve(server: Any, repo: Any, folder: Path) -> None:
    for path in folder.iterdir():
        server.files[f"/{repo}/resolve/main/{path.name}"] = path.read_bytes()


def test_hub_repository_of_transformers(hub_server: Any, tmp_path: Path) -> None:
    tiny_transformers().save_pretrained(tmp_path / "source")
    serve(hub_server, "owner/clip", tmp_path / "source")
    model = create_model("hf:owner/clip", cache_dir=tmp_path / "cache")
    assert model.id == "hf:owner/clip"
    assert model.fingerprint == create_model(tmp_path / "source").fingerprint
    offline = create_model("hf:owner/clip", cache_dir=tmp_path / "cache", offline=True)
    assert offline.fingerprint == model.fingerprint


def test_hub_repository_of_open_clip(hub_server: Any, tmp_path: Path) -> None:
    module = OpenAIModule(activation="gelu")
    source = tmp_path / "source"
    source.mkdir()
    save_file(bare_state(module), source / "open_clip_model.safetensors")
    sizes = {"vision_cfg": {"width": 128}, "text_cfg": {}, "embed_dim": 24}
    (source / "open_clip_config.json").write_text(json.dumps({"model_cfg": sizes}))
    serve(hub_server, "owner/open", source)
    model = create_model("hf-hub:owner/open", cache_dir=tmp_path / "cache")
    assert model.config.vision.activation == "gelu"
    with pytest.raises(CheckpointError, match=r"has no config.json: try hf-hub:owner/open"):
        create_model("hf:owner/open", cache_dir=tmp_path / "cache")


NEW_TRANSFORMERS = pytest.mark.skipif(
    transformers.__version__ < "5", reason="older ones have another SiglipConfig"
)


@NEW_TRANSFORMERS
def test_hub_repositories_of_siglip(hub_server: Any, tmp_path: Path) -> None:
    """Tokenizer files come from the repository, or from the one that its config names."""
    theirs = tiny_siglip()
    serve(hub_server, "owner/siglip", save_siglip(theirs, tmp_path / "hf"))
    serve(hub_server, "owner/open", save_open_clip_siglip(theirs, tmp_path / "open", "owner/words"))
    (tmp_path / "words").mkdir()
    word_tokenizer(tmp_path / "words" / "tokenizer.json")
    serve(hub_server, "owner/words", tmp_path / "words")
    cache = tmp_path / "cache"
    first = create_model("hf:owner/siglip", cache_dir=cache)
    second = create_model("hf-hub:owner/open", cache_dir=cache)
    assert first.fingerprint == second.fingerprint
    assert first.tokenizer(["the cat"]).equal(second.tokenizer(["the cat"]))
    offline = create_model("hf-hub:owner/open", cache_dir=cache, offline=True)
    assert offline.tokenizer(["the cat"]).equal(second.tokenizer(["the cat"]))


@NEW_TRANSFORMERS
@pytest.mark.parametrize("name", ["hf:owner/siglip", "hf-hub:owner/open"])
def test_a_missing_extra_is_said_before_weights_are_downloaded(
    hub_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    serve(hub_server, "owner/siglip", save_siglip(tiny_siglip(), tmp_path / "hf"))
    serve(hub_server, "owner/open", save_open_clip_siglip(tiny_siglip(), tmp_path / "open"))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"pip install 'cliquetta\[siglip\]'"):
        create_model(name, cache_dir=tmp_path / "cache")
    assert not any("safetensors" in path for path, _ in hub_server.requests)


# OpenAI's names


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each source of ``ViT-B/16`` serves, by address, and the model that is in it."""
    folder = tmp_path_factory.mktemp("sources")
    timm, hub = folder / "timm", folder / "hub"
    timm.mkdir()
    save_file(bare_state(OpenAIModule(seed=1)), timm / "open_clip_model.safetensors")
    config = {"model_cfg": {"embed_dim": 24, "quick_gelu": True, "vision_cfg": {"width": 128}}}
    (timm / "open_clip_config.json").write_text(json.dumps(config))
    tiny_transformers().save_pretrained(hub)
    torch.save(OpenAIModule(seed=3).state_dict(), folder / "ViT-B-16.pt")
    repos = {timm: "timm/vit_base_patch16_clip_224.openai", hub: "openai/clip-vit-base-patch16"}
    return [
        (
            {f"/{repo}/resolve/main/{path.name}": path.read_bytes() for path in place.iterdir()},
            create_model(place),
        )
        for place, repo in repos.items()
    ] + [
        (
            {"/ViT-B-16.pt": (folder / "ViT-B-16.pt").read_bytes()},
            create_model(folder / "ViT-B-16.pt"),
        )
    ]


def tiny_transformers() -> Any:
    """A random ``CLIPModel`` of one block per tower."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 2}
    vision = shape | {"image_size": 32, "patch_size": 16}
    config = transformers.CLIPConfig(text_config=shape, vision_config=vision, projection_dim=16)
    return transformers.CLIPModel(config)


@pytest.fixture
def openai_server(
    hub_server: Any, address: Any, sources: Any, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Hub and OpenAI's address on the local server; ``ViT-B/16`` is small, and not there yet."""
    small = replace(open_clip_zoo.ARCHITECTURES["ViT-B-16"], width=128, patch_size=8)
    monkeypatch.setitem(open_clip_zoo.ARCHITECTURES, "ViT-B-16", small)
    (data,) = sources[2][0].values()
    place = (f"{address}/ViT-B-16.pt", hashlib.sha256(data).hexdigest())
    monkeypatch.setattr(openai, "address", lambda name: place)
    return hub_server


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_an_openai_name_loads_from_the_first_source_that_answers(
    openai_server: Any, sources: Any, tmp_path: Path, gone: int
) -> None:
    for files, _ in sources[gone:]:
        openai_server.files |= files
    model = create_model("ViT-B/16", cache_dir=tmp_path / "cache")
    wanted = sources[gone][1]
    assert model.id == "openai:ViT-B/16"
    assert model.fingerprint == wanted.fingerprint and model.config == wanted.config
    assert model.preprocess == Preprocess.openai(32)
    openai_server.files.clear()
    same = create_model("openai:ViT-B/16", cache_dir=tmp_path / "cache", offline=True)
    assert same.fingerprint == model.fingerprint


@pytest.mark.usefixtures("openai_server")
def test_the_cache_of_openais_package_is_used(sources: Any, home: Any, tmp_path: Path) -> None:
    files, wanted = sources[2]
    place = home / ".cache" / "clip" / "ViT-B-16.pt"
    place.parent.mkdir(parents=True)
    place.write_bytes(files["/ViT-B-16.pt"])
    model = create_model("ViT-B/16", cache_dir=tmp_path / "cache", offline=True)
    assert model.fingerprint == wanted.fingerprint
    place.write_bytes(files["/ViT-B-16.pt"][:-1000])  # a download that was cut off
    with pytest.raises(DownloadError, match="not in a cache"):
        create_model("ViT-B/16", cache_dir=tmp_path / "cache", offline=True)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_that_the_cpu_lacks_is_warned_of(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factory, "computes_in", lambda kind: kind is torch.float32)
    with pytest.warns(UserWarning, match=r"no b?float16 arithmetic .* use --dtype fp32"):
        create_model("micro", dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        create_model("micro")


def test_half_precision_of_a_cpu_limited_to_avx2() -> None:
    """In a process of its own: torch asks for the instructions once."""
    program = "import torch; from cliquetta.model.factory import computes_in as c; "
    program += "print(c(torch.float32), c(torch.bfloat16), c(torch.float16))"
    limited = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    done = subprocess.run([sys.executable, "-c", program], env=limited, capture_output=True)
    assert done.stdout.decode().split() == ["True", "False", "False"], done.stderr.decode()
