"""Replies that are taken apart: deltas, results, usage and what requests ask for."""

from __future__ import annotations

from array import array

import pytest

from pyllama_raw import FinishReason, Result, SamplingParams
from pyllama_raw.errors import InvalidRequest, Unsupported
from pyllama_raw.prompts import reply_plan
from pyllama_raw.prompts.reply_plan import MAX_TAIL, tail_of
from pyllama_raw.replies.parser import CallDelta, Content, Reasoning, ToolCall, merged
from pyllama_raw.replies.spec import ReplySpec
from pyllama_raw.results import StopString, StopToken
from tests.support.replying import TEMPLATE, TOOL, ReplyVocab, reply_engine, tokens_of

pytestmark = pytest.mark.anyio

CHAT = [{"role": "user", "content": "Rain?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Öl"}}\n</tool_call>'
REPLY = f"<think>\nHm, rain.\n</think>\n\nLet me see.{CALL}"
LONG = SamplingParams(max_tokens=512)


async def complete(written: str, params: SamplingParams = LONG, **options) -> Result:
    async with reply_engine(written) as engine:
        return await engine.complete(CHAT, params, **options)


def seen(result: Result):
    """What does not depend on the ids of calls."""
    calls = [(call.name, call.arguments) for call in result.tool_calls]
    return result.reasoning, result.text, calls


CALLS = [("weather", '{"city": "Öl"}')]


async def test_a_result_is_taken_apart_if_tools_are_given():
    """
    Reasoning, content and calls are apart; all tokens are there, and those of reasoning counted.
    """
    result = await complete(REPLY, tools=[TOOL])

    assert seen(result) == ("Hm, rain.", "Let me see.", CALLS)
    assert list(result.token_ids) == tokens_of(f"{REPLY}<|im_end|>")
    assert result.finish_reason is FinishReason.STOP
    n_thought = len(tokens_of("<think>\nHm, rain."))
    assert n_thought <= result.usage.reasoning_tokens <= n_thought + 4


async def test_deltas_have_the_parts():
    """
    Put together they are the result; the text of a delta is its content alone.
    """
    async with reply_engine(REPLY) as engine:
        async with engine.generate(CHAT, LONG, tools=[TOOL]) as generation:
            deltas = [delta async for delta in generation]
        result = generation.result

    parts = [part for delta in deltas for part in delta.parts]
    content = "".join(part.text for part in parts if isinstance(part, Content))
    thought = "".join(part.text for part in parts if isinstance(part, Reasoning))
    calls = [part for part in parts if isinstance(part, CallDelta)]
    assert (content, thought) == (result.text, result.reasoning)
    assert "".join(delta.text for delta in deltas) == result.text
    assert [(call.id, call.name) for call in calls if call.id] == [
        (call.id, call.name) for call in result.tool_calls
    ]
    assert "".join(call.arguments for call in calls) == CALLS[0][1]
    assert [t for delta in deltas for t in delta.token_ids] == list(result.token_ids)


def test_a_late_reader_finds_parts_merged():
    """
    Neighbours of a kind are one part, as the text of deltas is; each call is a part.
    """
    parts = [
        *(Reasoning("a"), Reasoning("b"), Content("c"), CallDelta(0, "1", "f")),
        *(
            CallDelta(0, arguments="{"),
            CallDelta(0, arguments="}"),
            CallDelta(1, "2", "g"),
        ),
        *(Content("d"), Content("e")),
    ]

    assert merged(parts) == [
        *(Reasoning("ab"), Content("c"), CallDelta(0, "1", "f", "{}")),
        *(CallDelta(1, "2", "g"), Content("de")),
    ]


@pytest.mark.parametrize(
    ("options", "is_parsed"),
    [
        ({}, False),
        ({"reply": True}, True),
        ({"reply": False, "tools": [TOOL]}, False),
        ({"tools": []}, False),
        ({"tool_choice": "auto"}, False),
    ],
)
async def test_who_has_a_reply_taken_apart(options, is_parsed):
    """
    Without tools only those that say so; others get the text as it is written.
    """
    result = await complete("<think>a</think>b", **options)

    parsed = ("a", "b") if is_parsed else ("", "<think>a</think>b")
    assert (result.reasoning, result.text) == parsed


