"""Cached contents: prompts that clients compute once, keep under a name, and continue.

A cached content is the request that made it, in the store of responses. Its rows are ordinary
rows of the cache, pinned until the content expires. A content whose rows were evicted is computed
again.
"""

import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import islice

from fastapi import Request
from pydantic import BaseModel, ValidationError

from rekindle.api.body import fault
from rekindle.api.cache_controls import Mark, covered
from rekindle.api.errors import NotFound
from rekindle.api.gemini.bodies import CachedContentBody, CachedContentList, CachedUsage
from rekindle.api.gemini.contents import stored_conversation
from rekindle.api.gemini.request import no_tokens
from rekindle.api.gemini.schema import CachedContentRequest, CachedContentUpdate, PromptFields
from rekindle.api.gemini.stream import EVENTS, ContentChunks
from rekindle.api.gemini.tools import unsupported_tools
from rekindle.api.http.caller import Caller
from rekindle.api.http.error_shapes import GoogleErrorBody
from rekindle.api.pipeline import Exchange, WireFormat
from rekindle.api.replies import Envelope, Reply
from rekindle.api.requests.media import MediaReader
from rekindle.generation.forgetting import Owner
from rekindle.generation.stored_responses import ResponseStore, StoredResponse

FOLDER = "cachedContents"
ID = re.compile(r"[0-9a-f]{32}")
DEFAULT_SECONDS = 3600.0  # Google's
MAX_SECONDS = 30 * 86400.0  # as long as responses are stored


class CachedRecord(BaseModel):
    """A cached content without its prompt."""

    model: str
    display_name: str | None = None
    created_at: float  # seconds since the epoch, like the next two
    updated_at: float
    expires_at: float
    n_tokens: int

    def body(self, name: str) -> CachedContentBody:
        body = CachedContentBody(
            name=name,
            model=f"models/{self.model}",
            createTime=_shown(self.created_at),
            updateTime=_shown(self.updated_at),
            expireTime=_shown(self.expires_at),
            usageMetadata=CachedUsage(totalTokenCount=self.n_tokens),
        )
        if self.display_name is not None:
            body["displayName"] = self.display_name
        return body


@dataclass(frozen=True, slots=True)
class CachedContent:
    """A cached content as it is stored: the record in one line of JSON, then the prompt."""

    record: CachedRecord
    prompt_json: bytes
    owner: Owner  # who made it

    def prompt(self) -> PromptFields:
        """Return the prompt. Raise ValidationError if it is damaged."""
        return PromptFields.model_validate_json(self.prompt_json)


@dataclass(frozen=True, slots=True)
class CachedContents:
    """The cached contents of one namespace. All functions block: they read from disk."""

    store: ResponseStore
    namespace: str

    def find(self, name: str, param: str = "name") -> CachedContent:
        """Raise NotFound if there is none, or if it has expired."""
        folder, _, id = name.rpartition("/")
        is_name = folder in ("", FOLDER) and ID.fullmatch(id)
        found = self._get(self._prefix + id) if is_name else None
        if found is None:
            raise NotFound(f"There is no cached content '{name:.100}', or it has expired.", param)
        return found

    def page(self, after: str, size: int) -> CachedContentList:
        """List contents in the order of their ids, from the first one behind the id `after`."""
        found = list(islice(self._records(after), size + 1))
        listed = CachedContentList(
            cachedContents=[record.body(f"{FOLDER}/{id}") for id, record in found[:size]]
        )
        if len(found) > size:
            listed["nextPageToken"] = found[size - 1][0]
        return listed

    def keep(self, name: str, content: CachedContent) -> None:
        record = content.record
        data = record.model_dump_json(exclude_none=True).encode() + b"\n" + content.prompt_json
        key = self._prefix + name.rpartition("/")[2]
        self.store.put(StoredResponse(key, int(record.updated_at), data, content.owner))

    def delete(self, name: str) -> None:
        """Raise NotFound if there is none."""
        self.find(name)
        self.store.delete(self._prefix + name.rpartition("/")[2])

    def _records(self, after: str) -> Iterator[tuple[str, CachedRecord]]:
        """Yield ids and records only: a page of prompts could be larger than the memory."""
        for key in self.store.ids(self._prefix):
            id = key.removeprefix(self._prefix)
            if id > after and (record := self._record(key)) is not None:
                yield id, record

    def _record(self, key: str) -> CachedRecord | None:
        content = self._get(key)
        return None if content is None else content.record

    def _get(self, key: str) -> CachedContent | None:
        stored = self.store.get(key)
        if stored is None:
            return None
        head, _, prompt = stored.data.partition(b"\n")
        try:
            record = CachedRecord.model_validate_json(head)
        except ValidationError:
            return None
        content = CachedContent(record, prompt, stored.owner)
        return None if record.expires_at <= time.time() else content

    @property
    def _prefix(self) -> str:
        """Return the beginning of the keys in the store. Ids of responses have no folder."""
        return f"{self.namespace}/{FOLDER}/" if self.namespace else f"{FOLDER}/"


