"""Sessions, namespaces, pins, names and the cache endpoints, through a real server."""

import json
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.server_process import ServerProcess, serve
from tests.support.workloads import SEARCH_TOOL, Client, assistant, prose, system, user

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
KEYS = ("key-of-ann", "key-of-bob")


@pytest.fixture(scope="module")
def server(embedded_model: Path) -> Iterator[ServerProcess]:
    with serve("--parallel", "2") as server:
        yield server


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=600) as client:
        yield client


def body_of(route: str, name: str, **fields: Any) -> dict[str, Any]:
    """One conversation in each dialect: a system prompt, a tool and a question."""
    about, question = f"You are {name}. {prose(name, 30)}", f"Is it so, {name}?"
    tool: Any = SEARCH_TOOL
    function = tool["function"]
    if route == CHAT:
        messages = [{"role": "system", "content": about}, user(question)]
        own = {"messages": messages, "tools": [SEARCH_TOOL], "max_tokens": 1}
    elif route == MESSAGES:
        own_tool = {
            "name": function["name"],
            "description": function["description"],
            "input_schema": function["parameters"],
        }
        own = {"system": about, "messages": [user(question)], "tools": [own_tool], "max_tokens": 1}
    else:
        own = {
            "instructions": about,
            "input": question,
            "tools": [{"type": "function", **function}],
            "max_output_tokens": 1,
        }
    return {"model": "any", "temperature": 0, **own, **fields}


def story_of(reply: httpx.Response) -> dict[str, Any]:
    assert reply.status_code == 200, reply.text
    story: dict[str, Any] = reply.json()["rekindle"]
    return story


def n_cached(story: dict[str, Any]) -> int:
    return sum(each["tokens"] for each in story["cached"])


def n_prompt(story: dict[str, Any]) -> int:
    return n_cached(story) + int(story["prefilled"])


@pytest.mark.parametrize("route", [CHAT, MESSAGES, RESPONSES])
def test_every_wire_format_reports_cached_tokens_in_a_header_and_on_request(
    http: httpx.Client, route: str
) -> None:
    body = body_of(route, f"told {route}")
    explain = {"x-rekindle-explain": "1"}
    first = http.post(route, json=body, headers=explain)
    story = story_of(first)
    assert story["miss"]["reason"] == "first_request"
    assert first.headers["x-rekindle-cache"].startswith(f"hit={n_cached(story)}/{n_prompt(story)}")
    again = http.post(route, json=body)
    assert "miss" not in story_of(again)
    total = n_prompt(story)
    assert again.headers["x-rekindle-cache"] == f"hit={total}/{total} from=live"
    changed = json.loads(json.dumps(body).replace(f"You are told {route}", "You are not told"))
    miss = story_of(http.post(route, json=changed, headers=explain))["miss"]
    assert miss["reason"] == "system_changed"
    assert miss["expected"].startswith(f"told {route}"[:8])
    assert miss["got"].startswith("not told")
    assert miss["tokens_lost"] > total / 2


@pytest.mark.parametrize("route", [CHAT, MESSAGES, RESPONSES])
def test_a_stream_has_the_header_too(http: httpx.Client, route: str) -> None:
    body = body_of(route, f"streamed {route}", stream=True)
    with http.stream("POST", route, json=body) as reply:
        value = reply.headers["x-rekindle-cache"]
        assert reply.read()
    assert value.startswith("hit=")


def test_diagnostics_in_anthropics_form(http: httpx.Client) -> None:
    fields = {"diagnostics": {"previous_message_id": None}}
    first = http.post(MESSAGES, json={**body_of(MESSAGES, "diagnosed"), **fields})
    assert first.json()["diagnostics"] is None
    earlier = {"diagnostics": {"previous_message_id": first.json()["id"]}}
    changed = {**body_of(MESSAGES, "diagnosed"), **earlier}
    changed["tools"][0]["description"] = "Another one."
    reason = http.post(MESSAGES, json=changed).json()["diagnostics"]["cache_miss_reason"]
    assert reason["type"] == "tools_changed"
    assert reason["cache_missed_input_tokens"] > 0
    unknown = {"diagnostics": {"previous_message_id": "msg_unknown"}}
    reply = http.post(MESSAGES, json={**body_of(MESSAGES, "diagnosed"), **unknown}).json()
    assert reply["diagnostics"]["cache_miss_reason"]["type"] == "previous_message_not_found"


