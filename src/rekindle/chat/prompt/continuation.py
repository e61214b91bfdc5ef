"""The messages after a reply whose tokens are given: only what the template adds is rendered."""

from dataclasses import replace

from rekindle.chat.conversation import Conversation, Message, Role, Text
from rekindle.chat.prompt.layout import Layout
from rekindle.chat.template.guard import PromptPiece
from rekindle.chat.template.template import ChatTemplate
from rekindle.errors import InvalidRequest

_ASKED, _REPLY = "an earlier question", "an earlier reply"


def pieces_after_reply(template: ChatTemplate, conversation: Conversation) -> list[PromptPiece]:
    """Render the messages as if they followed a reply. Begin with the end of that reply."""
    earlier = (Message(Role.USER, (Text(_ASKED),)), Message(Role.ASSISTANT, (Text(_REPLY),)))
    whole = replace(conversation, messages=(*earlier, *conversation.messages))
    layout = Layout(template.render(whole, add_generation_prompt=True), template.guard)
    place = layout.text.find(_REPLY)
    if place < 0:
        raise InvalidRequest("The chat template leaves no way to continue these tokens.")
    return [piece for _, piece in layout.cut(place + len(_REPLY), len(layout.text))]