async def test_an_output_that_can_only_be_content_has_no_parser(monkeypatch):
    """
    Its parts are the text as it is written; a specification that has more is what needs one.
    """
    monkeypatch.setattr(reply_plan, "ReplyParser", None)
    async with reply_engine(f"  a{REPLY} ") as engine:
        async with engine.generate(CHAT, LONG, reply=ReplySpec()) as generation:
            deltas = [delta async for delta in generation]
        result = generation.result

    parts = [part for delta in deltas for part in delta.parts]
    assert {type(part) for part in parts} == {Content}
    assert "".join(part.text for part in parts) == result.text
    assert result.text == "".join(delta.text for delta in deltas)
    assert (result.reasoning, result.tool_calls) == ("", ())


async def test_a_result_is_made_once():
    """
    Whoever asks again, as a service does to count tokens, gets the same object.
    """
    async with (
        reply_engine(REPLY) as engine,
        engine.generate(CHAT, LONG, tools=[TOOL]) as generation,
    ):
        result = await generation.collect()
        again, usage = generation.results, generation.usage

    assert again[0] is result
    assert usage is result.usage


async def test_a_request_may_bring_its_own_specification():
    """
    A ReplySpec counts instead of what is known of the template.
    """
    spec = ReplySpec.model_validate({"reasoning": {"start": ["("], "end": [")"]}})

    result = await complete("(a)<think>b", reply=spec)

    assert (result.reasoning, result.text) == ("a", "<think>b")


async def test_a_reply_goes_on_where_the_prompt_ends():
    """
    Reasoning that the template has begun is reasoning; a message that says so begins none.
    """
    async with reply_engine("a</think>b") as engine:
        begun = await engine.complete(
            CHAT, LONG, reply=True, template_kwargs={"thinks": True}
        )
        said = await engine.complete(
            [{"role": "user", "content": "<think>"}], LONG, reply=True
        )

    assert (begun.reasoning, begun.text) == ("a", "b")
    assert (said.reasoning, said.text) == ("", "a</think>b")


def test_the_end_of_a_prompt_has_no_message():
    """
    It begins with a control token that only the template writes; the first one says nothing.
    """
    controls = {256: b"<s>", 258: b"<|im_start|>"}
    written = [256, 1, 258, 2, 258, 3, 4]

    tails = [
        list(tail_of(array("i", tokens), controls))
        for tokens in (
            written,
            [256, 1, 2],
            [258, -1, 3],
            [258] * 2 + [1] * MAX_TAIL,
            [],
        )
    ]

    assert tails == [[258, 3, 4], [], [], [], []]


async def test_reasoning_begins_by_text_of_the_template_too():
    """
    It need not begin with a special token: words of the template may come before.
    """
    spec = ReplySpec.model_validate({"reasoning": {"start": ["("], "end": [")"]}})
    template = TEMPLATE.replace("<think>", "(")
    async with reply_engine("(\na)b", template=template) as engine:
        result = await engine.complete(
            CHAT, LONG, reply=spec, template_kwargs={"thinks": True}
        )

    assert (result.reasoning, result.text) == ("a", "b")


async def test_spelled_delimiters_are_text():
    """
    Control tokens begin a call; the same letters as text do not.
    """
    letters = [*CALL.encode()]
    async with reply_engine("") as engine:
        executor = engine._parts.executor
        written = [*letters, ReplyVocab.ids["</s>"]]
        n_prompt = await engine.count(CHAT, tools=[TOOL])
        executor._next_token = lambda before: written[len(before) - n_prompt]
        result = await engine.complete(CHAT, LONG, tools=[TOOL])

    assert seen(result) == ("", CALL, [])


