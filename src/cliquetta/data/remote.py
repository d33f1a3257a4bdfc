"""Files by URL: ``s3://``, ``gs://``, ``hf://`` and others through fsspec; images of the web."""

import glob
import http.client
import os
import posixpath
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from PIL import Image

from cliquetta.data.images import (
    EXTENSIONS,
    ImageError,
    natural_key,
    open_image,
    read_image,
)
from cliquetta.errors import UserError

# How often a read is tried that fails otherwise than by "no such file". By hand, as file
# systems of fsspec differ in what they try again, and several do not.
TRIES = 3


class Member(NamedTuple):
    """File in an uncompressed tar file."""

    archive: str
    offset: int
    size: int


def is_url(location: Path | str) -> bool:
    """Whether this is a URL and not a local path."""
    return isinstance(location, str) and "://" in location


def find_filesystem(url: str) -> tuple[Any, str]:
    """Find the file system of a URL, and the path in it."""
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise UserError("URLs need an extra: pip install 'cliquetta[remote]'") from None
    try:
        filesystem, path = url_to_fs(url)
    except ImportError as error:
        raise UserError(f"{url}: {error}; pip install 'cliquetta[remote]'") from None
    except ValueError as error:
        raise UserError(f"{url}: {error}") from None
    return filesystem, path


@contextmanager
def naming(location: Path | str) -> Iterator[None]:
    """Name a URL in whatever its file system raises."""
    try:
        yield
    except Exception as error:
        if not is_url(location) or isinstance(error, UserError):
            raise
        missing = isinstance(error, FileNotFoundError)
        reason = "no such file" if missing else f"cannot be read ({error})"
        raise OSError(f"{location}: {reason}") from error


def open_location(location: Path | str) -> BinaryIO:
    """Open a local file or one behind a URL, for reading."""
    if is_url(location):
        filesystem, path = find_filesystem(str(location))
        file: BinaryIO = filesystem.open(path, "rb")
        return file
    return Path(location).open("rb")


def read_location(location: str, offset: int = 0, size: int | None = None) -> bytes:
    """Read a file, or ``size`` bytes of it; a failing network is tried again."""
    if not is_url(location):
        with open_location(location) as file:
            file.seek(offset)
            return file.read(-1 if size is None else size)

    filesystem, path = find_filesystem(location)
    start = None if size is None else offset
    end = None if size is None else offset + size
    failures = 0
    while True:
        try:
            return bytes(filesystem.cat_file(path, start=start, end=end))
        except (FileNotFoundError, IsADirectoryError, PermissionError):
            raise
        except Exception:
            failures += 1
            if failures == TRIES:
                raise
            time.sleep(0.5 * 2**failures)


def read_listed(path: Path | str, member: Member | None = None) -> bytes:
    """Read the image file at a path or URL, or a ``member`` of a tar file called ``path``."""
    if member is None and not is_url(path):
        return read_image(path)
    try:
        if member is None:
            return read_location(str(path))
        return read_location(member.archive, member.offset, member.size)
    except FileNotFoundError:
        raise ImageError(str(path), "no such file") from None
    except Exception as error:  # whatever a file system raises
        raise ImageError(str(path), f"cannot be read ({error})") from error


def open_listed(path: Path | str, *, shorter: int | None = None) -> Image.Image:
    """Open the image at a path or URL."""
    return open_named(read_listed(path), path, shorter=shorter)


def open_named(
    data: bytes, path: Path | str, *, shorter: int | None = None, exif: bool = True
) -> Image.Image:
    """Open the image in ``data``; errors call it ``path``."""
    try:
        return open_image(data, shorter=shorter, exif=exif)
    except ImageError as error:
        raise ImageError(str(path), error.reason) from error


def expand_glob(pattern: str) -> list[str] | None:
    """List the files of a glob, natural order; ``None`` for web addresses and names that exist."""
    if is_url(pattern):
        if "*" not in pattern or pattern.startswith(("http:", "https:")):
            return None
        filesystem, path = find_filesystem(pattern)
        names = [filesystem.unstrip_protocol(name) for name in filesystem.glob(path)]
    elif glob.has_magic(pattern) and not os.path.lexists(pattern):
        names = glob.glob(pattern, recursive=True)  # noqa: PTH207 - a pattern may be absolute
    else:
        return None
    if not names:
        raise UserError(f"no file or folder matches {pattern}")
    return sorted(names, key=natural_key)


def require_exists(location: Path | str) -> None:
    """Refuse a file or folder that does not exist."""
    if is_url(location):
        filesystem, _ = find_filesystem(str(location))
        exists = filesystem.exists(location)
    else:
        exists = Path(location).exists()
    if not exists:
        raise UserError(f"no such file or folder: {location}")


def join_url(base: str, path: str) -> str:
    """Join ``path`` to the folder ``base``; a URL or an absolute path stays what it is."""
    if is_url(path):
        return path
    protocol, _, folder = base.partition("://")
    joined = posixpath.normpath(posixpath.join(folder, path))
    return f"{protocol}://{joined}"


def walk_urls(url: str, unused: Counter[str]) -> Iterator[str]:
    """Yield images below a URL in natural order, by suffix; ``unused`` counts other files."""
    filesystem, path = find_filesystem(url)
    for file in sorted(filesystem.find(path), key=natural_key):
        name = file.rpartition("/")[2]
        suffix = posixpath.splitext(name)[1].lower()
        if name.startswith("."):
            unused["hidden"] += 1
        elif suffix in EXTENSIONS:
            yield str(filesystem.unstrip_protocol(file))
        else:
            unused[suffix or "no suffix"] += 1


def fetch_image(url: str, *, seconds: float = 10.0, max_bytes: int = 2**25) -> bytes:
    """Fetch the bytes behind an ``http(s)`` URL; redirects lead to such URLs only."""
    end = time.monotonic() + seconds
    request = urllib.request.Request(url, headers={"User-Agent": "cliquetta"})
    too_large = ImageError(url, f"too large (more than {max_bytes:,} bytes)")

    # The declared size may be missing or wrong: count what arrives.
    data = bytearray()
    try:
        response = _http_opener().open(request, timeout=seconds)
        if response is None:
            raise ImageError(url, "redirects to something that is not HTTP")
        with closing(response):
            if int(response.headers.get("Content-Length") or 0) > max_bytes:
                raise too_large
            while part := response.read1(1 << 16):
                data += part
                if len(data) > max_bytes:
                    raise too_large
                if time.monotonic() > end:
                    raise TimeoutError
    except urllib.error.HTTPError as error:
        raise ImageError(
            url, f"the server replies {error.code} {error.reason}"
        ) from None
    except TimeoutError:
        raise ImageError(url, f"no complete reply within {seconds:g} seconds") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, ImageError):
            raise
        reason = getattr(error, "reason", None) or error
        if isinstance(reason, TimeoutError):
            reason = f"no reply within {seconds:g} seconds"
        raise ImageError(url, f"cannot be fetched ({reason})") from None
    return bytes(data)


def _http_opener() -> urllib.request.OpenerDirector:
    """Return an opener that reads no files and no FTP, wherever a redirect leads."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPErrorProcessor,
        urllib.request.HTTPDefaultErrorHandler,
    ):
        opener.add_handler(handler())
    return opener
