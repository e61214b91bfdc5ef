"""x-rekindle-session: a name by which whoever is in front keeps a conversation at one server.

In a reply it is the session of the request. A client that names none is told a name made from
how its conversation begins, which all its turns have in common. That one is to route by only:
unless the client sends it back, nothing is counted under it.
"""

from hashlib import blake2b
from urllib.parse import quote, unquote

from starlette.types import Scope

from rekindle.chat.conversation import Conversation, Role

SESSION_HEADER = "x-rekindle-session"
SCOPE_KEY = "rekindle_session"  # where a request keeps what its reply will say
VISIBLE = "".join(map(chr, range(0x21, 0x7F))).replace("%", "")
BEGINNING_CHARS = 1024  # of raw text; what is shorter costs little anywhere; picked
DIGEST_BYTES = 8


def show_session(scope: Scope, session: str) -> None:
    scope[SCOPE_KEY] = quote(session, safe=VISIBLE)


def session_in(value: str) -> str:
    """What `show_session` made of it, undone."""
    return unquote(value)


def conversation_name(begins: Conversation | str) -> str:
    """Of a conversation or of raw text."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    for text in [begins[:BEGINNING_CHARS]] if isinstance(begins, str) else _beginning(begins):
        digest.update(text.encode("utf-8", "surrogatepass"))
        digest.update(b"\0")
    return f"conversation-{digest.hexdigest()}"


def _beginning(conversation: Conversation) -> list[str]:
    """Tools and all messages up to the first of the user."""
    texts = [tool.definition_json for tool in conversation.tools]
    for message in conversation.messages:
        texts += [message.role, message.text]
        if message.role is Role.USER:
            break
    return texts
