"""Responses that are kept, to be read, to be gone on from, and to be deleted."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from rekindle.cache.responses.store import MemoryResponses
from rekindle.chat.conversation import Message, Role, Text, ToolCall, ToolResult
from rekindle.chat.reply.events import FinishReason, ReplyReasoning, ReplyText
from rekindle.errors import TierFailed
from rekindle.generation.forgetting import UNKNOWN_OWNER, Tombstones
from rekindle.generation.stored_responses import StoredResponse
from tests.api.client import app_of, client_of
from tests.api.fakes import HELLO, FakeResponder, Script, calling, done

URL = "/v1/responses"
CALLING: Script = (
    ReplyReasoning("Hm."),
    ReplyText("Let me see."),
    *calling(0, "call_1", "agents__f", '{"a":  1}'),
    done(finish=FinishReason.TOOL_CALLS),
)
AGENTS = {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "f"}]}

Story = Callable[[httpx.AsyncClient], Awaitable[None]]


def tell(story: Story, responder: FakeResponder | None = None) -> None:
    async def run() -> None:
        async with client_of(responder or FakeResponder()) as client:
            await story(client)

    asyncio.run(run())


async def create(client: httpx.AsyncClient, **fields: Any) -> Any:
    reply = await client.post(URL, json={"input": "hi", **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_continues_from_its_last_response(stream: bool) -> None:  # noqa: FBT001
    responder = FakeResponder(lambda i: CALLING if i == 0 else HELLO)

    async def story(client: httpx.AsyncClient) -> None:
        fields = {"instructions": "Once.", "tools": [AGENTS], "stream": stream}
        reply = await client.post(URL, json={"input": "hi", **fields})
        first_id = _response_id(reply)
        output = {"type": "function_call_output", "call_id": "call_1", "output": "4"}
        second = await create(client, input=[output], previous_response_id=first_id)
        assert second["previous_response_id"] == first_id
        await create(client, input="Thanks", previous_response_id=second["id"])

    tell(story, responder)
    first, _, third = (conversation.messages for conversation in responder.conversations)
    assert first[0] == Message(Role.SYSTEM, (Text("Once."),))
    user, said, result, answer, thanks = third  # instructions are not carried over
    assert user == Message(Role.USER, (Text("hi"),))
    assert (said.reasoning, said.text) == ("Hm.", "Let me see.")
    assert said.calls == (ToolCall("call_1", "agents__f", '{"a":  1}'),)
    assert result.parts == (ToolResult("call_1", None, "4"),)
    assert (answer.text, thanks.text) == ("Hello", "Thanks")


def test_a_response_is_read_and_deleted() -> None:
    async def story(client: httpx.AsyncClient) -> None:
        made = await create(client)
        one = f"{URL}/{made['id']}"
        assert (await client.get(one)).json() == made
        deleted = await client.delete(one)
        assert deleted.json() == {"id": made["id"], "object": "response", "deleted": True}
        for reply in (await client.get(one), await client.delete(one)):
            assert reply.status_code == 404
            assert reply.json()["error"]["code"] == "not_found"

    tell(story)


def test_store_false_stores_nothing() -> None:
    async def story(client: httpx.AsyncClient) -> None:
        made = await create(client, store=False)
        assert made["store"] is False
        assert (await client.get(f"{URL}/{made['id']}")).status_code == 404
        reply = await client.post(URL, json={"input": "a", "previous_response_id": made["id"]})
        assert reply.status_code == 404
        error = reply.json()["error"]
        assert error["code"] == "previous_response_not_found"
        assert error["param"] == "previous_response_id"

    tell(story)


def test_a_reply_that_fails_is_not_stored() -> None:
    responder = FakeResponder((ReplyText("a"), ValueError("no")))

    async def story(client: httpx.AsyncClient) -> None:
        reply = await client.post(URL, json={"input": "hi", "stream": True})
        assert (await client.get(f"{URL}/{_response_id(reply)}")).status_code == 404

    tell(story, responder)


def test_items_are_listed_newest_first_and_by_page() -> None:
    async def story(client: httpx.AsyncClient) -> None:
        first = await create(client)
        second = await create(client, input="more", previous_response_id=first["id"])
        url = f"{URL}/{second['id']}/input_items"
        texts = [_text(item) for item in (await client.get(url)).json()["data"]]
        assert texts == ["more", "Hello", "hi"]
        page = (await client.get(url, params={"order": "asc", "limit": 2})).json()
        assert [_text(item) for item in page["data"]] == ["hi", "Hello"]
        assert page["has_more"] is True
        rest = {"order": "asc", "after": page["last_id"]}
        page = (await client.get(url, params=rest)).json()
        assert [_text(item) for item in page["data"]] == ["more"]
        assert page["has_more"] is False
        assert (await client.get(url, params={"limit": "0"})).status_code == 400

    tell(story)


def test_items_are_found_by_their_ids() -> None:
    responder = FakeResponder(lambda i: CALLING if i == 0 else HELLO)

    async def story(client: httpx.AsyncClient) -> None:
        first = await create(client, tools=[AGENTS])
        ids = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
        output = {"type": "function_call_output", "call_id": "call_1", "output": "4"}
        user = (await client.get(f"{URL}/{first['id']}/input_items")).json()["data"][0]
        await create(client, input=[{"id": user["id"]}, *ids, output])
        unknown = {"type": "item_reference", "id": ids[0]["id"] + "0"}
        reply = await client.post(URL, json={"input": [unknown]})
        assert (reply.status_code, reply.json()["error"]["param"]) == (404, "input.0.id")

    tell(story, responder)
    user, said, result = responder.conversations[1].messages
    assert user.text == "hi"
    assert (said.reasoning, said.text, len(said.calls)) == ("Hm.", "Let me see.", 1)
    assert result.role is Role.TOOL


def _response_id(reply: httpx.Response) -> str:
    found = reply.text.partition('"id":"resp_')[2]
    return f"resp_{found[:32]}"


def _text(item: Any) -> str:
    content = item["content"]
    return str(content if isinstance(content, str) else content[0]["text"])


class CountedResponses(MemoryResponses):
    def __init__(self) -> None:
        super().__init__(Tombstones())
        self.n_reads = 0

    def get(self, id: str) -> StoredResponse | None:
        self.n_reads += 1
        return super().get(id)


def tell_of(store: MemoryResponses, story: Story, responder: FakeResponder | None = None) -> str:
    """Run the story on this store, and return the metrics."""

    async def run() -> str:
        app = app_of(responder or FakeResponder(), stored_responses=store)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            await story(client)
            return (await client.get("/metrics")).text

    return asyncio.run(run())


async def references_to_the_input(client: httpx.AsyncClient, n: int) -> list[dict[str, str]]:
    first = await create(client, input="x" * 10_000)
    [item] = (await client.get(f"{URL}/{first['id']}/input_items")).json()["data"]
    return [{"type": "item_reference", "id": item["id"]}] * n


def test_a_response_that_is_referenced_often_is_read_once() -> None:
    store, responder = CountedResponses(), FakeResponder()

    async def story(client: httpx.AsyncClient) -> None:
        references = await references_to_the_input(client, 40)
        store.n_reads = 0
        await create(client, input=references)

    tell_of(store, story, responder)
    assert store.n_reads == 1
    assert len(responder.conversations[1].messages) == 40


def test_items_of_one_response_are_read_once() -> None:
    store = CountedResponses()

    async def story(client: httpx.AsyncClient) -> None:
        first = await create(client, input=[{"role": "user", "content": f"{i}"} for i in range(20)])
        items = (await client.get(f"{URL}/{first['id']}/input_items")).json()["data"]
        assert len({item["id"] for item in items}) == 20
        store.n_reads = 0
        await create(client, input=[{"type": "item_reference", "id": item["id"]} for item in items])

    tell_of(store, story)
    assert store.n_reads == 1


def test_references_read_a_bounded_number_of_bytes() -> None:
    """Each of nine stored responses has a short item and a long one. Only the short ones count."""

    async def story(client: httpx.AsyncClient) -> None:
        references = []
        for _ in range(9):
            said = [{"role": "user", "content": text} for text in ("short", "x" * 1_000_000)]
            first = await create(client, input=said)
            items = (await client.get(f"{URL}/{first['id']}/input_items")).json()["data"]
            short = next(item for item in items if _text(item) == "short")
            references.append({"type": "item_reference", "id": short["id"]})
        reply = await client.post(URL, json={"input": references[:8]})
        assert reply.status_code == 200, reply.text
        reply = await client.post(URL, json={"input": references})
        assert reply.status_code == 400
        assert "bytes of stored items" in reply.json()["error"]["message"]

    tell(story)


def test_references_resolve_to_no_more_than_the_largest_body() -> None:
    async def story(client: httpx.AsyncClient) -> None:
        references = await references_to_the_input(client, 300)  # 3 MB; a body may have 1 MiB
        reply = await client.post(URL, json={"input": references})
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert "1,048,576 bytes of stored items" in error["message"]
        assert error["param"].startswith("input.10")

    tell(story)


def test_thousands_of_references_are_refused() -> None:
    references = [{"type": "item_reference", "id": f"msg_{i}"} for i in range(5000)]

    async def story(client: httpx.AsyncClient) -> None:
        reply = await client.post(URL, json={"input": references})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "input")

    tell(story)


def test_a_conversation_that_grew_past_the_largest_body_is_refused() -> None:
    async def story(client: httpx.AsyncClient) -> None:
        last = None
        for _ in range(4):
            fields = {"input": "x" * 400_000, "previous_response_id": last}
            reply = await client.post(URL, json=fields)
            if reply.status_code == 400:
                break
            last = reply.json()["id"]
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, "previous_response_id")
        assert "--body-limit" in error["message"]

    tell(story)


def test_only_fields_that_the_server_knows_are_stored() -> None:
    image = {"type": "input_image", "image": {"url": "data:,", "format": "png"}, "junk": 1}
    other = {"type": "x_call", "call_id": "c", "action": {"any": [1]}, "junk": 1}
    said = {"role": "user", "content": [image], "junk": "x" * 1000}

    async def story(client: httpx.AsyncClient) -> None:
        made = await create(client, input=[said, other])
        url = f"{URL}/{made['id']}/input_items"
        call, message = (await client.get(url)).json()["data"]
        assert message["content"] == [{key: image[key] for key in ("type", "image")}]
        assert message.keys() == {"id", "type", "role", "content"}
        assert call.keys() == {"id", "type", "call_id", "action"}
        await create(client, previous_response_id=made["id"])

    responder = FakeResponder()
    tell(story, responder)
    first, second = (conversation.messages for conversation in responder.conversations)
    assert (second[0], second[1].calls) == (first[0], first[1].calls)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b'{"response":{"output":[]},"items":[',
        b'{"response":{"output":[]},"items":[{"id":"\xff"}]}',
        b"[]",
        b'{"response":{}}',
        b'{"response":[],"items":[]}',
        b'{"response":{"output":[0]},"items":[]}',
        b'{"response":{"output":[{"id":1}]},"items":[]}',
        b'{"response":{"output":[]},"items":[{"id":"msg_k","role":"nobody"}]}',
    ],
)
def test_a_damaged_response_is_a_miss_and_counted(data: bytes) -> None:
    store = MemoryResponses(Tombstones())
    store.put(StoredResponse("resp_k", int(time.time()), data, UNKNOWN_OWNER))

    async def story(client: httpx.AsyncClient) -> None:
        reply = await client.post(URL, json={"input": "hi", "previous_response_id": "resp_k"})
        assert reply.status_code == 404
        assert reply.json()["error"]["code"] == "previous_response_not_found"
        reply = await client.post(URL, json={"input": [{"id": "msg_k"}]})
        assert reply.status_code == 404

    assert "rekindle_responses_damaged_total 2.0" in tell_of(store, story)


class BrokenResponses(MemoryResponses):
    def get(self, id: str) -> StoredResponse | None:
        raise TierFailed("the disk has gone")


def test_a_store_that_fails_is_a_503_that_says_why() -> None:
    async def story(client: httpx.AsyncClient) -> None:
        reply = await client.get(f"{URL}/resp_k")
        assert reply.status_code == 503
        assert reply.headers["retry-after"] == "5"
        assert reply.json()["error"]["code"] == "storage_failed"
        assert "the disk has gone" in reply.json()["error"]["message"]

    tell_of(BrokenResponses(Tombstones()), story)
