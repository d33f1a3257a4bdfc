"""Images behind URLs, within limits of time and size."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from contextlib import closing

from cliquetta.data.images import ImageError

_CHUNK = 1 << 16


def fetch_image(url: str, *, seconds: float = 10.0, max_bytes: int = 2**25) -> bytes:
    """The bytes behind an ``http(s)`` URL; redirects lead to such URLs only.

    Raises:
        ImageError: It cannot be had within ``seconds`` in all, or is larger than ``max_bytes``.

    """
    opener = urllib.request.OpenerDirector()  # no files, no FTP, wherever a redirect leads
    for handler in (
        *(urllib.request.ProxyHandler, urllib.request.HTTPHandler, urllib.request.HTTPSHandler),
        *(urllib.request.HTTPRedirectHandler, urllib.request.HTTPErrorProcessor),
        urllib.request.HTTPDefaultErrorHandler,
    ):
        opener.add_handler(handler())
    end = time.monotonic() + seconds
    request = urllib.request.Request(url, headers={"User-Agent": "cliquetta"})
    too_large = ImageError(url, f"too large (more than {max_bytes:,} bytes)")
    parts: list[bytes] = []
    try:
        response = opener.open(request, timeout=seconds)
        if response is None:
            raise ImageError(url, "leads away from the web")
        with closing(response):
            if int(response.headers.get("Content-Length") or 0) > max_bytes:
                raise too_large
            while part := response.read1(_CHUNK):
                parts.append(part)
                if sum(map(len, parts)) > max_bytes:
                    raise too_large
                if time.monotonic() > end:
                    raise TimeoutError
    except urllib.error.HTTPError as error:
        raise ImageError(url, f"the server answers {error.code} {error.reason}") from None
    except TimeoutError:
        raise ImageError(url, f"no whole answer within {seconds:g} seconds") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, ImageError):
            raise
        reason = getattr(error, "reason", None) or error
        if isinstance(reason, TimeoutError):
            reason = f"no answer within {seconds:g} seconds"
        raise ImageError(url, f"cannot be fetched ({reason})") from None
    return b"".join(parts)
