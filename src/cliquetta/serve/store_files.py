"""Files of session versions, each created once, in a folder or a bucket."""

import errno
import math
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from cliquetta.atomic import create_atomically, exclusive, sync_folder
from cliquetta.data.remote import is_url
from cliquetta.errors import UserError

# protocols of fsspec that can create an object only if there is none, in one step
_BUCKETS = ("s3", "s3a", "gs", "gcs", "memory")
_LONGEST_HEAD = 10**8  # of a safetensors file


class _Folder:
    """A local or mounted folder; it must know hard links, and show what others wrote at once."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Prepare for a service, and lock out others."""
        self._root.mkdir(parents=True, exist_ok=True)
        self._root.chmod(0o700)  # class names and responses are the clients' own
        with exclusive(self._root):
            for left in self._root.glob("*/.*.tmp"):  # of processes that were killed
                left.unlink()
            self._check_links()
            yield

    def _check_links(self) -> None:
        """Refuse a file system without hard links now, and not when the first batch is saved."""
        file, link = (self._root / name for name in (".probe", ".probe.link"))
        try:
            link.unlink(missing_ok=True)
            file.touch()
            os.link(file, link)
        except OSError as error:
            if error.errno in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                raise UserError(
                    f"the file system of {self._root} has no hard links (FAT and many network "
                    "shares have none): choose another --state-dir"
                ) from None
        finally:  # of a full disk the health check tells
            with suppress(OSError):
                link.unlink(missing_ok=True)
                file.unlink(missing_ok=True)

    def create(self, name: str, data: bytes) -> None:
        """Write a file durably, or raise ``FileExistsError``."""
        path = self._root / name
        if int(path.stem) == 1:  # else somebody has removed the session
            path.parent.mkdir(exist_ok=True)
            sync_folder(self._root)
        create_atomically(path, data)

    def read(self, name: str) -> bytes:
        """A file, or ``FileNotFoundError``."""
        return (self._root / name).read_bytes()

    def head(self, name: str) -> bytes:
        """The header of a safetensors file, with the eight bytes before it."""
        with (self._root / name).open("rb") as file:
            start = file.read(8)
            return start + file.read(min(int.from_bytes(start, "little"), _LONGEST_HEAD))

    def sizes(self, under: str = "") -> dict[str, int]:
        """All files below a folder, which need not exist, with their sizes."""
        sizes = {}
        for path in (self._root / under).glob("*" if under else "*/*"):
            with suppress(FileNotFoundError):  # removed while we look
                sizes[path.relative_to(self._root).as_posix()] = path.stat().st_size
        return sizes

    def remove(self, name: str) -> None:
        path = self._root / name
        path.unlink(missing_ok=True)
        with suppress(OSError):  # not empty
            path.parent.rmdir()

    def modified(self, name: str) -> float:
        return (self._root / name).stat().st_mtime

    def free_bytes(self) -> float:
        return shutil.disk_usage(self._root).free


class _Bucket:
    """An object store through fsspec; a written object is durable. The methods of a folder."""

    def __init__(self, url: str) -> None:
        protocol = urlsplit(url).scheme
        if protocol not in _BUCKETS:
            raise UserError(
                f"sessions cannot be shared through {protocol}://: use a mounted folder, s3:// or "
                "gs://, where a replica cannot overwrite what another has written"
            )
        try:
            from fsspec.core import url_to_fs

            how = {} if protocol == "memory" else {"use_listings_cache": False}
            self._fs, self._root = url_to_fs(url, **how)
        except ImportError as error:
            raise UserError(f"{protocol}:// needs another package: {error}") from error
        self._root = self._root.rstrip("/")

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Refuse a store that would replace what another replica wrote."""
        name = f".probe-{time.time_ns()}"
        self.create(name, b"1")
        try:
            self.create(name, b"2")
        except FileExistsError:
            pass
        else:
            raise UserError(
                f"{self._fs.protocol} at {self._root} cannot create a file only if there is none: "
                "use another store"
            )
        finally:
            self.remove(name)
        yield

    def create(self, name: str, data: bytes) -> None:
        self._fs.pipe_file(f"{self._root}/{name}", data, mode="create")

    def read(self, name: str) -> bytes:
        return bytes(self._fs.cat_file(f"{self._root}/{name}"))

    def head(self, name: str) -> bytes:
        path = f"{self._root}/{name}"
        start = self._fs.cat_file(path, start=0, end=8)
        size = min(int.from_bytes(start, "little"), _LONGEST_HEAD)
        return bytes(start + self._fs.cat_file(path, start=8, end=8 + size))

    def sizes(self, under: str = "") -> dict[str, int]:
        self._fs.invalidate_cache()
        try:
            entries = self._fs.find(f"{self._root}/{under}".rstrip("/"), detail=True)
        except FileNotFoundError:
            return {}
        root = len(self._root) + 1
        return {path[root:]: int(entry["size"]) for path, entry in entries.items()}

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm_file(f"{self._root}/{name}")

    def modified(self, name: str) -> float:
        return float(self._fs.modified(f"{self._root}/{name}").timestamp())

    def free_bytes(self) -> float:
        return math.inf


Files = _Folder | _Bucket


def files_at(where: Path | str) -> Files:
    """The files below a folder, or below a URL of fsspec, by names ``FOLDER/FILE``."""
    return _Bucket(str(where)) if is_url(str(where)) else _Folder(Path(where))
