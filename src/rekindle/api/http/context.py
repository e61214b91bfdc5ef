"""What every endpoint that generates works with, and how it learns who asks for what."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fastapi import Request

from rekindle.api.cache_controls import CacheFields, Mark, terms_of
from rekindle.api.http.caller import Caller, Hints, caller_of
from rekindle.api.http.session_header import SCOPE_KEY, conversation_name, show_session
from rekindle.api.models import Models
from rekindle.chat.conversation import Conversation
from rekindle.chat.prompt.prompt import Prompt
from rekindle.chat.reply.events import ReplyOptions
from rekindle.config import NamespaceBy
from rekindle.errors import InvalidRequest
from rekindle.generation.request import DEFAULT_SESSION
from rekindle.observe.telemetry import Telemetry

EXPLAIN_HEADER = "x-rekindle-explain"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    models: Models
    telemetry: Telemetry
    ping_seconds: float = 10.0
    namespace_by: NamespaceBy = NamespaceBy.NONE
    explains: bool = False  # also where a request does not ask for it

    def caller(self, request: Request, hints: Hints) -> Caller:
        caller = caller_of(request.headers, hints, self.namespace_by)
        if caller.session != DEFAULT_SESSION:
            show_session(request.scope, caller.session)
        return caller

    def name_conversation(self, request: Request, begins: Conversation | str) -> None:
        """For the reply to a client that names no session."""
        if SCOPE_KEY not in request.scope:
            show_session(request.scope, conversation_name(begins))

    async def with_terms(
        self,
        options: ReplyOptions,
        request: Request,
        caller: Caller,
        body: CacheFields,
        marks: Sequence[Mark],
        conversation: Conversation | None,
        prompt: Prompt,
    ) -> ReplyOptions:
        """To find where messages end takes rendering them, so it is done in a thread."""
        if body.persist and (options.max_tokens != 0 or not options.cache_prompt):
            raise InvalidRequest(
                "`persist` is for priming: with `max_tokens` 0 or `prefill`, and the cache on.",
                "persist",
            )
        terms = await asyncio.to_thread(
            terms_of, caller, body, marks, conversation, prompt, primes=options.max_tokens == 0
        )
        explains = self.explains or request.headers.get(EXPLAIN_HEADER) == "1"
        return replace(options, terms=terms, rank=caller.rank, explain=explains)
