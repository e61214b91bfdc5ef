"""Images, audio, video and files of a request, as text that the model can read.

No model that is served can see or hear. A client that once read a picture sends it with every
later request, so a refusal would end its session. The same bytes always become the same line:
the line has no ids and no query of a URL, which would change the prompt.
"""

import binascii
import re
from codecs import getincrementaldecoder
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

from rekindle.api.requests.media_formats import MediaKind, recognise
from rekindle.chat.reply.events import OmittedMedia
from rekindle.config.choices import MediaPolicy

HEAD_BYTES = 128 * 2**10  # headers of most JPEGs are shorter; picked
MAX_UNREADABLE = 0.1  # of the characters: more in a binary file, fewer in Latin-1; picked
MAX_NAME = 80  # characters; picked
CONTROLS = bytes({*range(32), 127} - set(b"\t\n\f\r"))
MAX_SCHEME = 32  # characters of a URL up to its `://`
MAX_URL = 2048  # characters that are looked at; picked
URL_DIGITS = bytes.maketrans(b"-_", b"+/")
WHITE_SPACE = bytes(each for each in range(128) if chr(each).isspace())
SUBTYPE = re.compile(r"[A-Za-z0-9.+-]{1,40}")

_KINDS = {
    "image_url": MediaKind.IMAGE,
    "input_image": MediaKind.IMAGE,
    "image": MediaKind.IMAGE,
    "image_file": MediaKind.IMAGE,
    "computer_screenshot": MediaKind.IMAGE,
    "image_generation_call": MediaKind.IMAGE,
    "input_audio": MediaKind.AUDIO,
    "audio_url": MediaKind.AUDIO,
    "output_audio": MediaKind.AUDIO,
    "audio": MediaKind.AUDIO,
    "video_url": MediaKind.VIDEO,
    "input_video": MediaKind.VIDEO,
    "video": MediaKind.VIDEO,
    "input_file": MediaKind.FILE,
    "file": MediaKind.FILE,
    "document": MediaKind.FILE,
    "container_upload": MediaKind.FILE,
}
# Where the wire formats, and clients that mix them, put the data of a part.
_HOLDERS = (
    *("image_url", "video_url", "audio_url", "input_audio", "file", "source"),
    *("image", "audio", "video", "document", "image_file"),
)
_DATA = ("data", "file_data", "result", "b64_json", "base64")
_URLS = ("url", "file_url")
_MEDIA_TYPES = ("media_type", "mime_type", "mimeType", "format")
_NAMES = ("filename", "title", "name")
MEDIA_FIELDS = frozenset(
    {*_HOLDERS, *_DATA, *_URLS, *_MEDIA_TYPES, *_NAMES, "file_id", "id", "content", "context"}
)


@dataclass(frozen=True, slots=True)
class _Payload:
    """The content of a part as the client sent it. All fields may be empty."""

    data: str = ""  # base64
    plain: str | list[Any] = ""  # text, or a list of parts
    url: str = ""
    media_type: str = ""
    name: str = ""
    has_id: bool = False  # the content is stored on a server of the vendor


class MediaReader:
    """Reads the media of one request, and counts those that the model does not see."""

    def __init__(self, policy: MediaPolicy) -> None:
        self._policy = policy
        self._omitted: Counter[tuple[MediaKind, str]] = Counter()

    @property
    def omitted(self) -> tuple[OmittedMedia, ...]:
        return tuple(
            OmittedMedia(kind, about, count) for (kind, about), count in self._omitted.items()
        )

    def text_of(self, part: Mapping[str, Any]) -> str | None:
        """Return the text for a part, never an empty one.

        None: the part holds no media, or the server is set to refuse them.
        """
        type_ = part.get("type")
        if self._policy is MediaPolicy.ERROR or not isinstance(type_, str) or type_ not in _KINDS:
            return None
        kind, payload = _KINDS[type_], _payload(part)
        context = part.get("context")  # Anthropic's, of a document
        lines = [context] if isinstance(context, str) and context else []
        text = self._text_in(payload) if kind is MediaKind.FILE else ""
        if not text:
            return "\n".join([self._omit(kind, payload), *lines])
        title = [f"[file: {payload.name}]"] if payload.name else []
        return "\n".join([*title, *lines, text])

    def _omit(self, kind: MediaKind, payload: _Payload) -> str:
        kind, about = _described(kind, payload)
        self._omitted[kind, about] += 1
        return f"[{kind} omitted: {about}; this model reads text only]"

    def _text_in(self, payload: _Payload) -> str:
        if isinstance(payload.plain, str):
            return payload.plain or _file_text(payload)
        texts = [self._inner_text(each) for each in payload.plain if isinstance(each, dict)]
        return "\n".join(text for text in texts if text)

    def _inner_text(self, part: Mapping[str, Any]) -> str | None:
        text = part.get("text")
        return text if isinstance(text, str) else self.text_of(part)


