"""History that others wrote badly is put right, told with its place, or rendered as text."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyllama_raw.errors import InvalidRequest, RequestError
from pyllama_raw.prompts.chat import ChatSettings
from pyllama_raw.prompts.messages import with_history
from pyllama_raw.prompts.prompt import PromptEncoder
from pyllama_raw.testing import FakeVocab, fake_engine

USER = {"role": "user", "content": ""}
PRINTS = """
{%- for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% for c in m.tool_calls or [] -%}
[{{ c.id }} {{ c.function.name }} {{ c.function.arguments }}]
{%- endfor %}{% if m.role == 'tool' %}({{ m.tool_call_id }} {{ m.content }}){% endif %}
{%- endfor %}"""
STRICT = """
{%- for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments.items() -%}
[{{ k }}={{ v }}]
{%- endfor %}{% endfor %}
{%- if m.role == 'tool' and not m.tool_call_id %}{{ raise_exception('no call') }}{% endif %}
{%- endfor %}"""


def called(*functions: object, **fields: object) -> dict[str, object]:
    """A message that calls *functions*."""
    calls = [{"type": "function", "function": f} | fields for f in functions]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def function(arguments: object = "{}", name: object = "f") -> dict[str, object]:
    return {"name": name, "arguments": arguments}


def rendered(template: str, messages: object) -> str:
    encoder = PromptEncoder(FakeVocab(), template, n_ctx_slot=2**16)
    try:
        return with_history(lambda m: encoder.render(m, ChatSettings()), messages)
    finally:
        encoder.close()


def test_what_has_one_meaning_is_put_right():
    """
    Ids are made and answered in order; no arguments are none; a result may have no text.
    """
    calls = called(function(""), function(None), {"name": "g"})
    answers = [{"role": "tool", "content": None}, {"role": "tool", "content": "b"}]

    text = rendered(PRINTS, [USER, calls, *answers])

    assert (
        text
        == "[call00001 f {}][call00002 f {}][call00003 g {}](call00001 )(call00002 b)"
    )


def result_of(call_id: str, content: object) -> dict[str, object]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def test_results_stand_in_the_order_of_their_calls():
    """
    A template may print no ids, and agents send results as they come.
    """
    calls = called(function(name="f"), function(name="g"), function(name="h"))
    for call, call_id in zip(calls["tool_calls"], "abc", strict=True):
        call["id"] = call_id
    part = [{"type": "text", "text": "of b"}]
    turn = [result_of("c", "of c"), result_of("a", "of a"), result_of("b", part)]

    messages = with_history(list, [USER, calls, *turn, USER, calls, *turn[:2]])

    order = [m["tool_call_id"] for m in messages if m["role"] == "tool"]
    assert order == ["a", "b", "c", "a", "c"]


@pytest.mark.parametrize(
    "results",
    [
        [result_of("b", "1"), result_of("x", "2"), result_of("a", "3")],
        [result_of("b", "1"), result_of("a", "2"), result_of("b", "3")],
        [result_of("b", [{"type": "image_url"}]), result_of("a", "2")],
    ],
    ids=["of no call", "twice", "an image"],
)
def test_results_that_are_not_told_apart_stay_where_they_are(results):
    """
    Where an id is that of no call or comes twice; and images, which are counted in their order.
    """
    calls = called(function(name="f"), function(name="g"))
    for call, call_id in zip(calls["tool_calls"], "ab", strict=True):
        call["id"] = call_id

    messages = with_history(list, [USER, calls, *results])

    assert messages[2:] == results


def test_given_ids_stay():
    """
    A result that names its call leaves the others to results that name none.
    """
    calls = called(function(), id="x")
    calls["tool_calls"] += called(function())["tool_calls"]
    answers = [
        {"role": "tool", "content": "1", "tool_call_id": "call00002"},
        {"role": "tool", "content": "2"},
    ]

    text = rendered(PRINTS, [USER, calls, *answers])

    assert text == "[x f {}][call00002 f {}](x 2)(call00002 1)"


def test_calls_of_functions_are_calls_of_tools():
    """
    As OpenAI's API had them before tools: a result names its function, and has no id.
    """
    first = {
        "role": "assistant",
        "content": None,
        "function_call": function('{"a": 1}'),
    }
    second = {
        "role": "assistant",
        "function_call": function(None, "g"),
        "tool_calls": None,
    }
    results = [
        {"role": "function", "name": "g", "content": "1"},
        {"role": "function", "name": "f", "content": None},
        {"role": "function", "name": "f", "content": "of no call"},
    ]

    text = rendered(PRINTS, [USER, first, second, *results])

    assert (
        text
        == '[call00001 f {"a": 1}][call00002 g {}](call00002 1)(call00001 )( of no call)'
    )


def test_malformed_arguments_are_text_where_a_template_prints_them():
    """
    Arguments that are no JSON, and a result that no call wants, do not end a session.
    """
    messages = [USER, called(function('{"a": ')), {"role": "tool", "content": "b"}]
    lone = [USER, {"role": "tool", "content": "b", "tool_call_id": "gone"}]

    assert rendered(PRINTS, messages) == '[call00001 f {"a": ](call00001 b)'
    assert rendered(PRINTS, lone) == "(gone b)"


PLACES = {
    "messages[1].tool_calls": called() | {"tool_calls": "f"},
    "messages[1].tool_calls[0]": called() | {"tool_calls": ["f"]},
    "messages[1].tool_calls[0].function": called("f"),
    "messages[1].tool_calls[1].function.name": called(function(), function(name=None)),
    "messages[1].tool_calls[0].id": called(function(), id=3),
    "messages[1].tool_calls[0].function.arguments": called(function(["a"])),
    "messages[1].function_call": {"role": "assistant", "function_call": "f"},
    "messages[1].function_call.name": {"role": "assistant", "function_call": {}},
    "messages[1].function_call.arguments": {
        "role": "assistant",
        "function_call": function(3),
    },
    "messages[1].name": {"role": "function", "content": "b"},
    "messages[1].tool_call_id": {"role": "tool", "content": "b", "tool_call_id": [1]},
}


@pytest.mark.parametrize("place", PLACES)
def test_calls_that_are_none_are_told_with_their_place(place):
    """
    Whatever the template is, the error names the place.
    """
    with pytest.raises(InvalidRequest) as caught:
        rendered(PRINTS, [USER, PLACES[place]])

    assert caught.value.name == place


@pytest.mark.parametrize("arguments", ['{"city": "Pa', "[1]", "no JSON"])
def test_a_template_that_wants_objects_gets_one(arguments):
    """
    Arguments of a call that was cut are an object with their text, so a session goes on.
    """
    text = rendered(STRICT, [USER, called(function(arguments)), USER])

    assert text == f"[input={arguments}]"


def test_a_template_that_refuses_is_explained():
    """
    Of history that the template does not take, the error names the first place at fault.
    """
    never = "{% if messages | length > 1 %}{{ raise_exception('no') }}{% endif %}"

    with pytest.raises(InvalidRequest) as caught:
        rendered(never + STRICT, [USER, USER, called(function("no JSON"))])

    assert caught.value.name == "messages[2].tool_calls[0].function.arguments"
    assert "what the chat template takes" in caught.value.allowed


def test_other_refusals_stay():
    """
    A template that refuses good history is not explained by it.
    """
    with pytest.raises(InvalidRequest) as caught:
        rendered("{{ raise_exception('no') }}", [USER, called(function('{"a": 1}'))])

    assert caught.value.name == "messages"


@pytest.mark.anyio
async def test_all_that_reads_a_chat_reads_its_history():
    """
    Counting, rendering and generating agree, and all tell the place.
    """
    bad = [USER, called("f")]
    async with fake_engine(chat_template=PRINTS) as engine:
        text = await engine.render([USER, called(function())])
        count = await engine.count([USER, called(function())])
        for verb in (engine.render, engine.count, engine.tokenize, engine.complete):
            with pytest.raises(InvalidRequest, match=r"messages\[1\].tool_calls\[0\]"):
                await verb(bad)

    assert (text, count) == ("[call00001 f {}]", 1 + len(text))


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text("{}[]\"':,1a", max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["id", "type", "function", "name", "arguments"]), inner
        )
    ),
    max_leaves=6,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"]), "content": st.just("a")},
    optional={
        "tool_calls": JUNK
        | st.lists(st.fixed_dictionaries({"function": JUNK}), max_size=2),
        "tool_call_id": JUNK,
    },
)


@settings(max_examples=3 * settings().max_examples)
@given(st.lists(MESSAGE, min_size=1, max_size=4))
def test_no_history_is_an_internal_error(messages):
    """
    Whatever stands in the place of calls, it is read as a copy, or refused as a request.
    """
    before = json.dumps(messages)
    with suppress(RequestError):
        with_history(list, messages)

    assert json.dumps(messages) == before
