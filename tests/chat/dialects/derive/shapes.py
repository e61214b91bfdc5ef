"""Small templates, one for each way of writing calls. No published template is copied."""

from dataclasses import dataclass

from rekindle.chat.template.guard import Guard
from rekindle.chat.template.template import ChatTemplate

# `{turn}` is the body of an assistant turn, `{prompt}` what a generation prompt adds.
CHAT = """\
{{%- for tool in tools or [] %}}(tool {{{{ tool.function.name }}}}){{%- endfor %}}
{{%- for message in messages %}}
    {{%- if message.role == 'assistant' %}}
        {{{{- '<~assistant~>' }}}}{turn}{{{{- '{end}' }}}}
    {{%- elif message.role == 'tool' %}}
        {{{{- '<~tool~>' + message.content + '<~over~>' }}}}
    {{%- else %}}
        {{{{- '<~' + message.role + '~>' + message.content + '<~over~>' }}}}
    {{%- endif %}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- '<~assistant~>{prompt}' }}}}{{%- endif %}}
"""
THINKING = """\
{%- if message.reasoning_content %}
    {{- '<muse>' + message.reasoning_content + '</muse>' }}
{%- endif %}"""


@dataclass(frozen=True)
class Shape:
    """`calls` is written behind the text. It may use `call` inside a loop of its own."""

    calls: str
    before_text: str = ""
    behind_text: str = ""
    prompt: str = ""
    end: str = "<~over~>"

    @property
    def source(self) -> str:
        text = f"{{{{- '{self.before_text}' + message.content + '{self.behind_text}' }}}}"
        said = f"{{%- if message.content %}}{text}{{%- endif %}}"
        calls = f"{{%- if message.tool_calls %}}{self.calls}{{%- endif %}}"
        return CHAT.format(turn=THINKING + said + calls, prompt=self.prompt, end=self.end)

    @property
    def template(self) -> ChatTemplate:
        return loaded(self.source)


def loaded(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos_text="<s>", eos_text="</s>", guard=Guard(()))


def each(body: str, *, separator: str = "") -> str:
    """Write every call. `name`, `arguments` and `index` are defined in the body."""
    between = f"{{%- if not loop.last %}}{{{{- '{separator}' }}}}{{%- endif %}}"
    return (
        "{%- for call in message.tool_calls %}"
        "{%- set name = call.function.name %}{%- set arguments = call.function.arguments %}"
        "{%- set index = loop.index0 %}"
        f"{body}{between if separator else ''}"
        "{%- endfor %}"
    )


def members(body: str, *, separator: str = "") -> str:
    """Write every argument. `key` and `value` are defined in the body."""
    between = f"{{%- if not loop.last %}}{{{{- '{separator}' }}}}{{%- endif %}}"
    return (
        f"{{%- for key, value in arguments.items() %}}{body}{between if separator else ''}"
        "{%- endfor %}"
    )


JSON_OBJECT = """{{- '{"does": "' + name + '", "with": ' + arguments | tojson + '}' }}"""
RAW = "{{- value if value is string else value | tojson }}"
NESTED_TAGS = """\
{%- macro tagged(key, value) %}
    {{- '<@' + key + '>' }}
    {%- if value is mapping %}{%- for k, v in value.items() %}{{- tagged(k, v) }}{%- endfor %}
    {%- elif value is string %}{{- value }}
    {%- elif value is iterable %}{%- for v in value %}{{- tagged('bit', v) }}{%- endfor %}
    {%- else %}{{- value | tojson }}
    {%- endif %}
    {{- '<@/' + key + '>' }}
{%- endmacro %}"""
BARE = """\
{%- macro bare(value) %}
    {%- if value is mapping %}
        {{- '{' }}
        {%- for k, v in value | dictsort %}{{- k + ':' + bare(v) }}
            {%- if not loop.last %},{%- endif %}{%- endfor %}
        {{- '}' }}
    {%- elif value is string %}{{- '<^>' + value + '<^>' }}
    {%- elif value is iterable %}
        {{- '[' }}
        {%- for v in value %}{{- bare(v) }}{%- if not loop.last %},{%- endif %}{%- endfor %}
        {{- ']' }}
    {%- else %}{{- value | tojson }}
    {%- endif %}
{%- endmacro %}"""