async def test_a_tool_choice_of_none_hides_the_tools():
    """
    The template prints none, and what looks like a call is text.
    """
    async with reply_engine(REPLY) as engine:
        count = await engine.count(CHAT, tools=[TOOL], tool_choice="none")
        bare = await engine.count(CHAT)
        text = await engine.render(CHAT, tools=[TOOL], tool_choice="none")
        result = await engine.complete(CHAT, LONG, tools=[TOOL], tool_choice="none")

    assert count == bare
    assert "weather" not in text
    assert result.tool_calls == ()
    assert '"weather"' in result.text


async def stopped(*stop: str, **more) -> Result:
    params = LONG.model_copy(update={"stop": stop, **more})
    return await complete(REPLY, params, tools=[TOOL])


async def test_stop_strings_are_of_the_content():
    """
    Neither thoughts nor arguments end at one; the content does, before it.
    """
    thought, argument, content = (
        await stopped("rain"),
        await stopped("Öl"),
        await stopped("m", "me"),
    )

    assert seen(thought) == seen(argument) == ("Hm, rain.", "Let me see.", CALLS)
    assert thought.finish_detail == StopToken(ReplyVocab.ids["<|im_end|>"])
    assert seen(content) == ("Hm, rain.", "Let ", [])
    assert content.finish_detail == StopString("m")


async def test_a_stop_string_with_a_delimiter_is_looked_for_everywhere():
    """
    It is about the syntax of the reply: where thoughts end, or calls begin.
    """
    thought, named = await stopped("</think>"), await stopped("see.<tool_call>")

    assert seen(thought) == ("Hm, rain.\n", "", [])
    assert seen(named) == ("Hm, rain.", "Let me ", [])


async def test_stop_tokens_with_text_are_of_the_content():
    """
    As a stop string would be; a control token ends a reply wherever it comes.
    """
    text = await stopped(stop_token_ids=(ord("r"),))
    content = await stopped(stop_token_ids=(ord("m"), ord("r")))
    control = await stopped(stop_token_ids=(ReplyVocab.ids["<tool_call>"],))

    assert seen(text) == ("Hm, rain.", "Let me see.", CALLS)
    assert seen(content) == ("Hm, rain.", "Let ", [])
    assert content.finish_detail == StopToken(ord("m"))
    assert seen(control) == ("Hm, rain.", "Let me see.", [])


async def test_a_stop_in_what_was_held_back_is_found_at_the_end():
    """
    A letter may begin a delimiter; where no token follows, it ends the content.
    """
    n_tokens = len(tokens_of("Well <"))
    params = SamplingParams(max_tokens=n_tokens, stop=("<",))

    result = await complete("Well <b>", params, reply=True)

    assert (result.text, result.finish_detail) == ("Well ", StopString("<"))


async def test_a_reply_that_is_cut_keeps_what_it_has():
    """
    Arguments end where max_tokens ends them.
    """
    cut = REPLY[: REPLY.index("Öl")]
    params = SamplingParams(max_tokens=len(tokens_of(cut)))

    result = await complete(REPLY, params, tools=[TOOL])

    assert seen(result) == ("Hm, rain.", "Let me see.", [("weather", '{"city": "')])
    assert result.finish_reason is FinishReason.LENGTH
    assert not result.calls_tools


@pytest.mark.parametrize(
    ("written", "is_whole"),
    [
        (REPLY, True),
        (REPLY.removesuffix("\n</tool_call>"), True),
        (REPLY.removesuffix("}\n</tool_call>"), True),
        (REPLY.removesuffix("}}\n</tool_call>"), False),
        (REPLY[: REPLY.index("Öl")], False),
        (REPLY + REPLY[REPLY.index("<tool") : REPLY.index("Öl")], False),
        ("Well.", False),
    ],
)
async def test_a_result_calls_tools_if_its_calls_are_whole(written, is_whole):
    """
    A model may end its turn within a call.
    """
    result = await complete(written, tools=[TOOL])

    assert result.finish_reason is FinishReason.STOP
    assert result.calls_tools is is_whole