def test_sessions_are_named_by_user_and_never_by_a_role(http: httpx.Client) -> None:
    sessions = {
        "ann": {"user": "ann"},
        "window 7": {"user": "ann", "prompt_cache_key": "window 7"},
        "default": {},
    }
    for session, fields in sessions.items():
        story = story_of(http.post(CHAT, json={**body_of(CHAT, "of a session"), **fields}))
        assert story["session"] == session
    metadata = {"metadata": {"user_id": json.dumps({"session_id": "s-1", "device_id": "d"})}}
    assert (
        story_of(http.post(MESSAGES, json=body_of(MESSAGES, "x", **metadata)))["session"] == "s-1"
    )
    listed = {each["session"]: each for each in http.get("/v1/sessions").json()["data"]}
    assert {"ann", "window 7", "default", "s-1"} <= listed.keys()
    assert "user" not in listed
    assert listed["ann"]["requests"] == 1
    assert listed["window 7"]["cached_tokens"] > 0  # what ann computed


def test_titles_and_sub_agents_do_not_take_the_slot_of_a_conversation(embedded_model: Path) -> None:
    with (
        serve("--parallel", "2", "--no-rewarm") as server,
        closing(Client(server.url)) as client,
    ):
        asked = [system("an agent"), user(prose("the task", 20))]
        agent = {"tools": [SEARCH_TOOL], "user": "agent"}
        said = client.post(CHAT, {"messages": asked, **agent})["choices"][0]["message"]
        ranks = []
        for index in range(3):
            title = [system(f"Titles {index}", 40), user("Name it.")]
            reply = client.post(CHAT, {"messages": title, "user": "agent"})
            ranks.append(reply["rekindle"]["class"])
        for index in range(3):
            messages = [system(f"A helper {index}", 40), user("Go.")]
            fields = {"messages": messages, "user": "agent", "cache_class": "ephemeral"}
            ranks.append(client.post(CHAT, fields)["rekindle"]["class"])
        assert ranks == ["background"] * 3 + ["ephemeral"] * 3
        more = [*asked, assistant(said["content"]), user("And now?")]
        spans = client.post(CHAT, {"messages": more, **agent})["rekindle"]["spans"]
        assert {span["source"] for span in spans} == {"live"}
        assert spans[-1]["stop"] > 100


def test_namespaces_share_no_rows_no_turns_and_no_timing(embedded_model: Path) -> None:
    flags = [flag for key in KEYS for flag in ("--api-key", key)]
    with serve("--parallel", "2", *flags, "--namespace-by", "api-key") as server:
        ann, bob = (
            httpx.Client(
                base_url=server.url, timeout=600, headers={"authorization": f"Bearer {key}"}
            )
            for key in KEYS
        )
        body = body_of(CHAT, "a secret", max_tokens=8)
        first = ann.post(CHAT, json=body)
        cold = story_of(first)
        theirs = bob.post(CHAT, json=body, headers={"x-rekindle-explain": "1"})
        story = story_of(theirs)
        # The cost does not depend on the rows of other namespaces: nothing is found.
        assert (story["cached"], story["prefilled"]) == ([], cold["prefilled"])
        assert story["miss"]["reason"] == "first_request"
        assert n_cached(story_of(ann.post(CHAT, json=body))) == cold["prefilled"]
        salted = story_of(ann.post(CHAT, json={**body, "cache_salt": "mine"}))
        assert salted["cached"] == []
        said = theirs.json()["choices"][0]["message"]["content"]
        going_on = {**body, "messages": [*body["messages"], assistant(said), user("Why?")]}
        assert story_of(bob.post(CHAT, json=going_on))["remembered_turns"] == 1  # its own
        fresh = {**going_on, "cache_salt": "new"}
        assert story_of(bob.post(CHAT, json=fresh))["remembered_turns"] == 0
        names = [
            {each["key"] for each in who.get("/v1/cache").json()["data"]} for who in (ann, bob)
        ]
        assert names[0]
        assert names[0].isdisjoint(names[1])
        assert bob.delete(f"/v1/cache/{names[0].pop()}").status_code == 404
        stored = ann.post(RESPONSES, json=body_of(RESPONSES, "mine")).json()["id"]
        assert bob.get(f"{RESPONSES}/{stored}").status_code == 404
        assert ann.get(f"{RESPONSES}/{stored}").status_code == 200
        ann.close()
        bob.close()


