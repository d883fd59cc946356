"""A chat whose template never ends keeps nobody waiting."""

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from pyllama_raw import SamplingParams
from pyllama_raw.engine.mailbox import Workers
from pyllama_raw.errors import ClosedError, InvalidRequest, PromptTooLong
from pyllama_raw.testing import fake_engine
from tests.support.limits import LIMIT_S

pytestmark = pytest.mark.anyio

ENDLESS = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
)
PRINTS = "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
CHAT = [{"role": "user", "content": "a"}]
TOOL = {"type": "function", "function": {"name": "f"}}
PARAMS = SamplingParams(max_tokens=4)


async def test_closing_ends_a_template():
    """
    aclose() does not wait for a template; its chat hears that the engine is closed.
    """
    errors = []

    async def chat() -> None:
        with pytest.raises(ClosedError) as caught:
            await engine.complete(CHAT, PARAMS)
        errors.append(caught.type)

    engine = fake_engine(chat_template=ENDLESS)
    with anyio.fail_after(LIMIT_S):
        async with anyio.create_task_group() as group:
            group.start_soon(chat)
            await wait_all_tasks_blocked()
            await engine.aclose()

    assert errors == [ClosedError]


async def test_others_go_on_beside_a_template():
    """
    The event loop and other requests do not wait for a template, nor does who leaves.
    """
    with anyio.fail_after(LIMIT_S):
        async with fake_engine(chat_template=ENDLESS) as engine:
            async with anyio.create_task_group() as group:
                group.start_soon(engine.complete, CHAT, PARAMS)
                await wait_all_tasks_blocked()
                result = await engine.complete("hello", PARAMS)
                group.cancel_scope.cancel()

    assert len(result.token_ids) == 4
    assert group.cancel_scope.cancelled_caught


async def test_templates_of_callers_keep_no_other_chat_waiting():
    """
    Three that never end, two at a time: a chat of the model's own template goes on.
    """
    ended = []

    async def chat(index: int) -> None:
        with pytest.raises(InvalidRequest, match="within 1 s of CPU time"):
            await engine.complete(CHAT, PARAMS, chat_template=ENDLESS)
        ended.append(index)

    with anyio.fail_after(LIMIT_S):
        async with fake_engine(chat_template="{{ messages[0].content }}") as engine:
            async with anyio.create_task_group() as group:
                for index in range(3):
                    group.start_soon(chat, index)
                await wait_all_tasks_blocked()
                result = await engine.complete(CHAT, PARAMS)
                n_ended = len(ended)

    assert len(result.token_ids) == 4
    assert n_ended <= 2
    assert len(ended) == 3


@pytest.mark.parametrize(
    "messages",
    [CHAT * 8_000, [{"role": "user", "content": "a" * 2**21}]],
    ids=["many", "long"],
)
async def test_long_chats_are_for_a_worker(messages):
    """
    Many messages and a long one are refused by their number of tokens.
    """
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    async with fake_engine(chat_template=source) as engine:
        with anyio.fail_after(LIMIT_S), pytest.raises(PromptTooLong):
            await engine.complete(messages, PARAMS)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"reply": True}, "chat"),
        ({"reply": True, "stop": ("a", "b")}, "chat"),
        ({"reply": True, "regex": "a+"}, "rules"),
        ({"tools": [TOOL]}, "rules"),
        ({"reply": True, "tools": [TOOL], "chat_template": PRINTS}, "template"),
    ],
)
async def test_a_chat_makes_one_trip_to_a_worker(monkeypatch, options, kind):
    """
    A template of the caller keeps no others waiting, and no plain chat waits for a grammar.
    """
    kinds = []
    run = Workers.run

    async def noting(self, kind, *call):
        kinds.append(kind)
        return await run(self, kind, *call)

    monkeypatch.setattr(Workers, "run", noting)
    fields = {name: options[name] for name in ("stop", "regex") if name in options}
    chat = {name: value for name, value in options.items() if name not in fields}
    async with fake_engine(chat_template=PRINTS) as engine:
        params = SamplingParams(max_tokens=4, **fields)
        await engine.complete(CHAT, params, **chat)

    assert kinds == [kind]
