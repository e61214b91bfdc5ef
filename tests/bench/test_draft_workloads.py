"""Workloads for drafts: what they repeat, and which replies they measure."""

import json
import signal

import pytest

from rekindle.bench.report.rows import decode_rate
from rekindle.bench.workloads.drafts import (
    BEGUN_LINES,
    CALL,
    DRAFT_WORKLOADS,
    FILE,
    FILE_LINES,
    OTHER_FILE,
    PACKAGE,
)
from rekindle.generation.drafts import DraftCount
from rekindle.replay.client import Outcome
from rekindle.replay.stream import Counts
from tests.bench.test_workloads import FakeProcess, play
from tests.support.fake_openai import fake_openai

ALL = {each.name: each for each in DRAFT_WORKLOADS}


def test_a_rewrite_has_begun_to_repeat_its_file_with_an_edit() -> None:
    with fake_openai() as fake:
        play(ALL["rewrite"], fake)
    [body] = fake.bodies
    old, begun = (part.split("\n") for part in body["prompt"].split("```python\n")[1:])
    edit, *copied, rest = begun
    assert edit.startswith("# Version 2")
    assert copied == old[:BEGUN_LINES]
    assert rest == ""  # the reply begins a line
    assert body["temperature"] == 0
    assert body["ignore_eos"] is True


@pytest.mark.parametrize("name", [FILE, OTHER_FILE])
def test_the_files_to_rewrite_have_300_lines(name: str) -> None:
    assert len((PACKAGE / name).read_text("utf-8").splitlines()) >= FILE_LINES


@pytest.mark.parametrize(("name", "signals"), [("again", []), ("again-restarted", [9])])
def test_again_measures_only_the_second_reply_to_the_same_prompt(
    name: str, signals: list[int]
) -> None:
    with fake_openai() as fake:
        process = FakeProcess(fake.url)
        stage = play(ALL[name], fake, process=process, is_quick=True)
    first, *_, again = fake.bodies
    assert first == again
    assert [outcome.index for outcome in stage.decoded] == [len(fake.bodies) - 1]
    assert process.signals == [signal.Signals(number) for number in signals]


def test_the_calls_of_a_loop_have_equal_arguments_and_every_one_is_measured() -> None:
    with fake_openai() as fake:
        stage = play(ALL["tool-loop"], fake)
    assert len(stage.decoded) == len(fake.bodies) == 8
    n_calls = [body["prompt"].count(json.dumps(CALL)) for body in fake.bodies]
    assert n_calls == list(range(3, 11))
    assert all(body["prompt"].endswith("Agent calls:\n") for body in fake.bodies)


def test_prose_is_sampled_with_another_question_and_seed_each_time() -> None:
    with fake_openai() as fake:
        play(ALL["prose"], fake)
    assert len({body["messages"][0]["content"] for body in fake.bodies}) == len(fake.bodies)
    assert len({body["seed"] for body in fake.bodies}) == len(fake.bodies)
    assert {body["temperature"] for body in fake.bodies} == {0.8}


def test_drafted_and_accepted_tokens_are_read_from_timings() -> None:
    with fake_openai(drafts=True) as fake:
        assert play(ALL["rewrite"], fake).decoded[0].drafted == DraftCount(10, 9)
    with fake_openai() as fake:
        assert play(ALL["rewrite"], fake).decoded[0].drafted == DraftCount(0, 0)


def test_the_decode_rate_leaves_out_the_first_token_of_each_reply() -> None:
    outcomes = [
        Outcome(0, 0.0, 3.0, first_token_seconds=1.0, counts=Counts(n_reply=101)),
        Outcome(1, 3.0, 4.0, first_token_seconds=2.0, counts=Counts(n_reply=301)),
        Outcome(2, 7.0, 9.0, error="no reply in time"),
    ]
    assert decode_rate(outcomes) == 100.0
    assert decode_rate([]) is None
