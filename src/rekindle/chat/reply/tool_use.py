"""Tools for one reply: the calls that are parsed, and the grammar that makes them valid."""

import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from sys import getsizeof
from threading import Lock
from typing import Any

from rekindle.bounded_cache import BoundedCache
from rekindle.chat.conversation import Conversation, Tool
from rekindle.chat.dialects.choice import DialectChoice
from rekindle.chat.dialects.derive.verify import WrittenCalls
from rekindle.chat.dialects.syntax.lark import Schemas, literals, usable_schemas
from rekindle.chat.prompt.canonical_tools import schemas_of
from rekindle.chat.prompt.prompt import Prompt
from rekindle.chat.reply.events import ReplyOptions, ToolChoice, ToolMode
from rekindle.errors import InvalidRequest
from rekindle.generation.request import (
    MAX_GRAMMAR_BYTES,
    Grammar,
    GrammarKind,
    GrammarStart,
    Landing,
    ReasoningLimit,
    Sampling,
)
from rekindle.generation.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

MAX_KEPT_BYTES = 16 * 2**20  # of sources; agents use a handful of sets of tools; picked
MAX_VERDICTS = 16_384  # on the schemas of single tools and parameters; picked

Check = Callable[[Grammar], None]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How one reply is sampled and parsed."""

    schemas: Schemas | None  # None: calls are not looked for
    sampling: Sampling
    streams: bool = False  # calls may be sent before they are whole


@dataclass(frozen=True, slots=True)
class GrammarProof:
    """What the grammars of calls make of the calls that the template writes."""

    n_accepted: int
    refused: tuple[str, ...]  # what they refuse
    constrains: bool  # False: they refuse plain calls, so calls are sampled without them


class ToolUses:
    """Plans the tool use of replies. `check` compiles a grammar, or raises InvalidRequest.

    `finishes_calls`: a call that has begun under a grammar is finished by force at the limit.
    """

    def __init__(
        self,
        choice: DialectChoice,
        tokenizer: Tokenizer,
        check: Check,
        *,
        finishes_calls: bool,
    ) -> None:
        self._dialect = choice.dialect
        self._written = choice.written
        self._tokenizer = tokenizer
        self._check = check
        self._finishes_calls = finishes_calls
        self._control_tokens = _control_tokens(tokenizer)
        self._literal = literals(self._control_tokens)
        self._lock = Lock()  # of the three caches
        self._grammars = BoundedCache[bytes, Grammar](max_bytes=MAX_KEPT_BYTES)
        self._verdicts = BoundedCache[bytes, bool](max_items=MAX_VERDICTS)
        # Grammars of whole replies that have been compiled or refused.
        self._settled = BoundedCache[bytes, bool](max_items=MAX_VERDICTS)
        self._proving = Lock()
        self.proof: GrammarProof | None = None  # None: not tried yet

    def clear(self) -> None:
        """Drop the grammars of clients' tools."""
        with self._lock:
            self._grammars.clear()
            self._verdicts.clear()
            self._settled.clear()

    def mark_bytes(self) -> dict[int, bytes]:
        """Return the text of the control tokens that the dialect uses; all others are hidden."""
        return {
            token: text.encode()
            for text, token in self._control_tokens.items()
            if any(text in mark for mark in self._dialect.marks)
        }

    def prove(self) -> GrammarProof:
        """Try the grammars on what the template writes. Blocks the first time.

        Raises what `check` raises if the engine is not available.
        """
        with self._proving:
            if self.proof is None:
                self.proof = self._tried()
            return self.proof

    def _tried(self) -> GrammarProof:
        refused = [each for each in self._written if not self._accepts(each)]
        proof = GrammarProof(
            n_accepted=len(self._written) - len(refused),
            refused=tuple(dict.fromkeys(each.what for each in refused)),
            constrains=not any(each.is_needed for each in refused),
        )
        if not proof.constrains:
            _log.warning(
                "tools: calls are not constrained to their schemas: the grammar refuses %s",
                ", ".join(proof.refused),
            )
        return proof

    def _accepts(self, written: WrittenCalls) -> bool:
        source = self._dialect.grammar(written.schemas, parallel=True, literal=self._literal)
        tokens = tuple(self._tokenizer.tokenize(written.text, parse_special=True))
        try:
            self._check(Grammar(GrammarKind.LARK, source, samples=(tokens,)))
        except InvalidRequest as error:
            _log.debug("tools: %s: %s", written.what, error.message)
            return False
        return True

    def is_settled(self, prompt: Prompt, options: ReplyOptions) -> bool:
        """Return whether the reply's grammar has been compiled before, so `plan` is quick."""
        if (grammar := options.sampling.grammar) is not None:
            n_bytes, key = len(grammar.source), partial(_format_key, grammar)
        elif prompt.conversation is not None:
            tools = _tools_of(prompt.conversation, options.tool_choice)
            n_bytes = sum(len(tool.definition_json) for tool in tools)
            key = partial(_tools_key, tools, options.tool_choice)
        else:
            return True
        if n_bytes > MAX_GRAMMAR_BYTES:
            return False
        with self._lock:
            return self._settled.get(key()) is not None

    def plan(self, prompt: Prompt, options: ReplyOptions, check: Check | None = None) -> ToolUse:
        """Return how the reply is sampled and parsed. Blocks while grammars compile.

        Raises InvalidRequest for a grammar that cannot be compiled. `check` compiles the grammars
        of this reply; None: as all others.
        """
        check = check or self._check
        sampling = options.sampling
        choice = options.tool_choice
        conversation = prompt.conversation
        if conversation is not None and options.reasoning_budget is not None:
            limit = self._reasoning_limit(prompt, options.reasoning_budget)
            sampling = replace(sampling, reasoning_limit=limit)
        if conversation is None:
            if sampling.grammar is not None:
                self._check_format(sampling.grammar, check)
            return ToolUse(None, sampling)
        start = self._outside_reasoning(prompt)
        if sampling.grammar is not None:
            grammar = replace(sampling.grammar, start=start)
            self._check_format(grammar, check)
            return ToolUse(None, replace(sampling, grammar=grammar))
        if not conversation.callable_tools:
            return ToolUse(None, sampling)
        if choice.mode is ToolMode.NONE:
            bias = (*sampling.logit_bias, *self._against_calls())
            return ToolUse(None, replace(sampling, logit_bias=bias))
        tools = _tools_of(conversation, choice)
        self._check_patterns(tools, check)
        schemas = schemas_of(tools)
        if choice.mode is ToolMode.AUTO:
            if sampling.ignore_eos:  # a complete call must be able to end
                return ToolUse(schemas, sampling)
            start = replace(start, triggers=self._dialect.triggers_for(schemas))
        if choice.mode is ToolMode.AUTO and not self.prove().constrains:
            return ToolUse(schemas, sampling)
        try:
            key = _tools_key(tools, choice)
            grammar = replace(self._grammar(tools, key, check, choice), start=start)
            self._settle(key, grammar, check)
        except InvalidRequest as error:
            if choice.mode is ToolMode.REQUIRED:
                raise InvalidRequest(error.message, "tools") from error
            _log.warning("tools: calls are not constrained to their schemas: %s", error.message)
            return ToolUse(schemas, sampling)
        return ToolUse(schemas, replace(sampling, grammar=grammar), self._finishes_calls)

    def _check_patterns(self, tools: tuple[Tool, ...], check: Check) -> None:
        """Refuse tools whose arguments have a pattern that cannot be compiled."""
        for tool in tools:
            for _, pattern in tool.patterns:
                try:
                    check(Grammar(GrammarKind.REGEX, pattern))
                except InvalidRequest as error:
                    message = f"The format of the tool `{tool.name}`: {error.message}"
                    raise InvalidRequest(message, "tools") from error

    def _outside_reasoning(self, prompt: Prompt) -> GrammarStart:
        marks = self._dialect.reasoning
        if marks is None:
            return GrammarStart()
        return GrammarStart(
            quiet=(marks.opening.strip(), marks.closing.strip()),
            quiet_anywhere=marks.anywhere,
            begins_quiet=prompt.begins_in_reasoning,
        )

    def _reasoning_limit(self, prompt: Prompt, max_tokens: int) -> ReasoningLimit | None:
        marks = self._dialect.reasoning
        if marks is None:
            return None
        return ReasoningLimit(
            max_tokens=max_tokens,
            opening=marks.opening,
            closing=marks.closing,
            anywhere=marks.anywhere,
            begins_inside=prompt.begins_in_reasoning,
        )

    def _check_format(self, grammar: Grammar, check: Check) -> None:
        """Check the format that the client asks for. The error names the client's field."""
        try:
            self._settle(_format_key(grammar), grammar, check)
        except InvalidRequest as error:
            raise InvalidRequest(f"`{grammar.field}`: {error.message}", grammar.field) from error

    def _settle(self, key: bytes, grammar: Grammar, check: Check) -> None:
        """Check the grammar, and note that it was compiled or refused."""
        refusal: InvalidRequest | None = None
        try:
            check(grammar)
        except InvalidRequest as error:
            refusal = error
        with self._lock:
            self._settled.put(key, refusal is None)
        if refusal is not None:
            raise refusal

    def _grammar(
        self, tools: tuple[Tool, ...], key: bytes, check: Check, choice: ToolChoice
    ) -> Grammar:
        """Return the grammar of calls of these tools. Raises InvalidRequest if it is too large."""
        n_bytes = sum(len(tool.definition_json) for tool in tools)
        if n_bytes > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(
                f"The tools have {n_bytes:,} bytes; at most {MAX_GRAMMAR_BYTES:,} are compiled."
            )
        with self._lock:
            known = self._grammars.get(key)
        if known is not None:
            return known
        schemas = schemas_of(tools)
        usable = usable_schemas(schemas, lambda schema: self._compiles(json.dumps(schema), check))
        source = self._dialect.grammar(usable, parallel=choice.parallel, literal=self._literal)
        names = _required_names(schemas)
        landing = Landing(names) if self._finishes_calls else None
        grammar = Grammar(GrammarKind.LARK, source, landing=landing)
        with self._lock:
            n_kept = getsizeof(source) + sum(map(getsizeof, names))
            self._grammars.put(key, grammar, n_bytes=n_kept)
        return grammar

    def _compiles(self, schema_json: str, check: Check) -> bool:
        key = _digest(schema_json)
        with self._lock:
            verdict = self._verdicts.get(key)
        if verdict is None:
            try:
                check(Grammar(GrammarKind.JSON_SCHEMA, schema_json))
                verdict = True
            except InvalidRequest:
                verdict = False
            with self._lock:
                self._verdicts.put(key, verdict)
        return verdict

    def _against_calls(self) -> list[tuple[int, float]]:
        """Return biases that forbid the single tokens that only begin a call."""
        tokens = [
            self._tokenizer.tokenize(trigger.text, parse_special=True)
            for trigger in self._dialect.triggers_for(())
            if not trigger.at_start
        ]
        return [(each[0], -math.inf) for each in tokens if len(each) == 1]


