"""Small chat templates, each with one habit of a published one, for tests of remembered turns.

`at_head`, `at_body` and `at_end` are marks that an oracle may ask for: where an assistant turn's
header begins, where its own text does, and where that ends. Unasked, nothing is written there.
"""

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    CHATML = "chatml"
    THINKING = "thinking"  # shows reasoning behind the last user message only
    SWITCHED = "switched"  # the same, and can be told to show all of it
    OPENED = "opened"  # the generation prompt opens the reasoning
    TRIMMED = "trimmed"
    BARE = "bare"  # no control strings at all
    EMPTY_THOUGHT = "empty_thought"  # history shows a thought where there was none
    CALLS_ALONE = "calls_alone"  # leaves out what was said beside calls


_TOOLS = """\
{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
{{- 'Write <tool_call> around a call.<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
"""
_CALLS = """\
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + {'name': call.function.name, 'arguments': call.function.arguments}
    | tojson + '\\n</tool_call>' }}
{%- endfor %}
"""
_OTHERS = """\
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
"""


def _chatml(
    turn: str, *, head: str = "<|im_start|>assistant\\n", opening: str = "", others: str = _OTHERS
) -> str:
    return (
        _TOOLS
        + "{%- for m in messages %}{%- if m.role == 'assistant' %}"
        + f"{{{{- at_head }}}}{{{{- '{head}' }}}}{{{{- at_body }}}}"
        + turn
        + "{{- at_end }}{{- '<|im_end|>\\n' }}"
        + others
        + "{%- if add_generation_prompt %}"
        + f"{{{{- at_head }}}}{{{{- '{head}{opening}' }}}}"
        + "{%- if enable_thinking is defined and not enable_thinking %}"
        + "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
    )


_THOUGHT = "{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}"
_SHOWN = f"{{%- if m.reasoning_content and CONDITION %}}{_THOUGHT}{{%- endif %}}"
_CONTENT, _TRIMMED_CONTENT = "{{- m.content }}", "{{- m.content | trim }}"
_ALONE = """\
{%- if loop.index0 and messages[loop.index0 - 1].role == 'assistant' %}
{{- raise_exception('Turns must alternate.') }}{%- endif %}
{%- if m.tool_calls %}{{- '[TOOL_CALLS][' }}{%- for call in m.tool_calls %}
{{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
{{- ', ' if not loop.last }}{%- endfor %}{{- ']' }}
{%- else %}{{- m.content }}{%- endif %}
"""


def _shown(condition: str) -> str:
    return _SHOWN.replace("CONDITION", condition)


_LAST = "loop.index0 > ns.last"
SOURCES = {
    Kind.CHATML: """\
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{- at_head }}{{- '<|im_start|>assistant\\n' }}{{- at_body }}
{{- m.content }}{{- at_end }}{{- '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- at_head }}{{- '<|im_start|>assistant\\n' }}{%- endif %}
""",
    Kind.THINKING: _chatml(_shown(_LAST) + _TRIMMED_CONTENT + _CALLS),
    Kind.SWITCHED: _chatml(_shown(f"(preserve_thinking or {_LAST})") + _CONTENT + _CALLS),
    Kind.OPENED: _chatml(_shown("true") + _CONTENT + _CALLS, opening="<think>\\n"),
    Kind.TRIMMED: _chatml(
        _shown("true") + _TRIMMED_CONTENT + _CALLS,
        others=_OTHERS.replace("m.content", "(m.content | trim)"),
    ),
    Kind.BARE: """\
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{- at_head }}{{- 'ASSISTANT: ' }}{{- at_body }}
{{- m.content }}{{- at_end }}{{- '\\n' }}
{%- else %}{{- 'USER: ' + m.content + '\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- at_head }}{{- 'ASSISTANT: ' }}{%- endif %}
""",
    Kind.EMPTY_THOUGHT: _chatml(
        f"{{%- if m.reasoning_content and {_LAST} %}}{_THOUGHT}"
        + "{%- else %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
        + _TRIMMED_CONTENT
        + _CALLS
    ),
    Kind.CALLS_ALONE: _chatml(_ALONE),
}


@dataclass(frozen=True)
class Habits:
    """The format of replies to a template."""

    opens_reasoning: bool = False
    lists_calls: bool = False


def habits(kind: Kind) -> Habits:
    return Habits(opens_reasoning=kind is Kind.OPENED, lists_calls=kind is Kind.CALLS_ALONE)
