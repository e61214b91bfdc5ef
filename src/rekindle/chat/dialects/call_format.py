"""How a model writes its calls, as data. Readers and grammars of calls are made from it.

White space in literal text is optional when a call is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto


class Slot(Enum):
    """A place in the text of a call that differs from call to call."""

    NAME = auto()  # of the tool
    ARGUMENTS = auto()
    ID = auto()  # that results refer to
    INDEX = auto()  # among the calls of the reply


class MemberSlot(Enum):
    """A place in the text of one argument."""

    KEY = auto()
    VALUE = auto()
    TYPE = auto()  # the value's JSON type, by `Members.type_names`


class Strings(Enum):
    RAW = auto()  # without quotes: the text behind the value ends it
    JSON = auto()
    PYTHON = auto()  # in quotes of either kind
    MARKED = auto()  # between `ValueForm.string_marks`


class Nested(Enum):
    """How arrays and objects are written."""

    JSON = auto()
    PYTHON = auto()
    BARE = auto()  # brackets and commas, with keys without quotes: {key:value,key:[value]}
    TAGS = auto()  # like members: each member or element in a tag of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueForm:
    """How one value is written. Numbers are JSON's."""

    strings: Strings = Strings.RAW
    string_marks: tuple[str, str] = ("", "")  # RAW: they may surround a string; MARKED: they must
    constants: Mapping[object, str] = field(
        default_factory=lambda: {True: "true", False: "false", None: "null"}
    )
    nested: Nested = Nested.JSON
    element_key: str = ""  # of an array's elements, for TAGS


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """Arguments that are written one by one."""

    opening: str = ""
    member: tuple[str | MemberSlot, ...]
    separator: str = ""
    closing: str = ""
    value: ValueForm = ValueForm()
    type_names: Mapping[str, str] = field(default_factory=dict)  # of a JSON type, for TYPE
    sorted_keys: bool = False  # in the order of the alphabet; otherwise as the model likes


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """The calls of one reply: opening, call, separator, call, closing."""

    opening: str = ""  # once, before the first call
    call: tuple[str | Slot, ...]
    separator: str = ""  # between calls
    closing: str = ""  # once, behind the last call
    members: Members | None = None  # None: the arguments are one JSON object
    id_pattern: str = "[a-zA-Z0-9_-]{1,64}"
    first_index: int = 0
    indent: int = 0  # spaces per level where JSON is spread over lines
    at_start: bool = False  # calls only begin the reply: their opening could be any JSON