async def test_a_reply_that_is_left_keeps_what_was_read():
    """
    CANCELLED has the parts that were there, as it has text otherwise.
    """
    params = SamplingParams(max_tokens=1900)
    async with reply_engine(REPLY + 1800 * "x") as engine:
        async with engine.generate(CHAT, params, tools=[TOOL]) as generation:
            async for delta in generation:
                if any(isinstance(part, Content) for part in delta.parts):
                    break
        result = generation.result

    assert result.finish_reason is FinishReason.CANCELLED
    assert result.reasoning == "Hm, rain."


async def test_each_output_has_calls_of_its_own():
    """
    With n outputs each has its parser; log-probabilities stay one a token.
    """
    params = SamplingParams(max_tokens=512, n=2, logprobs=0)
    async with reply_engine(REPLY) as engine:
        results = await engine.complete_n(CHAT, params, tools=[TOOL])

    assert [seen(result)[2] for result in results] == [CALLS, CALLS]
    assert [len(r.logprobs) for r in results] == [len(r.token_ids) for r in results]
    assert len({call.id for result in results for call in result.tool_calls}) == 2


async def test_a_call_and_its_result_are_history():
    """
    What a result has can be said back, and the next reply is taken apart as well.
    """
    async with reply_engine(REPLY, "<think>ok</think>It rains.") as engine:
        first = await engine.complete(CHAT, LONG, tools=[TOOL])
        (call,) = first.tool_calls
        function = {"name": call.name, "arguments": call.arguments}
        calls = [{"id": call.id, "type": "function", "function": function}]
        messages = [
            *CHAT,
            {"role": "assistant", "content": first.text, "tool_calls": calls},
            {"role": "tool", "content": "rain", "tool_call_id": call.id},
        ]
        second = await engine.complete(messages, LONG, tools=[TOOL])

    assert isinstance(call, ToolCall)
    assert (second.reasoning, second.text) == ("ok", "It rains.")


@pytest.mark.parametrize(
    "tool", [{"x": 1}, {"type": "web_search"}, {"function": {"name": [1]}}, {}]
)
async def test_what_is_no_function_is_the_business_of_the_template(tool):
    """
    A tool without a name is printed, and calls of others are read.
    """
    result = await complete(REPLY, tools=[tool, TOOL])

    assert seen(result) == ("Hm, rain.", "Let me see.", CALLS)


REFUSED = {
    "a tool that is not there": {"tools": [TOOL], "tool_choice": "snow"},
    "a call without tools": {"tool_choice": "required"},
    "an empty choice": {"tools": [TOOL], "tool_choice": ""},
    "no flag": {"tools": [TOOL], "parallel_tool_calls": "yes"},
    "no reply": {"reply": {"reasoning": {}}},
}


@pytest.mark.parametrize("what", REFUSED)
async def test_options_that_do_not_fit_are_refused(what):
    """
    The error names the option.
    """
    *_, name = REFUSED[what]

    with pytest.raises(InvalidRequest) as caught:
        await complete(REPLY, **REFUSED[what])

    assert caught.value.name == name


@pytest.mark.parametrize(
    "option", [{"tool_choice": "auto"}, {"reply": True}, {"parallel_tool_calls": True}]
)
async def test_only_chats_have_options_of_replies(option):
    """
    A text prompt takes none; reply=False says nothing.
    """
    async with reply_engine(REPLY) as engine:
        with pytest.raises(InvalidRequest, match="chat messages only"):
            await engine.complete("a", LONG, **option)
        assert await engine.render(CHAT, reply=False)


async def test_calls_are_promised_only_in_a_known_syntax():
    """
    With a specification that has none they cannot be asked for.
    """
    with pytest.raises(Unsupported, match="ReplySpec"):
        await complete(REPLY, tools=[TOOL], tool_choice="required", reply=ReplySpec())


def test_the_template_of_these_tests_is_known():
    """
    Its markers are those of a bundled specification.
    """
    assert "<tool_call>" in TEMPLATE
    assert '"arguments"' in TEMPLATE
