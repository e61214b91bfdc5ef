"""Tools for one reply: the calls that are parsed, and the grammar that makes them valid."""

import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from rekindle.chat.conversation import Tool
from rekindle.chat.dialects.base import Dialect
from rekindle.chat.dialects.syntax.lark import Schemas, literals, usable_schemas
from rekindle.chat.prompt.prompt import Prompt, schemas_of
from rekindle.chat.reply.events import ReplyOptions, ToolMode
from rekindle.errors import InvalidRequest
from rekindle.generation.request import Grammar, GrammarKind, GrammarStart, Sampling
from rekindle.generation.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

MAX_GRAMMARS = 64  # agents use a handful of sets of tools; picked


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How one reply is sampled and parsed."""

    schemas: Schemas | None  # None: calls are not looked for
    sampling: Sampling


class ToolUses:
    """Plans the tool use of replies. `check` compiles a grammar, or raises InvalidRequest."""

    def __init__(
        self, dialect: Dialect, tokenizer: Tokenizer, check: Callable[[Grammar], None]
    ) -> None:
        self._dialect = dialect
        self._tokenizer = tokenizer
        self._check = check
        self._control_tokens = _control_tokens(tokenizer)
        self._literal = literals(self._control_tokens)
        self._source = lru_cache(MAX_GRAMMARS)(self._make_source)
        self._is_usable = lru_cache(1024)(self._compiles)

    def mark_bytes(self) -> dict[int, bytes]:
        """Return the text of the control tokens that the dialect uses; all others are hidden."""
        marks: list[str] = []  # every fixed string of the dialect

        def literal(text: str) -> str:
            marks.append(text)
            return '""'

        self._dialect.grammar({"name": {"type": "object"}}, parallel=True, literal=literal)
        marks += [trigger.text for trigger in self._dialect.triggers]
        marks += self._dialect.hidden + self._dialect.hidden_at_edges
        if self._dialect.reasoning is not None:
            marks += [self._dialect.reasoning.opening, self._dialect.reasoning.closing]
        return {
            token: text.encode()
            for text, token in self._control_tokens.items()
            if any(text in mark for mark in marks)
        }

    def plan(self, prompt: Prompt, options: ReplyOptions) -> ToolUse:
        """Return how the reply is sampled and parsed. Blocks while grammars compile.

        Raises InvalidRequest for a grammar that cannot be compiled.
        """
        sampling = options.sampling
        choice = options.tool_choice
        conversation = prompt.conversation
        if conversation is None:
            if sampling.grammar is not None:
                self._check(sampling.grammar)
            return ToolUse(None, sampling)
        start = self._outside_reasoning(prompt)
        if sampling.grammar is not None:
            grammar = replace(sampling.grammar, start=start)
            self._check(grammar)
            return ToolUse(None, replace(sampling, grammar=grammar))
        if not conversation.callable_tools:
            return ToolUse(None, sampling)
        if choice.mode is ToolMode.NONE:
            bias = (*sampling.logit_bias, *self._against_calls())
            return ToolUse(None, replace(sampling, logit_bias=bias))
        tools = tuple(
            tool
            for tool in conversation.callable_tools
            if not choice.names or tool.name in choice.names
        )
        schemas = schemas_of(tools)
        if choice.mode is ToolMode.AUTO:
            if sampling.ignore_eos:  # a complete call must be able to end
                return ToolUse(schemas, sampling)
            start = replace(start, triggers=self._dialect.triggers)
        grammar = Grammar(GrammarKind.LARK, self._source(tools, choice.parallel), start)
        try:
            self._check(grammar)
        except InvalidRequest as error:
            if choice.mode is ToolMode.REQUIRED:
                raise InvalidRequest(error.message, "tools") from error
            _log.warning("tools: calls are not constrained to their schemas: %s", error.message)
            return ToolUse(schemas, sampling)
        return ToolUse(schemas, replace(sampling, grammar=grammar))

    def _outside_reasoning(self, prompt: Prompt) -> GrammarStart:
        marks = self._dialect.reasoning
        if marks is None:
            return GrammarStart()
        return GrammarStart(
            quiet=(marks.opening.strip(), marks.closing.strip()),
            quiet_anywhere=marks.anywhere,
            begins_quiet=prompt.begins_in_reasoning,
        )

    def _make_source(self, tools: tuple[Tool, ...], parallel: bool) -> str:  # noqa: FBT001
        usable = usable_schemas(
            schemas_of(tools), lambda schema: self._is_usable(json.dumps(schema))
        )
        return self._dialect.grammar(usable, parallel=parallel, literal=self._literal)

    def _compiles(self, schema_json: str) -> bool:
        try:
            self._check(Grammar(GrammarKind.JSON_SCHEMA, schema_json))
        except InvalidRequest:
            return False
        return True

    def _against_calls(self) -> list[tuple[int, float]]:
        """Return biases that forbid the single tokens that only begin a call."""
        tokens = [
            self._tokenizer.tokenize(trigger.text, parse_special=True)
            for trigger in self._dialect.triggers
            if not trigger.at_start
        ]
        return [(each[0], -math.inf) for each in tokens if len(each) == 1]


def _control_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the special strings that are single tokens."""
    found = {}
    for text in tokenizer.special_strings:
        tokens = tokenizer.tokenize(text, parse_special=True)
        if len(tokens) == 1:
            found[text] = tokens[0]
    return found
