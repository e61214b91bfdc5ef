"""Each workload sends the traffic that its name promises."""

import asyncio
import json
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rekindle.bench.peers.processes import ServerProcess
from rekindle.bench.stage import Stage
from rekindle.bench.workloads.recorded import recorded_workload
from rekindle.bench.workloads.texts import Texts
from rekindle.bench.workloads.workloads import WORKLOADS, Workload
from tests.support.fake_openai import FakeOpenAI, fake_openai

ALL = {each.name: each for each in (*WORKLOADS, recorded_workload(None))}


class FakeProcess(ServerProcess):
    """A process that only notes signals. The fake server keeps running."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.signals: list[signal.Signals] = []

    @property
    def url(self) -> str:
        return self._url

    async def start(self) -> float:
        return 1.25

    async def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.signals.append(number)


def play(
    workload: Workload,
    fake: FakeOpenAI,
    *,
    process: ServerProcess | None = None,
    calls_tools: bool = True,
    is_quick: bool = False,
) -> Stage:
    async def run() -> Stage:
        stage = Stage(
            url=fake.url,
            process=process,
            texts=Texts("5eed", 0.1),
            n_slots=workload.parallel,
            is_quick=is_quick,
            calls_tools=calls_tools,
            on_request=lambda _: None,
        )
        await stage.open()
        await workload.play(stage)
        await stage.close()
        return stage

    return asyncio.run(run())


def roles(body: dict[str, Any]) -> list[str]:
    return [message["role"] for message in body["messages"]]


def system(body: dict[str, Any]) -> str:
    text: str = body["messages"][0]["content"]
    return text


def goes_on(earlier: dict[str, Any], later: dict[str, Any]) -> bool:
    n = len(earlier["messages"])
    return bool(later["messages"][:n] == earlier["messages"])


def test_an_agent_loop_has_12_rounds_that_append_replies_and_results() -> None:
    with fake_openai() as fake:
        play(ALL["agent-loop"], fake)
    *rounds, last = fake.bodies
    assert len(rounds) == 12
    assert "read_file" in system(last)  # the system prompt describes the tools
    assert roles(last) == ["system", "user", *["assistant", "user"] * 12]
    assert all(goes_on(*pair) for pair in pairwise(fake.bodies))


def test_a_client_that_reserialises_makes_real_calls() -> None:
    with fake_openai() as fake:
        play(ALL["reserialised-calls"], fake)
    *rounds, last = fake.bodies
    assert {body["tool_choice"] for body in rounds} == {"required"}
    assert roles(last) == ["system", "user", *["assistant", "tool"] * len(rounds)]
    call, result = last["messages"][2:4]
    assert result["tool_call_id"] == call["tool_calls"][0]["id"]


@pytest.mark.parametrize(("name", "n_windows"), [("windows-3", 3), ("windows-8", 8)])
def test_windows_share_a_system_prompt_and_take_turns(name: str, n_windows: int) -> None:
    with fake_openai() as fake:
        play(ALL[name], fake)
    assert len({system(body) for body in fake.bodies}) == 1
    firsts = [body["messages"][1]["content"] for body in fake.bodies]
    assert len(set(firsts)) == n_windows
    assert firsts == firsts[:n_windows] * (len(firsts) // n_windows)


def test_strangers_outnumber_the_slots_and_share_no_system_prompt() -> None:
    with fake_openai() as fake:
        play(ALL["strangers"], fake)
    systems = [system(body) for body in fake.bodies]
    assert len(set(systems)) > ALL["strangers"].parallel
    assert len(set(systems[: len(set(systems))])) == len(set(systems))


def test_8_sub_agents_run_at_once_below_one_system_prompt() -> None:
    with fake_openai(meet=8) as fake:
        play(ALL["fan-out"], fake)
    assert fake.most_at_once == 8
    assert len({system(body) for body in fake.bodies}) == 1


def test_return_after_eviction_has_others_in_between_and_a_small_memory() -> None:
    with fake_openai() as fake:
        play(ALL["return-after-eviction"], fake)
    systems = [system(body) for body in fake.bodies]
    first = systems[0]
    assert [each == first for each in systems] == [True] * 2 + [False] * 5 + [True] * 2
    assert ALL["return-after-eviction"].cache_ram_mib is not None


def test_a_restart_kills_once_in_the_middle_and_the_agent_continues() -> None:
    with fake_openai() as fake:
        process = FakeProcess(fake.url)
        stage = play(ALL["restart"], fake, process=process)
    assert process.signals == [signal.SIGKILL]
    assert stage.notes == ["back after 1.2 s"]
    agent = [body for body in fake.bodies if "read_file" in system(body)]
    assert all(goes_on(*pair) for pair in pairwise(agent))
    assert len(agent) == 12


def test_a_remote_server_is_not_killed() -> None:
    with fake_openai() as fake:
        stage = play(ALL["restart"], fake)
    assert stage.notes == ["it is a remote server and was not restarted"]


def test_regenerating_sends_the_same_and_an_edit_branches_in_the_middle() -> None:
    with fake_openai() as fake:
        play(ALL["regenerate-edit"], fake)
    sent = [json.dumps(body["messages"]) for body in fake.bodies]
    assert sent[5] == sent[6] == sent[7]
    edited, longest, back = fake.bodies[8], fake.bodies[5], fake.bodies[-1]
    n_kept = len(edited["messages"]) - 1
    assert edited["messages"][:n_kept] == longest["messages"][:n_kept]
    assert edited["messages"][n_kept] != longest["messages"][n_kept]
    assert goes_on(longest, back)


def test_a_reserialising_client_rewrites_calls_and_text() -> None:
    with fake_openai() as fake:
        play(ALL["reserialised-calls"], fake)
    message, result = fake.bodies[-1]["messages"][2:4]
    [call] = message["tool_calls"]
    assert call["function"]["arguments"] == '{\n  "folder": "docs"\n}'
    assert call["id"].startswith("toolu_")
    assert result["tool_call_id"] == call["id"]


def test_every_server_samples_the_same_number_of_tokens_unless_it_calls_tools() -> None:
    with fake_openai() as fake:
        play(ALL["agent-loop"], fake)
        play(ALL["reserialised-calls"], fake)
    for body in fake.bodies:
        assert body.get("ignore_eos", False) is not bool(body.get("tools"))


def test_the_client_drops_old_turns_of_an_overflowing_chat_but_no_system_prompt() -> None:
    with fake_openai() as fake:
        play(ALL["overflow-chat"], fake)
    assert not all(goes_on(*pair) for pair in pairwise(fake.bodies))
    assert max(len(body["messages"]) for body in fake.bodies) < 24
    assert len({system(body) for body in fake.bodies}) == 1
    for body in fake.bodies:
        assert roles(body)[1] == "user"


def test_reasoning_turns_are_long_with_a_pause_between_them() -> None:
    with fake_openai() as fake:
        stage = play(ALL["reasoning-template"], fake, is_quick=True)
    assert {body["max_tokens"] for body in fake.bodies} == {150}
    first, second = stage.traffic.outcomes
    assert second.start > first.start + first.seconds


def test_recorded_clients_fit_and_get_short_replies() -> None:
    with fake_openai() as fake:
        play(ALL["recorded"], fake)
    assert 12 <= len(fake.bodies) <= 16
    assert {body["max_tokens"] for body in fake.bodies} == {8}
    assert max(len(json.dumps(body)) for body in fake.bodies) < 6000 * 4


def test_the_recorded_sample_names_no_folder_of_a_person() -> None:
    with fake_openai() as fake:
        play(ALL["recorded"], fake)
    text = json.dumps(fake.bodies)
    assert not [name for name in ("/home/", "/root/", "/Users/") if name in text]


def test_without_tool_calls_tools_are_text_and_results_are_user_messages() -> None:
    with fake_openai() as fake:
        play(ALL["agent-loop"], fake, calls_tools=False)
    assert not [body for body in fake.bodies if "tools" in body]
    assert "# Tools" in system(fake.bodies[0])
    assert set(roles(fake.bodies[-1])) == {"system", "user", "assistant"}


def test_every_run_has_its_own_prompts_and_all_servers_get_the_same() -> None:
    one, again, other = (Texts(nonce) for nonce in ("a", "a", "b"))
    assert one.system("x") == again.system("x")
    assert one.system("x").splitlines()[0] != other.system("x").splitlines()[0]


def test_templates_are_in_the_package() -> None:
    for workload in ALL.values():
        template = workload.template_for(shows_tools=False)
        assert template is None or Path(template).is_file()