def _payload(part: Mapping[str, Any]) -> _Payload:
    places = [part, *(part[key] for key in _HOLDERS if part.get(key))]
    objects = [each for each in places if isinstance(each, Mapping)]
    links = [each for each in places if isinstance(each, str)]
    media_type = _first(objects, _MEDIA_TYPES)
    source = objects[-1]
    if source.get("type") == "text" and isinstance(source.get("data"), str):  # Anthropic's
        return _Payload(plain=source["data"], name=_shown(_first(objects, _NAMES)))
    if source.get("type") == "content" and isinstance(source.get("content"), str | list):
        return _Payload(plain=source["content"], name=_shown(_first(objects, _NAMES)))
    link = _first(objects, _URLS) or next(iter(links), "")
    data = _first(objects, _DATA)
    if not data and "://" not in link[:MAX_SCHEME]:
        data, link = link, ""  # a data URL, or base64 alone
    return _Payload(
        data=data,
        url=link,
        media_type=media_type,
        name=_shown(_first(objects, _NAMES)),
        has_id=any(each.get("file_id") or each.get("id") for each in objects),
    )


def _first(objects: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> str:
    """Return the first text under one of the keys."""
    found = (each.get(key) for each in objects for key in keys)
    return next((value for value in found if isinstance(value, str) and value), "")


def _described(kind: MediaKind, payload: _Payload) -> tuple[MediaKind, str]:
    """Return the kind by its bytes, and one phrase about them."""
    facts = [payload.name] if payload.name else []
    if payload.data:
        media_type, head, n_bytes = _decoded(payload, HEAD_BYTES)
        known = recognise(head, n_bytes)
        if known is not None:
            # Sound is sent in containers of video, too.
            is_sound = kind is MediaKind.AUDIO and known.kind is MediaKind.VIDEO
            kind = kind if is_sound else known.kind
            facts += [known.name, known.detail]
        else:
            facts.append(_declared(media_type) if head else "not valid base64")
    elif payload.url:
        facts.append(_place(payload.url))
    elif payload.has_id:
        facts.append("from a file id")
    elif not facts:
        facts.append("empty")
    return kind, ", ".join(fact for fact in facts if fact)


def _file_text(payload: _Payload) -> str:
    """Return the text of a file that is nothing but text, else an empty string."""
    if not payload.data:
        return ""
    media_type, head, n_bytes = _decoded(payload, HEAD_BYTES)
    is_declared = media_type.startswith("text/")
    if recognise(head, n_bytes) is not None:
        return ""
    if n_bytes > len(head) and not _text_of(head, is_declared=is_declared, is_whole=False):
        return ""
    _, data, _ = _decoded(payload, len(payload.data))
    return _text_of(data, is_declared=is_declared, is_whole=True)


def _text_of(data: bytes, *, is_declared: bool, is_whole: bool) -> str:
    """Return the bytes as text, or an empty string if they are none.

    In a file that is declared as text, a few characters may be unreadable.
    """
    if b"\0" in data:
        return ""
    plain = data.translate(None, CONTROLS)
    if not is_declared and plain != data:
        return ""
    decoder = getincrementaldecoder("utf-8")("replace" if is_declared else "strict")
    try:
        text = decoder.decode(plain, final=is_whole)
    except UnicodeDecodeError:
        return ""
    return text if text.count("\ufffd") <= len(text) * MAX_UNREADABLE else ""


def _decoded(payload: _Payload, max_bytes: int) -> tuple[str, bytes, int]:
    """Return the media type, the first bytes, and how many bytes there are in all."""
    media_type, data, start, is_base64 = payload.media_type, payload.data, 0, True
    if data[: len("data:")].lower() == "data:":
        start = data.find(",", 0, MAX_URL) + 1 or len(data)
        header = data[len("data:") : start - 1]
        media_type = header[:MAX_URL].partition(";")[0] or media_type
        is_base64 = header.lower().endswith(";base64")
    n_left = len(data) - start
    if not is_base64:
        escaped = data[start : start + 3 * max_bytes]
        return media_type, unquote_to_bytes(escaped)[:max_bytes], n_left
    n_read = max_bytes // 3 * 4 + 4
    try:
        digits = data[start : start + n_read].encode("ascii").translate(URL_DIGITS, WHITE_SPACE)
        digits = digits.rstrip(b"=")
        if n_left > n_read:
            digits = digits[: len(digits) // 4 * 4]
        decoded = binascii.a2b_base64(digits + b"=" * (-len(digits) % 4))
    except ValueError:  # a wrong number of digits, or not even ASCII
        decoded = b""
    return media_type, decoded, len(decoded) if n_left <= n_read else n_left * 3 // 4


def _declared(media_type: str) -> str:
    subtype = media_type.rpartition("/")[2].partition(";")[0].strip()
    return subtype.upper() if SUBTYPE.fullmatch(subtype) else "unknown format"


def _place(url: str) -> str:
    """Return the file name and the host of a URL. Its query may change with every request."""
    try:
        parts = urlsplit(url[:MAX_URL])
        host = parts.hostname or ""
    except ValueError:
        return "from a URL"
    name = _shown(parts.path.rpartition("/")[2])
    return f"{name} from {_shown(host) or 'a URL'}".lstrip()


def _shown(name: str) -> str:
    """Return a name of the client as one short line."""
    return "".join(each for each in name[:MAX_URL] if each.isprintable()).strip()[:MAX_NAME]
