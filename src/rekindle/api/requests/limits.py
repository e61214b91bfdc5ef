"""Bounds on the lists and ids of a request. Each is far above what clients send; picked."""

from typing import Annotated

from pydantic import Field
from pydantic_core import PydanticCustomError

MAX_MESSAGES = 50_000  # messages of a conversation, or its items
MAX_PARTS = 10_000  # parts of one message, blocks of a system prompt
MAX_TOOLS = 4096  # in all, in one namespace or in a choice
MAX_CALLS = 4096  # of one message
MAX_DOCUMENTS = 10_000
MAX_BIASES = 2**16  # a large part of a vocabulary; a body may have few more members
MAX_OPTIONS = 64  # names that the API defines, in one list
MAX_REFERENCES = 4096  # to items of stored responses
MAX_ID_CHARS = 4096
MAX_STOP_CHARS = 1024  # each piece of a reply is compared with the stop strings

# An id, or another name that is looked up, hashed or logged.
Id = Annotated[str, Field(max_length=MAX_ID_CHARS)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


def check_id(value: object) -> None:
    """Raise a fault for an id that is too long. Other values than strings are no ids."""
    if isinstance(value, str) and len(value) > MAX_ID_CHARS:
        raise PydanticCustomError(
            "id_too_long", "An id should have at most {n} characters", {"n": MAX_ID_CHARS}
        )