def _tools_of(conversation: Conversation, choice: ToolChoice) -> tuple[Tool, ...]:
    """Return the tools that the reply may call."""
    tools = conversation.callable_tools
    return tuple(tool for tool in tools if not choice.names or tool.name in choice.names)


def _tools_key(tools: tuple[Tool, ...], choice: ToolChoice) -> bytes:
    definitions = [tool.definition_json for tool in tools]
    patterns = [pattern for tool in tools for _, pattern in tool.patterns]
    return _digest("tools", str(choice.parallel), *definitions, *patterns)


def _format_key(grammar: Grammar) -> bytes:
    return _digest("format", str(grammar.kind), grammar.source)


def _digest(*texts: str) -> bytes:
    digest = blake2b(digest_size=16)
    for text in texts:
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def _required_names(schema: Any) -> tuple[str, ...]:
    """Return the names of all required members in the schema, in order, each once."""
    names: dict[str, None] = {}
    waiting: list[Any] = [schema]
    while waiting:
        match waiting.pop():
            case dict() as members:
                required = members.get("required")
                if isinstance(required, list):
                    names |= dict.fromkeys(each for each in required if isinstance(each, str))
                waiting += reversed(members.values())
            case list() as items:
                waiting += reversed(items)
    return tuple(names)


def _control_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the special strings that are single tokens."""
    found = {}
    for text in tokenizer.special_strings:
        tokens = tokenizer.tokenize(text, parse_special=True)
        if len(tokens) == 1:
            found[text] = tokens[0]
    return found
