"""An idle server prefills the next turn's prompt if the template will render it differently."""

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.server_process import ServerProcess, serve
from tests.support.workloads import Client, Message, prose, system, user

# As with Qwen 3's when thinking is switched off, what the prompt opens is not in the history.
TEMPLATE = (
    "{%- for m in messages %}"
    "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\nWell, ' }}"
    "{%- endif %}"
)
REPLY_TOKENS = 40


@pytest.fixture(params=[True, False], ids=["on", "off"])
def rewarms(request: pytest.FixtureRequest) -> bool:
    is_on: bool = request.param
    return is_on


@pytest.fixture
def server(embedded_model: Path, rewarms: bool) -> Iterator[ServerProcess]:  # noqa: FBT001
    switch = () if rewarms else ("--no-rewarm",)
    with serve("--chat-template", TEMPLATE, "--parallel", "2", *switch) as server:
        yield server


def test_the_next_turn_finds_the_rewarmed_rendering(
    server: ServerProcess,
    rewarms: bool,  # noqa: FBT001
) -> None:
    with closing(Client(server.url)) as client:
        history: list[Message] = [system("a poet"), user(prose("the sea", 20))]
        first = client.chat(history, max_tokens=REPLY_TOKENS, ignore_eos=True)
        if rewarms:
            server.wait_for_log("rewarm: prefilled")
        history += [{"role": "assistant", "content": first.text}, user("And then?")]
        second = client.chat(history)
        if rewarms:
            assert second.n_prefilled < REPLY_TOKENS
            # The turn after this one may have been computed ahead by now as well.
            ahead, *_ = re.findall(r"rewarm: prefilled (\d+) tokens", server.log)
            assert int(ahead) >= REPLY_TOKENS - 2
        else:
            assert second.n_prefilled >= REPLY_TOKENS
            assert "rewarm: prefilled" not in server.log
