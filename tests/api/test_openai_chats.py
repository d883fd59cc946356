"""Chats as OpenAI's clients send them."""

import pytest

from pyllama_raw import SamplingParams
from pyllama_raw.errors import InvalidRequest, Unsupported
from pyllama_raw.testing import fake_engine
from tests.serve.support import chatting

pytestmark = pytest.mark.anyio

PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls %}{{ call.function.name }}"
    "({{ call.function.arguments.city }}){% endfor %}</>{% endfor %}"
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ mood }}{% endif %}"
)
PARTS = (
    "{% for m in messages %}{% for p in m.content %}({{ p.text }}){% endfor %}"
    "{% endfor %}"
)
USER = {"role": "user", "content": "hi"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"type": "function", "function": {"name": "f", "arguments": '{"city": "Rom"}'}}
    ],
}
TOOL = {"type": "function", "function": {"name": "weather"}}


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def said(content: object) -> dict[str, object]:
    return {"role": "assistant", "content": content}


@pytest.mark.parametrize(
    ("messages", "options", "text"),
    [
        ([USER], {}, "<user>hi</><assistant>"),
        (
            [{"role": "user", "content": [part("a"), part("b")]}],
            {},
            "<user>a\nb</><assistant>",
        ),
        ([USER, CALL], {}, "<user>hi</><assistant>f(Rom)</><assistant>"),
        ([USER], {"tools": [TOOL]}, "<user>hi</>[weather]<assistant>"),
        ([USER], {"template_kwargs": {"mood": "!"}}, "<user>hi</><assistant>!"),
        ([USER], {"chat_template": "{{ messages[0].content }}?"}, "hi?"),
        ([USER, said("Well, ")], {}, "<user>hi</><assistant>Well, "),
        ([USER, said("/")], {}, "<user>hi</><assistant>/"),
        ([USER, said([part("a"), part("b ")])], {}, "<user>hi</><assistant>a\nb "),
        ([USER, said("")], {}, "<user>hi</><assistant>"),
    ],
)
async def test_chats_are_rendered_as_clients_mean_them(messages, options, text):
    """
    Parts, calls, tools and variables reach the template; a begun answer goes on.
    """
    async with chatting(chat_template=PLAIN) as engine:
        rendered = await engine.render(messages, **options)
        n_tokens = await engine.count(messages, **options)
        result = await engine.complete(
            messages, SamplingParams(max_tokens=1), **options
        )

    assert rendered == text
    assert n_tokens == result.usage.prompt_tokens == 1 + len(text)  # bytes behind <s>


async def test_templates_that_want_parts_get_them():
    """
    Parts stay parts for a template that prints nothing of a plain text.
    """
    messages = [{"role": "user", "content": [part("a"), part("b")]}]
    async with chatting(chat_template=PARTS) as engine:
        rendered = await engine.render(messages)

    assert rendered == "(a)(b)"


@pytest.mark.parametrize(
    ("prompt", "options", "name"),
    [
        ([USER], {"tools": "weather"}, "tools"),
        ([USER], {"tools": [object()]}, "tools"),
        ([USER], {"template_kwargs": {"messages": []}}, "template_kwargs"),
        ([USER], {"template_kwargs": {"a b": 1}}, "template_kwargs"),
        ([USER], {"template_kwargs": [1]}, "template_kwargs"),
        ([USER], {"chat_template": "{% if %}"}, "chat_template"),
        ([USER], {"chat_template": 7}, "chat_template"),
        ("text", {"tools": [TOOL]}, "tools"),
        ([1, 2], {"chat_template": "x"}, "chat_template"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "content"),
        (
            [USER, said("gone")],
            {"chat_template": "{{ messages[0].content }}"},
            "messages",
        ),
        ([USER | {"role": "bogus"}], {}, "messages[0].role"),
        (
            [USER | {"role": "</>"}],
            {"chat_template": "{{ '</>' }}"},
            "messages[0].role",
        ),
        ([USER], {"tools": [TOOL], "chat_template": "a"}, "chat_template"),
    ],
)
async def test_what_cannot_be_a_chat_is_refused_by_name(prompt, options, name):
    """
    A wrong option of a chat is the caller's mistake, with its name.
    """
    async with chatting(chat_template=PLAIN) as engine:
        with pytest.raises(InvalidRequest) as caught:
            await engine.complete(prompt, SamplingParams(max_tokens=1), **options)

    assert caught.value.name == name


async def test_images_are_refused_in_words():
    """
    The message says that the model takes none.
    """
    image = {"role": "user", "content": [part("a"), {"type": "image_url"}]}
    async with chatting(chat_template=PLAIN) as engine:
        with pytest.raises(InvalidRequest, match="this model takes no images"):
            await engine.complete([image])


async def test_a_template_can_be_given_to_a_model_without_one():
    """
    chat_template serves where the model has none, and only in its request.
    """
    async with fake_engine() as engine:
        rendered = await engine.render(
            [USER], chat_template="{{ messages[0].content }}"
        )
        with pytest.raises(Unsupported):
            await engine.render([USER])

    assert rendered == "hi"


@pytest.mark.parametrize("options", [{"tools": None}, {"template_kwargs": None}])
async def test_none_is_no_option(options):
    """
    None stands for what was not given, also beside prompts that are no chat.
    """
    async with fake_engine() as engine:
        assert await engine.count("ab", **options) == 3


async def test_what_only_renders_takes_no_options_of_serving():
    """
    An option that would do nothing is refused, and so is one that nobody knows.
    """
    async with chatting(chat_template=PLAIN) as engine:
        for options in ({"deadline_s": 1}, {"tool": []}):
            with pytest.raises(TypeError, match="is no option of a chat"):
                await engine.count([USER], **options)
            with pytest.raises(TypeError, match="is no option of a chat"):
                await engine.render([USER], **options)


async def test_tools_that_no_prompt_would_show_are_refused():
    """
    The error names the option and what to give; the capabilities say it beforehand.
    """
    async with fake_engine(
        chat_template="{{ messages[0].content if not tools }}"
    ) as engine:
        with pytest.raises(Unsupported) as caught:
            await engine.render([USER], tools=[TOOL])
        without = [await engine.render([USER], tools=tools) for tools in (None, [])]
        knows = engine.capabilities.tools

    assert caught.value.operation == "tools"
    assert "chat template" in caught.value.reason
    assert "chat_template=" in caught.value.reason
    assert without == ["hi", "hi"]
    assert knows is False


@pytest.mark.parametrize(
    ("source", "knows"),
    [(PLAIN, True), (PARTS, False), ("{% if %}", False), (None, False)],
)
async def test_capabilities_tell_of_tools(source, knows):
    """
    Also of a template that cannot be read, and where there is none; after the end, too.
    """
    async with chatting(chat_template=source) as engine:
        pass

    assert engine.capabilities.tools is knows


async def test_roles_that_a_template_names_are_taken():
    """
    Others are refused, because a template drops them or makes a turn of nobody.
    """
    source = "{% for m in messages if m.role in ['user', 'critic'] %}{{ m.content }}{% endfor %}"
    async with chatting(chat_template=source) as engine:
        rendered = await engine.render([USER, {"role": "critic", "content": "no"}])

    assert rendered == "hino"
