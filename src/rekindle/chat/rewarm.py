"""Prefills the next turn's prompt while the engine is idle.

A past turn may be rendered differently than it was sampled. The template or the client drops its
reasoning, or history lacks the text of the generation prompt. Without this, the next request would
prefill the difference.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from rekindle.bounded_cache import BoundedCache
from rekindle.chat.accounts.recent_prompts import n_shared
from rekindle.chat.prompt.prompt import Prompt, PromptBuilder
from rekindle.chat.reply.parser import ParsedReply
from rekindle.errors import RekindleError
from rekindle.generation.engine import Engine
from rekindle.generation.events import Finished, PromptEvaluated, StopCause
from rekindle.generation.forgetting import Owner, Tombstone
from rekindle.generation.request import CacheTerms, GenerationRequest, Sampling

_log = logging.getLogger("rekindle.rewarm")

MIN_TOKENS = 8  # fewer are left to the next request; picked
MAX_WAITING = 8  # replies that ended while other requests ran; picked
WAIT_SECONDS, POLL_SECONDS = 120.0, 0.1  # for an idle engine; picked


class _WaitingPrefill(NamedTuple):
    task: asyncio.Task[None]
    owner: Owner


class Rewarmer:
    def __init__(self, engine: Engine, prompts: PromptBuilder) -> None:
        self._engine = engine
        self._prompts = prompts
        self._tasks = BoundedCache[int, _WaitingPrefill](max_items=MAX_WAITING)  # by prompt

    def after(
        self,
        prompt: Prompt,
        reply: Sequence[int],
        said: ParsedReply,
        call_ids: Sequence[str],
        terms: CacheTerms,
    ) -> None:
        """Start the prefill in the background, and return at once.

        A turn that ended in calls is followed by results, and is rendered as sampled.
        """
        if prompt.conversation is None or call_ids or not reply:
            return
        key = id(prompt)
        if (earlier := self._tasks.pop(key)) is not None:
            earlier.task.cancel()  # only the last of several replies to one prompt counts
        task = asyncio.create_task(self._rewarm(prompt, tuple(reply), said, terms))
        for _, oldest in self._tasks.put(key, _WaitingPrefill(task, terms.owner)):
            oldest.task.cancel()
        task.add_done_callback(partial(self._remove, key))

    def forget(self, tombstone: Tombstone) -> None:
        """Cancel the prefills that the deletion covers."""
        for waiting in self._tasks.values():
            if tombstone.covers(waiting.owner):
                waiting.task.cancel()

    def _remove(self, key: int, task: asyncio.Task[None]) -> None:
        waiting = self._tasks.peek(key)
        if waiting is not None and waiting.task is task:
            self._tasks.pop(key)

    async def _rewarm(
        self, prompt: Prompt, reply: tuple[int, ...], said: ParsedReply, terms: CacheTerms
    ) -> None:
        try:
            if not await self._is_idle():
                return
            prompts = self._prompts.within(prompt.namespace)
            ahead = await asyncio.to_thread(prompts.after_reply, prompt, said)
            n_known = n_shared(np.array(ahead, np.int32), np.array(prompt.tokens + reply, np.int32))
            if len(ahead) - n_known >= MIN_TOKENS:
                await self._compute(ahead, terms)
        except RekindleError as error:
            _log.debug("rewarm: skipped: %s", error.message)
        except Exception:
            _log.exception("rewarm: failed")

    async def _is_idle(self) -> bool:
        """Wait until the engine is idle; False: it was busy for WAIT_SECONDS.

        Building the prompt would slow down running requests.
        """
        deadline = time.monotonic() + WAIT_SECONDS
        while not self._engine.is_idle:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(POLL_SECONDS)
        return True

    async def _compute(self, tokens: tuple[int, ...], terms: CacheTerms) -> None:
        stream = self._engine.submit(
            GenerationRequest(
                id=f"rewarm.{secrets.token_hex(6)}",
                prompt=tokens,
                boundaries=(),
                sampling=Sampling(),
                max_tokens=0,
                background=True,
                terms=replace(terms, pins=(), name=None, persist=False),
            )
        )
        async for event in stream:
            match event:
                case PromptEvaluated(n_prompt, n_cached):
                    _log.info(
                        "rewarm: prefilled %d tokens for the next turn's rendering, %d were cached",
                        n_prompt - n_cached,
                        n_cached,
                    )
                case Finished(StopCause.YIELDED):
                    _log.debug("rewarm: stopped, a request arrived")
