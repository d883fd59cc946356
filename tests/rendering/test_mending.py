"""Chats that a template refuses are rendered in a form that it takes."""

import pytest

from pyllama_raw.prompts.rendering.template import CompiledTemplate
from tests.rendering.published import REFUSING, compiled_templates

# Each prints all roles, and raises for one thing.
PRINTS = "[{{ m.role }}]{{ m.content }}"
STRICT = {
    "system": "{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}",
    "any system": "{% if m.role == 'system' %}{{ raise_exception('none') }}{% endif %}",
    "turns": "{% if not loop.first and m.role == loop.previtem.role %}{{ raise_exception('turns') }}{% endif %}",
    "first": "{% if loop.first and m.role == 'assistant' %}{{ raise_exception('first') }}{% endif %}",
    "results": "{% if m.role == 'tool' %}{{ raise_exception('no call') }}{% endif %}",
    "ids": "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('id') }}{% endif %}{{ c.id }}{% endfor %}{{ m.tool_call_id }}",
    "empty": "{% if not m.content %}{{ raise_exception('empty') }}{% endif %}",
}


def said(role, content=None, **fields):
    return {"role": role, "content": content, **fields}


def rendered(source, *messages):
    template = CompiledTemplate(source, {})
    return template.render(list(messages))[0]


def strict(name):
    return f"{{% for m in messages %}}{STRICT[name]}{PRINTS}{{% endfor %}}"


CALL = {"id": "toolu_01AbC", "type": "function", "function": {"name": "f"}}
CASES = {
    "several in front": (
        "system",
        [said("system", "a"), said("developer", "b"), said("user", "c")],
        "[system]a\n\nb[user]c",
    ),
    "between turns: the next message of the user": (
        "system",
        [
            said("user", "a"),
            said("assistant", "b"),
            said("system", "c"),
            said("user", "d"),
        ],
        "[user]a[assistant]b[user]c\n\nd",
    ),
    "behind the user: the message before": (
        "system",
        [said("system", "a"), said("user", "b"), said("system", "c")],
        "[system]a[user]b\n\nc",
    ),
    "stays where it was when a chat goes on": (
        "system",
        [
            said("user", "b"),
            said("system", "c"),
            said("assistant", "d"),
            said("user", "e"),
        ],
        "[user]b\n\nc[assistant]d[user]e",
    ),
    "no system at all": (
        "any system",
        [said("system", "a"), said("user", "b")],
        "[user]a\n\nb",
    ),
    "nobody but systems": ("any system", [said("system", "a")], "[user]a"),
    "two of a role": (
        "turns",
        [said("user", "a"), said("user", "b"), said("assistant", "c")],
        "[user]a\n\nb[assistant]c",
    ),
    "the assistant first": (
        "first",
        [said("assistant", "a"), said("user", "b")],
        "[user][assistant]a[user]b",
    ),
    "results without a call": (
        "results",
        [said("user", "a"), said("tool", "b", tool_call_id="1")],
        "[user]a[user]b",
    ),
    "ids": (
        "ids",
        [
            said("assistant", "", tool_calls=[CALL]),
            said("tool", "b", tool_call_id=CALL["id"]),
        ],
        "call00000[assistant]call00000[tool]b",
    ),
    "an assistant that says nothing": (
        "empty",
        [said("user", "a"), said("assistant", ""), said("user", "b")],
        "[user]a[user]b",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_template_refuses_is_put_in_its_form(case):
    """
    No text is made up or lost.
    """
    name, messages, text = CASES[case]

    assert rendered(strict(name), *messages) == text


def test_a_template_that_takes_a_chat_gets_it_as_it_is():
    """
    Whatever the order of its messages.
    """
    chat = [
        said("user", "a"),
        said("system", "b"),
        said("system", "c"),
        said("user", "d"),
    ]
    source = f"{{% for m in messages %}}{PRINTS}{{% endfor %}}"

    assert rendered(source, *chat) == "[user]a[system]b[system]c[user]d"


def test_what_would_silently_be_left_out_is_printed():
    """
    Some templates print a system message only where it is the first, and raise nothing.
    """
    only = "{% if m.role == 'user' or (m.role == 'system' and loop.first) %}"
    source = f"{{% for m in messages %}}{only}{PRINTS}{{% endif %}}{{% endfor %}}"
    chat = [
        said("system", "a"),
        said("user", "b"),
        said("system", "c"),
        said("user", "d"),
    ]

    assert rendered(source, *chat) == "[system]a[user]b[user]c\n\nd"


@pytest.mark.parametrize("message", [said("user"), {"role": "user"}])
def test_a_message_without_content_is_an_empty_one(message):
    """
    A template would print the word None, or raise.
    """
    assert rendered("{{ messages[0].content + '.' }}", message) == "."


def test_a_refusal_that_no_change_mends_stays():
    """
    Its words are those of the chat as it was.
    """
    source = "{{ raise_exception('never, ' ~ messages[-1].content) }}"

    with pytest.raises(Exception, match="never, b"):
        rendered(source, said("user", "a"), said("user", "b"))


def test_an_answer_without_reasoning_has_an_empty_one():
    """
    Templates of models that always think raise without it. What others print of it stays.
    """
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' and "
        "m.reasoning_content is not defined %}{{ raise_exception('no thoughts') }}"
        "{% endif %}({{ m.reasoning_content }})" + PRINTS + "{% endfor %}"
    )
    chat = [
        said("user", "a"),
        said("assistant", "b"),
        said("user", "c"),
        said("assistant", "d") | {"reasoning": "e"},
        said("user", "f"),
    ]

    text = rendered(source, *chat)

    assert text == "()[user]a()[assistant]b()[user]c(e)[assistant]d()[user]f"


def test_parts_stay_parts_where_messages_join():
    """
    With the text of the other message as one more.
    """
    image = {"type": "image", "image": "b"}
    source = strict("turns").replace("m.content", "m.content | tojson")

    text = rendered(source, said("user", "a"), said("user", [image]))

    parts = '[{"type": "text", "text": "a"}, {"type": "image", "image": "b"}]'
    assert text == f"[user]{parts}"


@pytest.mark.parametrize(
    "chat",
    [
        [said("system", "one"), said("system", "two"), said("user", "three")],
        [
            said("user", "one"),
            said("assistant", "two"),
            said("system", "three"),
            said("user", "four"),
        ],
        [said("user", "one"), said("user", "two")],
        [said("assistant", "one"), said("user", "two")],
    ],
)
def test_templates_of_published_models_print_all_of_a_chat(chat):
    """
    In whatever order its roles are.
    """
    lost = {}
    for name, template in compiled_templates().items():
        if name not in REFUSING:
            text = template.render(chat)[0]
            lost[name] = [m["content"] for m in chat if m["content"] not in text]

    assert {name: words for name, words in lost.items() if words} == {}