def cached_content_format(store: ResponseStore) -> WireFormat[CachedContentRequest]:
    return WireFormat(
        name=FOLDER,
        operation="createCachedContent",
        paths=(),
        schema=CachedContentRequest,
        body=CachedContentBody,
        error=GoogleErrorBody,
        id_prefix="",
        read=partial(_read, store),
        amend=_named,
    )


def life_seconds(body: CachedContentRequest | CachedContentUpdate) -> float:
    """Return for how long a content is to be kept, from now on."""
    if body.ttl is not None:
        param, seconds = "ttl", float(body.ttl.removesuffix("s"))
    elif body.expire_time is not None:
        param, seconds = "expireTime", _time(body.expire_time) - time.time()
    else:
        return DEFAULT_SECONDS
    if not 0 < seconds <= MAX_SECONDS:
        raise fault(param, f" should be at most {MAX_SECONDS:.0f} s in the future.")
    return seconds


def _named(body: CachedContentRequest, _request: Request) -> CachedContentRequest:
    """Give the content its name. The prompt has the same name in the cache."""
    name = f"{FOLDER}/{uuid.uuid4().hex}"
    model = body.model.removeprefix("models/") if body.model else None
    return body.model_copy(update={"cache_key": name, "model": model, "stream": False})


def _read(
    store: ResponseStore,
    body: CachedContentRequest,
    caller: Caller,
    _: Mapping[str, str],
    media: MediaReader,
) -> Exchange:
    seconds = life_seconds(body)
    conversation = stored_conversation(body, media)
    n_messages = covered(conversation, len(conversation.messages))
    # Serialised here, because large bodies are read on a thread and replies are not written on one.
    prompt = PromptFields(**{name: getattr(body, name) for name in PromptFields.model_fields})
    prompt_json = prompt.model_dump_json(by_alias=True, exclude_none=True).encode()
    contents = CachedContents(store, caller.namespace)
    return Exchange(
        prompt=conversation,
        marks=(Mark(n_messages, seconds),),
        ignored=unsupported_tools(body.tools or ()),
        media_omitted=media.omitted,
        options=no_tokens,
        encoder=partial(ContentChunks, EVENTS, thinks=False),
        whole=partial(_kept, contents, body, prompt_json, seconds, caller.owner),
    )


def _kept(
    contents: CachedContents,
    body: CachedContentRequest,
    prompt_json: bytes,
    seconds: float,
    owner: Owner,
    envelope: Envelope,
    replies: Sequence[Reply],
) -> CachedContentBody:
    assert body.cache_key is not None
    now = time.time()
    record = CachedRecord(
        model=envelope.model,
        display_name=body.display_name,
        created_at=now,
        updated_at=now,
        expires_at=now + seconds,
        n_tokens=replies[0].done.stats.n_prompt,
    )
    contents.keep(body.cache_key, CachedContent(record, prompt_json, owner))
    return record.body(body.cache_key)


def _time(text: str) -> float:
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise fault("expireTime", " should be a time such as `2030-01-31T12:00:00Z`.") from None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def _shown(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")[:-6] + "Z"
