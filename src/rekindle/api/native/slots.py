"""llama-server's actions on slots, as names of prompts in the cache.

Prefixes are found in any slot, so a slot of the client is a name: `slot:1` stands for the last
prompt that was sent with `id_slot` 1. Saving gives that prompt a second name, the file's, pins it
and writes it to disk. Restoring computes what is missing of it. Erasing deletes the prompt, unless
it was saved.
"""

import time
import uuid

from fastapi import Request, Response

from rekindle.api.body import fault
from rekindle.api.cache_controls import SLOT_PREFIX, TTL_SECONDS, slot_name
from rekindle.api.http.caller import Caller
from rekindle.api.http.context import RequestContext
from rekindle.api.http.disconnect import unless_client_leaves
from rekindle.api.http.query import model_wanted
from rekindle.api.json import json_response
from rekindle.api.models import Lease
from rekindle.api.native.schema import (
    RestoreTimings,
    SaveTimings,
    SlotErased,
    SlotFile,
    SlotReply,
    SlotRestored,
    SlotSaved,
)
from rekindle.api.openapi import Routes
from rekindle.api.replies import Envelope, WantedReply, start_replies
from rekindle.chat.reply.events import ReplyOptions
from rekindle.errors import InvalidRequest
from rekindle.generation.events import CacheSource
from rekindle.generation.questions import ForgetKey, ListStored, ReadTokens
from rekindle.generation.request import CacheTerms, Pin

PIN_SECONDS = TTL_SECONDS["24h"]
MAX_LISTED = 1024  # named prompts come first, and there are no more
ACTIONS = ("save", "restore", "erase")


class SlotsApi:
    def __init__(self, context: RequestContext) -> None:
        self._context = context

    def add_routes(self, routes: Routes) -> None:
        path, taken = "/slots/{id_slot}", [SlotFile]
        routes.add("POST", path, self.act, takes=taken, gives=SlotReply)

    async def act(self, request: Request, id_slot: str) -> Response:
        if not (id_slot.isascii() and id_slot.isdecimal() and len(id_slot) < 10):
            raise fault("id_slot", " should be the number of a slot.")
        action = request.query_params.get("action")
        if action not in ACTIONS:
            raise fault("action", f" should be one of {', '.join(ACTIONS)}.")
        caller = self._context.caller(request)
        slot = int(id_slot)
        is_erased = action == "erase"
        body = None if is_erased else await self._context.bodies.read(request, SlotFile)
        with await self._context.models.lease(model_wanted(request)) as served:
            if body is None:
                return json_response(await self._erase(served, caller, slot))
            if action == "save":
                return json_response(await self._save(request, served, caller, slot, body.filename))
            return json_response(await self._restore(request, served, caller, slot, body.filename))

    async def _save(
        self, request: Request, served: Lease, caller: Caller, slot: int, filename: str
    ) -> SlotSaved:
        tokens = await _tokens(served, caller, slot_name(slot))
        if tokens is None:
            raise fault(
                "id_slot", f": slot {slot} is empty. Send a request with `id_slot` {slot} first."
            )
        began = time.monotonic()
        await self._compute(request, served, caller, tokens, name=filename, pins=True)
        return SlotSaved(
            id_slot=slot,
            filename=filename,
            n_saved=len(tokens),
            n_written=await _n_bytes(served, caller, filename),
            timings=SaveTimings(save_ms=(time.monotonic() - began) * 1e3),
        )

    async def _restore(
        self, request: Request, served: Lease, caller: Caller, slot: int, filename: str
    ) -> SlotRestored:
        tokens = await _tokens(served, caller, filename)
        if tokens is None:
            raise fault("filename", f": no prompt was saved as `{filename}`.")
        began = time.monotonic()
        await self._compute(request, served, caller, tokens, name=slot_name(slot), pins=False)
        return SlotRestored(
            id_slot=slot,
            filename=filename,
            n_restored=len(tokens),
            n_read=await _n_bytes(served, caller, filename),
            timings=RestoreTimings(restore_ms=(time.monotonic() - began) * 1e3),
        )

    async def _erase(self, served: Lease, caller: Caller, slot: int) -> SlotErased:
        name = slot_name(slot)
        tokens = await _tokens(served, caller, name)
        if tokens is None or await _is_saved(served, caller, tokens):
            return SlotErased(id_slot=slot, n_erased=0)
        await served.responder.ask(
            ForgetKey(key=name, namespace=caller.namespace, at=caller.asked_at)
        )
        return SlotErased(id_slot=slot, n_erased=len(tokens))

    async def _compute(
        self,
        request: Request,
        served: Lease,
        caller: Caller,
        tokens: tuple[int, ...],
        *,
        name: str,
        pins: bool,
    ) -> None:
        """Evaluate the prompt, as far as it is not cached, and name it. Generate nothing."""
        responder = served.responder
        cache = responder.status().cache
        has_disk = cache is not None and any(
            tier.name is CacheSource.DISK and tier.trouble is None for tier in cache.tiers
        )
        if cache is not None and cache.off_because is not None:
            raise InvalidRequest(f"This server keeps no prompts: {cache.off_because}.")
        terms = CacheTerms(
            namespace=caller.namespace,
            session=caller.session,
            name=name,
            pins=(Pin(len(tokens), PIN_SECONDS),) if pins else (),
            persist=pins and has_disk,
            asked_at=caller.asked_at,
        )
        options = ReplyOptions(sampling=responder.default_sampling, max_tokens=0, terms=terms)
        prompt = await responder.prepare_tokens(tokens, namespace=caller.namespace)
        key = uuid.uuid4().hex
        envelope = Envelope(
            id=f"slot-{key}",
            key=key,
            created=int(time.time()),
            model=served.card.id,
            wanted=[WantedReply(prompt, options)],
        )
        replies = await start_replies(served, envelope, self._context.telemetry, request=request)
        try:
            await unless_client_leaves(request.receive, replies.collect())
        finally:
            replies.close()


async def _tokens(served: Lease, caller: Caller, name: str) -> tuple[int, ...] | None:
    return await served.responder.ask(ReadTokens(key=name, namespace=caller.namespace))


async def _n_bytes(served: Lease, caller: Caller, name: str) -> int:
    question = ListStored(namespace=caller.namespace, limit=MAX_LISTED)
    stored = await served.responder.ask(question)
    return next((each.n_bytes for each in stored if each.name == name), 0)


async def _is_saved(served: Lease, caller: Caller, tokens: tuple[int, ...]) -> bool:
    """Return whether a file begins with these tokens: deleting them would delete it."""
    question = ListStored(namespace=caller.namespace, limit=MAX_LISTED)
    for each in await served.responder.ask(question):
        if each.name is None or each.name.startswith(SLOT_PREFIX) or each.n_tokens < len(tokens):
            continue
        if ((await _tokens(served, caller, each.name)) or ())[: len(tokens)] == tokens:
            return True
    return False
