"""Files from the network: only when asked for, resumable, checked, cached, and never offline."""

import hashlib
import os
import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from filelock import FileLock

from cliquetta.errors import first_line
from cliquetta.model.checkpoints.state import CheckpointError

_BLOCK = 1 << 20
_TRUE = {"1", "true", "yes", "on"}


class DownloadError(ConnectionError):
    """File that is not here and cannot be downloaded; ``reason`` is the cause without remedy."""

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason or message


@dataclass(frozen=True)
class Fetcher:
    """Fetches files of the hub: cache folder, and whether the network may be used."""

    # `None`: `$CLIQUETTA_CACHE` or `~/.cache/cliquetta`; files of the hub in its
    # own.
    cache_dir: Path | None = None
    # Also set by `CLIQUETTA_OFFLINE=1` or `HF_HUB_OFFLINE=1`.
    offline: bool = False
    # Bytes so far, and in total.
    on_progress: Callable[[int, int | None], None] | None = None

    def cached_file(self, url: str, sha256: str) -> Path | None:
        """Return the file at ``url`` if we, or OpenAI's ``clip`` package, downloaded it before."""
        path = self._path(url, sha256)
        if path.exists():
            return path
        theirs = Path.home() / ".cache" / "clip" / path.name
        return theirs if theirs.exists() and _sha256(theirs) == sha256 else None

    def file(self, url: str, sha256: str) -> Path:
        """Return the file at ``url``, from the cache if it is there."""
        path = self._path(url, sha256)
        if path.exists():
            return path
        if self.is_offline:
            raise DownloadError(
                f"{path.name} is not in the cache ({path.parent}) and {_OFFLINE}"
            )
        path.parent.mkdir(parents=True, exist_ok=True)

        # One process downloads; others wait, and find the file.
        part = path.with_name(path.name + ".part")
        with FileLock(path.with_name(path.name + ".lock")):
            if path.exists():  # another process was faster
                return path
            try:
                _resume(url, part, self.on_progress)
            except OSError as error:
                raise DownloadError(
                    f"cannot download {url} ({_reason(error)}); check the network and run again "
                    "(it goes on where it stopped), or give the path of a local file",
                    _reason(error),
                ) from None
            if _sha256(part) != sha256:
                part.unlink()
                raise DownloadError(
                    f"{url} arrived damaged (its SHA-256 differs); run again"
                )
            part.replace(path)
        return path

    def hub_file(
        self, repo: str, name: str, revision: str | None = None
    ) -> Path | None:
        """Return file ``name`` of a Hugging Face repository; ``None`` if there is none."""
        from huggingface_hub import constants, errors, hf_hub_download

        local = self.is_offline or not _is_reachable(constants.ENDPOINT)
        try:
            path = hf_hub_download(
                repo,
                name,
                revision=revision,
                cache_dir=self.cache_dir,
                local_files_only=local,
            )
        except errors.LocalEntryNotFoundError:
            cache = Path(self.cache_dir or constants.HF_HUB_CACHE)
            if local and (cache / f"models--{repo.replace('/', '--')}").exists():
                # The repository is cached, so it is this file that it lacks.
                return None
            if self.is_offline:
                raise DownloadError(
                    f"{repo} is not in the cache and {_OFFLINE}"
                ) from None
            raise DownloadError(
                f"cannot reach the Hugging Face hub for {repo}; check the network, or give the "
                "path of a local folder",
                "the Hugging Face hub cannot be reached",
            ) from None
        except errors.EntryNotFoundError:
            return None
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
            at = f" at revision {revision}" if revision else ""
            message = f"no repository {repo}{at} on the Hugging Face hub, or it is private or gated"
            raise CheckpointError(message) from None
        except errors.HFValidationError:
            raise CheckpointError(
                f"{repo!r} is not a repository name: write owner/name"
            ) from None
        # The client's transport, and so its errors, vary by release.
        except Exception as error:
            raise DownloadError(
                f"cannot download {name} of {repo} ({_reason(error)}); check the network and run "
                "again (it goes on where it stopped)",
                _reason(error),
            ) from None
        return Path(path)

    def _path(self, url: str, sha256: str) -> Path:
        """Return the place of a file in the cache."""
        folder = self.cache_dir or os.environ.get("CLIQUETTA_CACHE")
        if not folder:
            base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
            folder = Path(base) / "cliquetta"
        return Path(folder) / sha256[:12] / url.rsplit("/", 1)[1]

    @property
    def is_offline(self) -> bool:
        """Whether the network must not be used."""
        if self.offline:
            return True
        switches = ("CLIQUETTA_OFFLINE", "HF_HUB_OFFLINE")
        return any(os.environ.get(name, "").lower() in _TRUE for name in switches)


_OFFLINE = (
    "the network is switched off (offline=True, CLIQUETTA_OFFLINE or HF_HUB_OFFLINE)"
)


@lru_cache(maxsize=4)
def _is_reachable(endpoint: str) -> bool:
    """Whether the hub's host takes connections: its client would retry for half a minute."""
    if urllib.request.getproxies():  # then only the proxy knows
        return True
    address = urllib.parse.urlsplit(endpoint)
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), timeout=10).close()
    except OSError:
        return False
    return True


def _resume(
    url: str, part: Path, on_progress: Callable[[int, int | None], None] | None
) -> None:
    """Fetch ``url`` into ``part``, from where an earlier attempt stopped."""
    done = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "cliquetta"})
    if done:
        request.add_header("Range", f"bytes={done}-")
    try:
        response = urllib.request.urlopen(request, timeout=30)
    except urllib.error.HTTPError as error:
        # Nothing is left to fetch; the hash says whether it is right.
        if error.code == 416:
            return
        raise
    with response:
        # A server may ignore the range and start again.
        resumed = response.status == 206
        if not resumed:
            done = 0
        length = response.headers.get("Content-Length")
        total = done + int(length) if length else None
        with part.open("ab" if resumed else "wb") as file:
            while block := response.read(_BLOCK):
                file.write(block)
                done += len(block)
                if on_progress is not None:
                    on_progress(done, total)
    if total is not None and done < total:
        raise ConnectionError(f"the connection ended after {done} of {total} bytes")


def _sha256(path: Path) -> str:
    """Hash a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _reason(error: BaseException) -> str:
    """Return the first line of an error, or of its reason."""
    return first_line(getattr(error, "reason", None) or error)