SHAPES = {
    "an object between tags": Shape(
        each("{{- '\\n<act>\\n' }}" + JSON_OBJECT + "{{- '\\n</act>' }}")
    ),
    "a list of objects": Shape(
        "{{- '<acts>[' }}" + each(JSON_OBJECT, separator=", ") + "{{- ']</acts>' }}"
    ),
    "a list with ids": Shape(
        "{{- '[ACTS][' }}"
        + each(
            """{{- '{"with": ' + arguments | tojson + ', "ref": "' + call.id + '", "does": "' }}"""
            """{{- name + '"}' }}""",
            separator=", ",
        )
        + "{{- ']' }}"
    ),
    "numbered calls": Shape(
        "{{- '<|acts|>' }}"
        + each("{{- '<|act|>' + name + ':' ~ index ~ '<|with|>' + arguments | tojson }}")
        + "{{- '<|no more|>' }}"
    ),
    "an object without marks": Shape(each(JSON_OBJECT, separator="; ")),
    "a name and an object behind marks": Shape(
        each("{{- '[ACT]' + name + '[WITH]' + arguments | tojson }}")
    ),
    "headers around text and calls": Shape(
        "{{- '<|begin|>acts<|go|>' }}"
        + each(
            """{{- '<|begin|>act of="' + name + '"<|go|>' + arguments | tojson }}"""
            "{{- '<|end|>act<|go|>' }}"
        )
        + "{{- '<|end|>acts<|go|>' }}",
        before_text="<|begin|>words<|go|>",
        behind_text="<|end|>words<|go|>",
        end="<|end|>turn<|go|>",
    ),
    "a prompt that opens reasoning": Shape(
        each("{{- '<act>' }}" + JSON_OBJECT + "{{- '</act>' }}"), prompt="<muse>"
    ),
    "only the first call": Shape(
        "{%- set call = message.tool_calls[0] %}{%- set name = call.function.name %}"
        "{%- set arguments = call.function.arguments %}"
        "{{- '<act>' }}" + JSON_OBJECT
    ),
}
# Arguments that are written one by one.
SHAPES |= {
    "tags of keys and values": Shape(
        each(
            "{{- '\\n<act>' + name }}"
            + members("{{- '\\n<k>' + key + '</k>\\n<v>' }}" + RAW + "{{- '</v>' }}")
            + "{{- '\\n</act>' }}"
        )
    ),
    "a tag for each argument": Shape(
        each(
            "{{- '\\n<act>\\n<does=' + name + '>\\n' }}"
            + members("{{- '<given=' + key + '>\\n' }}" + RAW + "{{- '\\n</given>\\n' }}")
            + "{{- '</does>\\n</act>' }}"
        )
    ),
    "arguments with types": Shape(
        "{{- '<acts>\\n' }}"
        + each(
            """{{- '<act does="' + name + '">\\n' }}"""
            + members(
                """{{- '<given key="' + key + '" words="' }}"""
                """{{- 'yes' if value is string else 'no' }}{{- '">' }}"""
                + RAW
                + "{{- '</given>\\n' }}"
            )
            + "{{- '</act>\\n' }}"
        )
        + "{{- '</acts>' }}"
    ),
    "calls in Python": Shape(
        "{{- '<|act|>[' }}"
        + each(
            "{{- name + '(' }}"
            + members("{{- key ~ '=' ~ '%r' | format(value) }}", separator=", ")
            + "{{- ')' }}",
            separator=", ",
        )
        + "{{- ']<|/act|>' }}"
    ),
    "strings between marks": Shape(
        BARE + each("{{- '<act>does:' + name + bare(arguments) + '</act>' }}")
    ),
    "nested tags": Shape(
        NESTED_TAGS
        + each(
            "{{- '<@act><@does ' + name + '>' }}"
            + members("{{- tagged(key, value) }}")
            + "{{- '<@/does><@/act>' }}"
        )
    ),
}
