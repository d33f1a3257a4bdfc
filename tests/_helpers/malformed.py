"""Files that pretend to be images: damaged, cut, mislabelled, or far larger than they look."""

import itertools
import random
import struct
import zlib
from functools import cache

from tests._helpers.serve_setup import picture

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
_MAGIC = {"JPEG": b"\xff\xd8\xff\xe0", "PNG": b"\x89PNG\r\n\x1a\n", "GIF": b"GIF89a"}
_MAGIC |= {"WEBP": b"RIFF\x24\x00\x00\x00WEBPVP8 ", "BMP": b"BM", "TIFF": b"II*\x00"}


def malformed(count: int) -> list[bytes]:
    """Files with every kind of defect in every format, the bombs first."""
    generator = random.Random(0)
    originals = {name: picture(3, size=40, format=name) for name in FORMATS}
    makers = (_cut, _flipped, _relabelled, _scrambled, _shuffled, _random)
    kinds = itertools.cycle(itertools.product(originals.items(), makers))
    more = itertools.islice(kinds, count - len(bombs()))
    return [
        *bombs().values(),
        *(make(data, name, generator) for (name, data), make in more),
    ]


def _cut(data: bytes, name: str, generator: random.Random) -> bytes:
    return data[: generator.randrange(len(data))]


def _flipped(data: bytes, name: str, generator: random.Random) -> bytes:
    damaged = bytearray(data)
    for _ in range(generator.choice((1, 3, 30))):
        damaged[generator.randrange(len(damaged))] ^= 1 << generator.randrange(8)
    return bytes(damaged)


def _relabelled(data: bytes, name: str, generator: random.Random) -> bytes:
    """The head of one format on the body of another."""
    other = _MAGIC[generator.choice([f for f in FORMATS if f != name])]
    return other + data[len(other) :]


def _scrambled(data: bytes, name: str, generator: random.Random) -> bytes:
    """Random bytes in the header, where sizes and offsets are."""
    damaged = bytearray(data)
    for index in range(len(_MAGIC[name]), min(64, len(data))):
        if generator.random() < 0.3:
            damaged[index] = generator.randrange(256)
    return bytes(damaged)


def _shuffled(data: bytes, name: str, generator: random.Random) -> bytes:
    """Pieces in another order, or twice."""
    cuts = sorted(generator.sample(range(1, len(data)), 3))
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    return b"".join([pieces[0], *generator.choices(pieces, k=3)])


def _random(data: bytes, name: str, generator: random.Random) -> bytes:
    return _MAGIC[name] + generator.randbytes(generator.randrange(2000))


def chunk(kind: bytes, data: bytes) -> bytes:
    """A part of a PNG file."""
    return (
        struct.pack(">I", len(data))
        + kind
        + data
        + struct.pack(">I", zlib.crc32(kind + data))
    )


def png(width: int, height: int, *chunks: bytes) -> bytes:
    """A PNG file that claims a size, whatever is behind the claim."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return _MAGIC["PNG"] + header + b"".join(chunks) + chunk(b"IEND", b"")


@cache
def bombs() -> dict[str, bytes]:
    """Small files that claim, or hold, hundreds of millions of pixels or bytes."""
    rows = zlib.compress(
        bytes(5200 * (5200 * 3 + 1)), 1
    )  # honest: 27 million black pixels
    text = b"Comment\x00\x00" + zlib.compress(bytes(50_000_000), 1)
    jpeg = bytearray(picture(3, format="JPEG"))
    frame = jpeg.index(b"\xff\xc0")
    jpeg[frame + 5 : frame + 9] = struct.pack(">HH", 65500, 65500)
    progressive = picture(3, format="JPEG")
    start = progressive.index(b"\xff\xda")
    end = progressive.rindex(b"\xff\xd9")
    gif = struct.pack(
        "<6sHHB8xB4xHHB", b"GIF89a", 65535, 65535, 0xF0, ord(","), 65535, 65535, 0
    )
    webp = struct.pack("<4sI8sI4x", b"RIFF", 22 + 8, b"WEBPVP8X", 10)
    bmp = struct.pack("<2sIHHI", b"BM", 54, 0, 0, 54)
    tiff = struct.pack("<4sIH", b"II*\x00", 8, 5)
    for field in (
        (256, 4, 60_000),
        (257, 4, 60_000),
        (258, 3, 8),
        (262, 3, 1),
        (273, 4, 8),
    ):
        tiff += struct.pack("<HHII", *field[:2], 1, field[2])
    return {
        "png claims 50,000 x 50,000": png(
            50_000, 50_000, chunk(b"IDAT", zlib.compress(b"0"))
        ),
        "png holds 5,200 x 5,200": png(5_200, 5_200, chunk(b"IDAT", rows)),
        "png with a comment of 50 MB": png(40, 40, chunk(b"zTXt", text)),
        "jpeg claims 65,500 x 65,500": bytes(jpeg),
        "jpeg of 1,000 scans": progressive[:start]
        + 1000 * progressive[start:end]
        + b"\xff\xd9",
        "gif claims 65,535 x 65,535": gif + b"\x02\x02\x4c\x01\x00;",
        "webp claims 16,384 x 16,384": webp + b"\xff\x3f\x00" * 2 + b"VP8L" + bytes(4),
        "bmp claims 60,000 x 60,000": bmp
        + struct.pack("<IiiHH24x", 40, 60_000, 60_000, 1, 24),
        "tiff claims 60,000 x 60,000": tiff + bytes(4),
    }