def test_a_primed_prompt_is_named_on_disk_listed_and_deleted(
    embedded_model: Path, tmp_path: Path
) -> None:
    with (
        serve("--parallel", "1", "--cache-dir", str(tmp_path)) as server,
        httpx.Client(base_url=server.url, timeout=600) as http,
    ):
        body = body_of(CHAT, "primed", max_tokens=0, cache_key="agents/one", persist=True)
        primed = story_of(http.post(CHAT, json=body))
        files = list(tmp_path.glob("entries/*/*.kv"))
        assert sum(file.stat().st_size for file in files) > 0
        automatic = [
            body_of(MESSAGES, "primed", max_tokens=0),
            json.loads(json.dumps(body_of(MESSAGES, "primed", max_tokens=0), sort_keys=True)),
        ]
        for each in automatic:
            assert n_cached(story_of(http.post(MESSAGES, json=each))) >= primed["prefilled"] - 8
        listed = http.get("/v1/cache").json()["data"]
        named = {each["name"]: each for each in listed if each["name"]}
        [auto] = [name for name in named if name.startswith("auto-")]
        assert named.keys() == {"agents/one", auto}
        one = named["agents/one"]
        assert one["tokens"] == primed["prefilled"]
        assert "disk" in one["tiers"]
        assert one["bytes"] > 0
        assert http.delete("/v1/cache/agents/one").json()["deleted"] > 0
        assert http.delete("/v1/cache/agents/one").status_code == 404
        cold = story_of(http.post(CHAT, json={**body, "persist": False, "cache_key": None}))
        assert cold["prefilled"] == primed["prefilled"]
        assert http.delete("/v1/cache").json()["deleted"] > 0
        assert http.get("/v1/cache").json()["data"] == []


def test_persist_without_a_disk_is_an_error_and_nothing_is_named(embedded_model: Path) -> None:
    with (
        serve("--parallel", "1", "--no-cache-disk") as server,
        httpx.Client(base_url=server.url, timeout=600) as http,
    ):
        body = body_of(MESSAGES, "lost", max_tokens=0, persist=True)
        reply = http.post(MESSAGES, json=body)
        assert reply.status_code == 500
        assert "no disk tier" in reply.json()["error"]["message"]


