"""Formats and sizes are read from the first bytes, whatever these are."""

import io
import struct
import wave

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.api.requests.media_formats import MediaFormat, MediaKind, recognise

PNG = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", 1024, 768)
GIF = b"GIF89a" + struct.pack("<HH", 320, 200)
BMP = b"BM" + struct.pack("<IIIIii", 0, 0, 54, 40, 640, -480)
OLD_BMP = b"BM" + struct.pack("<IIIIHH", 0, 0, 26, 12, 64, 48)
EXIF = b"\xff\xe1" + struct.pack(">H", 9) + b"Exif\0\0\0"
FRAME = b"\xff\xc2" + struct.pack(">HBHH", 17, 8, 600, 800)
JPEG = b"\xff\xd8" + EXIF + b"\xff\xff\xc4\x00\x03\x00" + FRAME


def webp(kind: bytes, body: bytes) -> bytes:
    return b"RIFF\0\0\0\0WEBP" + kind + bytes(4) + body


LOSSY = webp(b"VP8 ", b"\0\0\0\x9d\x01\x2a" + struct.pack("<HH", 500, 400))
LOSSLESS = webp(b"VP8L", b"\x2f" + struct.pack("<I", 499 | 399 << 14))
EXTENDED = webp(b"VP8X", bytes(4) + (499).to_bytes(3, "little") + (399).to_bytes(3, "little"))


def wav(seconds: float) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(8000)
        writer.writeframes(bytes(int(16000 * seconds)))
    return file.getvalue()


IMAGES = {
    "PNG, 1024x768": PNG,
    "JPEG, 800x600": JPEG,
    "GIF, 320x200": GIF,
    "BMP, 640x480": BMP,
    "BMP, 64x48": OLD_BMP,
    "WebP, 500x400": LOSSY,
}


def told(head: bytes, n_bytes: int | None = None) -> str | None:
    found = recognise(head, len(head) if n_bytes is None else n_bytes)
    return ", ".join(filter(None, (found.name, found.detail))) if found else None


@pytest.mark.parametrize("text", IMAGES)
def test_size_of_an_image_is_in_its_header(text: str) -> None:
    assert told(IMAGES[text]) == text


@pytest.mark.parametrize("data", [LOSSY, LOSSLESS, EXTENDED])
def test_every_kind_of_webp_has_its_size(data: bytes) -> None:
    assert told(data) == "WebP, 500x400"


def test_length_of_a_wav_is_in_seconds() -> None:
    sound = wav(2.5)
    assert recognise(sound, len(sound)) == MediaFormat(MediaKind.AUDIO, "WAV", "2.5 s")
    assert told(sound[:64], len(sound)) == "WAV, 2.5 s"


def test_a_wav_that_was_streamed_has_the_length_of_its_bytes() -> None:
    sound = wav(2.5)
    place = sound.index(b"data") + 4
    assert told(sound[:12] + b"JUNK\x02\0\0\0ab" + sound[12:]) == "WAV, 2.5 s"
    for unknown in (b"\0\0\0\0", b"\xff\xff\xff\xff"):
        assert told(sound[:place] + unknown + sound[place + 4 :]) == "WAV, 2.5 s"


@pytest.mark.parametrize(
    ("head", "kind", "name"),
    [
        (b"%PDF-1.7\n", MediaKind.FILE, "PDF"),
        (b"PK\x03\x04", MediaKind.FILE, "ZIP"),
        (b"ID3\x04", MediaKind.AUDIO, "MP3"),
        (b"\xff\xfb\x90", MediaKind.AUDIO, "MP3"),
        (b"OggS\0", MediaKind.AUDIO, "Ogg"),
        (b"fLaC\0", MediaKind.AUDIO, "FLAC"),
        (b"\0\0\0\x20ftypavif", MediaKind.IMAGE, "AVIF"),
        (b"\0\0\0\x20ftypM4A ", MediaKind.AUDIO, "M4A"),
        (b"\0\0\0\x20ftypisom", MediaKind.VIDEO, "MP4"),
        (b"\x1aE\xdf\xa3", MediaKind.VIDEO, "WebM"),
    ],
)
def test_other_formats_have_a_kind_and_a_name(head: bytes, kind: MediaKind, name: str) -> None:
    assert recognise(head, len(head)) == MediaFormat(kind, name)


@pytest.mark.parametrize(
    "data", [b"", b"BMW builds cars", b"A sound WAVE", b"ID3 tags", b"OggSound", b"\xff", b"x"]
)
def test_text_that_begins_like_a_format_is_none(data: bytes) -> None:
    assert told(data) is None


@given(st.sampled_from([*IMAGES.values(), LOSSLESS, EXTENDED, wav(0.1)]), st.data())
def test_a_header_that_is_cut_off_keeps_its_name_or_nothing(
    head: bytes, data: st.DataObject
) -> None:
    whole = told(head)
    cut = told(head[: data.draw(st.integers(0, len(head)))])
    assert whole is not None
    assert cut in (None, whole, whole.partition(",")[0]) or cut.startswith("WAV, ")


STARTS = [PNG, JPEG, GIF, BMP, LOSSY, LOSSLESS, EXTENDED, wav(0.1), b"\xff\xd8\xff", b""]


@given(st.sampled_from(STARTS), st.integers(0, 64), st.binary(max_size=300), st.integers(0, 2**40))
def test_hostile_bytes_raise_nothing(head: bytes, n_kept: int, rest: bytes, n_bytes: int) -> None:
    found = recognise(head[:n_kept] + rest, n_bytes)
    assert found is None or len(found.detail) < 40


def test_a_jpeg_of_padding_is_given_up() -> None:
    assert told(b"\xff\xd8" + b"\xff" * 2**17) == "JPEG"
