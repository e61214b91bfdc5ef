"""Whole replies: their shapes, and how several add up."""

from rekindle.chat.reply.events import FinishReason, ReplyText, ScoredToken, TopToken
from rekindle.generation.drafts import DraftCount, DraftCounts
from rekindle.generation.events import CachedSpan, CacheSource
from tests.api.client import chat, complete
from tests.api.fakes import FakeResponder, Script, done

USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 2,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 6},
    "completion_tokens_details": {"reasoning_tokens": 0},
}
TIMINGS = {
    "cache_n": 4,
    "prompt_n": 6,
    "prompt_ms": 500.0,
    "prompt_per_token_ms": 500 / 6,
    "prompt_per_second": 12.0,
    "predicted_n": 2,
    "predicted_ms": 250.0,
    "predicted_per_token_ms": 250.0,
    "predicted_per_second": 4.0,
}
REKINDLE = {
    "cached": [{"tier": "live", "tokens": 4}],
    "prefilled": 6,
    "restored_ms": 1.2,
    "remembered_turns": 0,
    "dropped_messages": 0,
    "spans": [{"source": "live", "match": "tokens", "start": 0, "stop": 4}],
    "session": "default",
    "class": "main",
    "prefilled_twice": 0,
}
SCORED: Script = (
    ReplyText("Hi", (ScoredToken(TopToken(1, "Hi", b"Hi", -0.5), (), 0),)),
    ReplyText(
        "!",
        (
            ScoredToken(
                TopToken(2, "!", b"!", -1.5),
                (TopToken(3, "?", b"?", -0.1), TopToken(4, ".", b".", -1.0)),
                2,
            ),
        ),
    ),
    done(),
)


def test_chat_completion_has_openais_shape() -> None:
    reply = chat().json()
    assert reply.pop("id").startswith("chatcmpl-")
    assert reply.pop("created") > 1.7e9
    assert reply.pop("system_fingerprint").startswith("rekindle-")
    assert reply == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": USAGE,
        "timings": TIMINGS,
        "rekindle": REKINDLE,
    }


def test_completion_has_openais_shape() -> None:
    reply = complete().json()
    assert reply.pop("id").startswith("cmpl-")
    del reply["created"], reply["system_fingerprint"]
    assert reply == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}],
        "usage": USAGE,
        "timings": TIMINGS,
        "rekindle": REKINDLE,
    }


def test_several_replies_count_their_prompt_once() -> None:
    scripts = {
        0: (ReplyText("a"), done(3, n_cached=0)),
        1: (ReplyText("b"), done(4, n_cached=9, finish=FinishReason.LENGTH)),
    }
    reply = chat(FakeResponder(lambda i: scripts[i]), n=2).json()
    assert [choice["message"]["content"] for choice in reply["choices"]] == ["a", "b"]
    assert [choice["finish_reason"] for choice in reply["choices"]] == ["stop", "length"]
    assert reply["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 7,
        "total_tokens": 17,
        "prompt_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 10},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_each_cached_span_names_its_source() -> None:
    spans = (
        CachedSpan(CacheSource.DISK, 0, 256),
        CachedSpan(CacheSource.MEMORY, 256, 512),
        CachedSpan(CacheSource.DISK, 512, 600),
    )
    script = (ReplyText("a"), done(n_prompt=610, n_cached=600, spans=spans))
    assert chat(FakeResponder(script)).json()["rekindle"] == {
        **REKINDLE,
        "cached": [{"tier": "memory", "tokens": 256}, {"tier": "disk", "tokens": 344}],
        "prefilled": 10,
        "spans": [
            {"source": "disk", "match": "tokens", "start": 0, "stop": 256},
            {"source": "memory", "match": "tokens", "start": 256, "stop": 512},
            {"source": "disk", "match": "tokens", "start": 512, "stop": 600},
        ],
    }


def test_each_of_several_replies_has_its_own_cache_report() -> None:
    scripts = {i: (ReplyText("a"), done(n_cached=n)) for i, n in enumerate((0, 9, 4, 4))}
    reply = complete(FakeResponder(lambda i: scripts[i]), prompt=["a", "b"], n=2).json()
    replies = reply["rekindle"].pop("replies")
    tiers = [[(each["tier"], each["tokens"]) for each in story["cached"]] for story in replies]
    assert tiers == [[], [("live", 9)], [("live", 4)], [("live", 4)]]
    assert [story["prefilled"] for story in replies] == [10, 1, 6, 6]
    assert [len(story["spans"]) for story in replies] == [0, 1, 1, 1]
    assert reply["rekindle"] == replies[0]


def test_chat_logprobs_list_each_token_with_its_rivals() -> None:
    reply = chat(FakeResponder(SCORED), logprobs=True, top_logprobs=2).json()
    assert reply["choices"][0]["logprobs"] == {
        "content": [
            {"token": "Hi", "logprob": -0.5, "bytes": [72, 105], "top_logprobs": []},
            {
                "token": "!",
                "logprob": -1.5,
                "bytes": [33],
                "top_logprobs": [
                    {"token": "?", "logprob": -0.1, "bytes": [63]},
                    {"token": ".", "logprob": -1.0, "bytes": [46]},
                ],
            },
        ],
        "refusal": None,
    }


def test_completion_logprobs_are_four_lists_that_include_the_sampled_token() -> None:
    reply = complete(FakeResponder(SCORED), logprobs=2).json()
    assert reply["choices"][0]["logprobs"] == {
        "tokens": ["Hi", "!"],
        "token_logprobs": [-0.5, -1.5],
        "top_logprobs": [{"Hi": -0.5}, {"?": -0.1, ".": -1.0, "!": -1.5}],
        "text_offset": [0, 2],
    }


def test_reply_of_no_time_has_finite_speeds() -> None:
    reply = chat(FakeResponder((done(0, n_prompt=4, n_cached=4),))).json()
    assert reply["timings"]["prompt_per_token_ms"] == 0
    assert reply["timings"]["predicted_per_token_ms"] == 0


def test_speed_does_not_count_the_token_that_the_prompt_gave_for_free() -> None:
    timings = chat(FakeResponder((ReplyText("a"), done(11)))).json()["timings"]
    assert timings["predicted_n"] == 11
    assert timings["predicted_per_second"] == 40.0
    assert timings["predicted_per_token_ms"] == 25.0


def test_drafted_tokens_of_all_replies_are_in_the_timings_and_of_each_by_source() -> None:
    drafts = {
        0: DraftCounts(reply=DraftCount(8, 8), store=DraftCount(4, 0)),
        1: DraftCounts(context=DraftCount(3, 2)),
        2: DraftCounts(),
    }
    responder = FakeResponder(lambda i: (ReplyText("a"), done(drafts=drafts[i])))
    reply = chat(responder, n=3).json()
    assert (reply["timings"]["draft_n"], reply["timings"]["draft_n_accepted"]) == (15, 10)
    first, second, third = reply["rekindle"]["replies"]
    assert first["drafts"] == [
        {"source": "reply", "tokens": 8, "accepted": 8},
        {"source": "store", "tokens": 4, "accepted": 0},
    ]
    assert second["drafts"] == [{"source": "context", "tokens": 3, "accepted": 2}]
    assert "drafts" not in third


def test_closing_follows_the_end_of_every_reply() -> None:
    responder = FakeResponder()
    chat(responder, n=2)
    assert all(started.stream.closed.is_set() for started in responder.started)