@pytest.mark.parametrize("route", [CHAT, MESSAGES, RESPONSES])
def test_a_lookup_reports_what_the_request_then_finds_and_changes_nothing(
    http: httpx.Client, route: str
) -> None:
    body = body_of(route, f"looked up {route}")
    before = http.post("/v1/cache/lookup", json=body).json()
    assert before["miss"]["reason"] in ("first_request", "system_changed")
    assert before == http.post("/v1/cache/lookup", json=body).json()
    story = story_of(http.post(route, json=body))
    assert before["prompt_tokens"] == n_prompt(story)
    assert before["prefilled"] == story["prefilled"]
    after = http.post("/v1/cache/lookup", json=body).json()
    total = n_prompt(story)
    assert after["cached"] == [{"tier": "live", "tokens": total}]
    assert after["miss"] is None
    assert after["expected_ms"]["total"] is not None
    assert n_cached(story_of(http.post(route, json=body))) == total


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        (CHAT, {"prompt_cache_retention": "24h"}),
        (CHAT, {"prompt_cache_options": {"ttl": "1h"}}),
        (MESSAGES, {"cache_control": {"type": "ephemeral", "ttl": "1h"}}),
        (RESPONSES, {"prompt_cache_retention": "24h"}),
    ],
    ids=["retention", "ttl", "cache_control", "responses"],
)
def test_cache_controls_of_cloud_apis_become_pins(
    http: httpx.Client, route: str, fields: dict[str, Any]
) -> None:
    session = f"pins {route} {sorted(fields)}"
    http.post(
        route,
        json=body_of(route, session, **fields),
        headers={"x-rekindle-session": session},
    )

    def pinned() -> list[dict[str, Any]]:
        listed = http.get("/v1/cache").json()["data"]
        return [each for each in listed if each["session"] == session and each["pinned_until"]]

    deadline = time.monotonic() + 30
    while not pinned():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    [entry] = pinned()
    assert entry["pinned_until"] > time.time() + 3000


def test_usage_reports_cache_writes_and_reads_correctly(http: httpx.Client) -> None:
    control = {"cache_control": {"type": "ephemeral"}}
    body = body_of(MESSAGES, "counted")
    body["system"] = [{"type": "text", "text": body["system"], **control}]
    first = http.post(MESSAGES, json=body).json()["usage"]
    assert first["cache_read_input_tokens"] < first["cache_creation_input_tokens"]
    total = sum(first[f"{key}input_tokens"] for key in ("", "cache_read_", "cache_creation_"))
    assert 0 < first["input_tokens"] < total / 2  # the question behind the breakpoint
    again = http.post(MESSAGES, json=body).json()["usage"]
    assert again["cache_creation_input_tokens"] == 0
    assert again["cache_read_input_tokens"] == total
    chat = http.post(CHAT, json=body_of(CHAT, "written")).json()["usage"]["prompt_tokens_details"]
    story = story_of(http.post(CHAT, json=body_of(CHAT, "written twice")))
    assert chat["cache_write_tokens"] > 0
    assert story["prefilled"] > 0


def test_a_warm_list_is_primed_at_the_start_and_when_it_changes(
    embedded_model: Path, tmp_path: Path
) -> None:
    prompt = tmp_path / "agent.md"
    prompt.write_text(f"You are warm. {prose('warm', 30)}", "utf-8")
    with (
        serve("--parallel", "2", "--warm", str(prompt)) as server,
        httpx.Client(base_url=server.url, timeout=600) as http,
    ):
        for n_primed, word in ((1, "warm"), (2, "hot")):
            server.wait_for_log("agent.md primed", times=n_primed)
            head = {"role": "system", "content": prompt.read_text("utf-8")}
            messages = [head, user("Well?")]
            story = story_of(http.post(CHAT, json={"messages": messages, "max_tokens": 1}))
            assert n_cached(story) > story["prefilled"] > 0
            prompt.write_text(f"You are {word}er. {prose('hot', 30)}", "utf-8")


def test_another_kv_type_recomputes_and_never_gives_an_empty_reply(
    embedded_model: Path, tmp_path: Path
) -> None:
    body = body_of(CHAT, "stored twice", user="ann", max_tokens=4)
    n_prefilled = []
    for kv_type in ("f16", "q8_0", "f16"):
        flags = ("--parallel", "1", "--cache-dir", str(tmp_path), "--cache-type-k", kv_type)
        with serve(*flags) as server, httpx.Client(base_url=server.url, timeout=600) as http:
            server.wait_for_log(" cache: ")  # what is on disk is known
            reply = http.post(CHAT, json=body)
            n_prefilled.append(story_of(reply)["prefilled"])
            assert reply.json()["choices"][0]["message"]["content"]
            server.stop()
    assert n_prefilled == [n_prefilled[0], n_prefilled[0], 0]
