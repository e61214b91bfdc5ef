"""Recognises images, audio, video and documents by their first bytes.

The bytes come from clients. Every loop is bounded, and short or wrong bytes raise nothing.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

MAX_STEPS = 256  # segments of a JPEG, chunks of a WAV; picked
JPEG_SIZES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # start of a frame
JPEG_ENDS = (0xD9, 0xDA)  # end of the image, start of its data
JPEG_BARE = (0x01, *range(0xD0, 0xD8))  # markers without a length


class MediaKind(StrEnum):
    IMAGE = "image"
    AUDIO = "audio"
    VIDEO = "video"
    FILE = "file"


@dataclass(frozen=True, slots=True)
class MediaFormat:
    kind: MediaKind
    name: str
    detail: str = ""  # 1024x768, or 2.5 s


def recognise(head: bytes, n_bytes: int) -> MediaFormat | None:
    """Return the format of data that begins with `head` and has `n_bytes` in all."""
    for magic, kind, name, detail in _MAGIC:
        if head.startswith(magic):
            return MediaFormat(kind, name, _detail(detail, head, n_bytes))
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return MediaFormat(MediaKind.IMAGE, "WebP", _detail(_webp, head, n_bytes))
    if head[:4] == b"RIFF" and head[8:12] == b"WAVE":
        return MediaFormat(MediaKind.AUDIO, "WAV", _detail(_wav, head, n_bytes))
    if head[4:8] == b"ftyp":
        kind, name = _BRANDS.get(head[8:12], (MediaKind.VIDEO, "MP4"))
        return MediaFormat(kind, name)
    if head[:2] == b"BM" and head[6:10] == bytes(4):
        return MediaFormat(MediaKind.IMAGE, "BMP", _detail(_bmp, head, n_bytes))
    if len(head) > 1 and head[0] == 0xFF and head[1] & 0xE6 == 0xE2:  # layer III
        return MediaFormat(MediaKind.AUDIO, "MP3")
    return None


_Detail = Callable[[bytes, int], str]


def _detail(read: _Detail, head: bytes, n_bytes: int) -> str:
    try:
        return read(head, n_bytes)
    except (struct.error, IndexError):  # the header is cut off
        return ""


def _size(width: int, height: int) -> str:
    return f"{width}x{height}" if width and height else ""


def _png(head: bytes, _: int) -> str:
    return _size(*struct.unpack_from(">II", head, 16)) if head[12:16] == b"IHDR" else ""


def _gif(head: bytes, _: int) -> str:
    return _size(*struct.unpack_from("<HH", head, 6))


def _bmp(head: bytes, _: int) -> str:
    (header_bytes,) = struct.unpack_from("<I", head, 14)
    if header_bytes == 12:  # OS/2's first version
        return _size(*struct.unpack_from("<HH", head, 18))
    width, height = struct.unpack_from("<ii", head, 18)
    return _size(abs(width), abs(height))  # a negative height: rows from the top down


def _jpeg(head: bytes, _: int) -> str:
    position = 2
    for _step in range(MAX_STEPS):
        if head[position] != 0xFF:
            return ""
        marker = head[position + 1]
        if marker in JPEG_SIZES:
            height, width = struct.unpack_from(">HH", head, position + 5)
            return _size(width, height)
        if marker in JPEG_ENDS:
            return ""
        if marker == 0xFF:  # padding
            position += 1
        elif marker in JPEG_BARE:
            position += 2
        else:
            position += 2 + struct.unpack_from(">H", head, position + 2)[0]
    return ""


def _webp(head: bytes, _: int) -> str:
    match head[12:16]:
        case b"VP8 ":
            width, height = struct.unpack_from("<HH", head, 26)
            return _size(width & 0x3FFF, height & 0x3FFF)
        case b"VP8L":
            (bits,) = struct.unpack_from("<I", head, 21)
            return _size((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
        case b"VP8X" if len(head) >= 30:
            width, height = (int.from_bytes(head[at : at + 3], "little") for at in (24, 27))
            return _size(width + 1, height + 1)
    return ""


def _wav(head: bytes, n_bytes: int) -> str:
    position, bytes_per_second = 12, 0
    for _step in range(MAX_STEPS):
        name, length = struct.unpack_from("<4sI", head, position)
        position += 8
        if name == b"fmt ":
            (bytes_per_second,) = struct.unpack_from("<I", head, position + 8)
        elif name == b"data":
            # A recorder that streams does not know the length, and writes 0 or the largest one.
            n_left = max(n_bytes - position, 0)
            n_data = min(length or n_left, n_left)
            return f"{n_data / bytes_per_second:.1f} s" if bytes_per_second else ""
        position += length + length % 2
    return ""


def _nothing(_: bytes, __: int) -> str:
    return ""


_MAGIC: tuple[tuple[bytes, MediaKind, str, _Detail], ...] = (
    (b"\x89PNG\r\n\x1a\n", MediaKind.IMAGE, "PNG", _png),
    (b"\xff\xd8\xff", MediaKind.IMAGE, "JPEG", _jpeg),
    (b"GIF87a", MediaKind.IMAGE, "GIF", _gif),
    (b"GIF89a", MediaKind.IMAGE, "GIF", _gif),
    (b"II*\x00", MediaKind.IMAGE, "TIFF", _nothing),
    (b"MM\x00*", MediaKind.IMAGE, "TIFF", _nothing),
    (b"fLaC\x00", MediaKind.AUDIO, "FLAC", _nothing),
    (b"OggS\x00", MediaKind.AUDIO, "Ogg", _nothing),
    (b"ID3\x02", MediaKind.AUDIO, "MP3", _nothing),
    (b"ID3\x03", MediaKind.AUDIO, "MP3", _nothing),
    (b"ID3\x04", MediaKind.AUDIO, "MP3", _nothing),
    (b"\x1aE\xdf\xa3", MediaKind.VIDEO, "WebM", _nothing),
    (b"%PDF-", MediaKind.FILE, "PDF", _nothing),
    (b"PK\x03\x04", MediaKind.FILE, "ZIP", _nothing),
)
_BRANDS = {
    b"avif": (MediaKind.IMAGE, "AVIF"),
    b"avis": (MediaKind.IMAGE, "AVIF"),
    b"heic": (MediaKind.IMAGE, "HEIC"),
    b"heix": (MediaKind.IMAGE, "HEIC"),
    b"mif1": (MediaKind.IMAGE, "HEIC"),
    b"M4A ": (MediaKind.AUDIO, "M4A"),
    b"qt  ": (MediaKind.VIDEO, "QuickTime"),
}
