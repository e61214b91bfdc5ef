"""An animated PNG from frames of pixels: one palette, and of each frame only what changed."""

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_COLOURS = 256  # of a palette
SIGNATURE = b"\x89PNG\r\n\x1a\n"
PALETTE_COLOURS = 3  # the colour type of IHDR

Pixels = NDArray[np.uint8]  # rows, columns, and red, green and blue


@dataclass(frozen=True, slots=True)
class Frame:
    pixels: Pixels
    seconds: float


def encode(frames: Sequence[Frame]) -> bytes:
    """Return the file. It plays in a loop; viewers without animation show the first frame."""
    palette, indexed = _indexed([frame.pixels for frame in frames])
    height, width = indexed[0].shape
    head = struct.pack(">IIBBBBB", width, height, 8, PALETTE_COLOURS, 0, 0, 0)
    chunks = [_chunk(b"IHDR", head), _chunk(b"PLTE", palette.tobytes())]
    chunks.append(_chunk(b"acTL", struct.pack(">II", len(frames), 0)))
    chunks += _frames(indexed, [frame.seconds for frame in frames])
    return SIGNATURE + b"".join(chunks) + _chunk(b"IEND", b"")


def _frames(indexed: Sequence[Pixels], seconds: Sequence[float]) -> Iterator[bytes]:
    number = 0  # fcTL and fdAT are counted together
    for i, pixels in enumerate(indexed):
        top, left, part = _changed(indexed[i - 1], pixels) if i else (0, 0, pixels)
        height, width = part.shape
        area = struct.pack(">IIIII", number, width, height, left, top)
        # Milliseconds; the frame stays, and the next one is drawn over it.
        yield _chunk(b"fcTL", area + struct.pack(">HHBB", round(1000 * seconds[i]), 1000, 0, 0))
        number += 1
        rows = np.pad(part, ((0, 0), (1, 0)))  # each row begins with its filter: none
        data = zlib.compress(rows.tobytes(), 9)
        if i == 0:
            yield _chunk(b"IDAT", data)
        else:
            yield _chunk(b"fdAT", struct.pack(">I", number) + data)
            number += 1


def _changed(before: Pixels, after: Pixels) -> tuple[int, int, Pixels]:
    """Return top, left and pixels of the smallest rectangle with every change."""
    differs = before != after
    if not differs.any():
        return 0, 0, after[:1, :1]  # a frame has at least one pixel
    rows, columns = np.flatnonzero(differs.any(axis=1)), np.flatnonzero(differs.any(axis=0))
    top, left = int(rows[0]), int(columns[0])
    return top, left, after[top : rows[-1] + 1, left : columns[-1] + 1]


def _indexed(frames: Sequence[Pixels]) -> tuple[Pixels, list[Pixels]]:
    """Return a palette, and each frame as indexes into it. Rare colours become the nearest."""
    packed = [
        frame.astype(np.uint32) @ np.array([1 << 16, 1 << 8, 1], np.uint32) for frame in frames
    ]
    colours, counts = np.unique(
        np.concatenate([each.ravel() for each in packed]), return_counts=True
    )
    rgb = np.stack([colours >> 16, colours >> 8 & 255, colours & 255], axis=1).astype(np.int64)
    kept = rgb[np.argsort(-counts, kind="stable")[:MAX_COLOURS]]
    nearest = np.array([((kept - each) ** 2).sum(axis=1).argmin() for each in rgb], np.uint8)
    return kept.astype(np.uint8), [nearest[np.searchsorted(colours, each)] for each in packed]


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
