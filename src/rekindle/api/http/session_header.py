"""The x-rekindle-session header, by which a router keeps a conversation at one server.

A reply carries the session of its request. If the client names none, the reply carries a name
made from the beginning of the conversation, which all its turns share. That name is for routing:
no session is recorded under it unless the client sends it back.
"""

from hashlib import blake2b
from urllib.parse import quote

from starlette.types import Scope

from rekindle.chat.conversation import Conversation, Role

SESSION_HEADER = "x-rekindle-session"
SCOPE_KEY = "rekindle_session"  # key of the header's value in the ASGI scope
VISIBLE = "".join(map(chr, range(0x21, 0x7F))).replace("%", "")
BEGINNING_CHARS = 1024  # of raw text; shorter prompts are cheap on any server; picked
DIGEST_BYTES = 8


def show_session(scope: Scope, session: str) -> None:
    scope[SCOPE_KEY] = quote(session, safe=VISIBLE)


def conversation_name(begins: Conversation | str) -> str:
    """Name a conversation or raw text by its beginning."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    for text in [begins[:BEGINNING_CHARS]] if isinstance(begins, str) else _beginning(begins):
        digest.update(text.encode("utf-8", "surrogatepass"))
        digest.update(b"\0")
    return f"conversation-{digest.hexdigest()}"


def _beginning(conversation: Conversation) -> list[str]:
    """List the texts of the tools and of all messages up to the first user message."""
    texts = [tool.definition_json for tool in conversation.tools]
    for message in conversation.messages:
        texts += [message.role, message.text]
        if message.role is Role.USER:
            break
    return texts
