"""A chat reaches each template in the form that it takes, whatever form clients send."""

import json

import pytest

from pyllama_raw.prompts.rendering.template import CompiledTemplate

USER = {"role": "user", "content": "hi"}
ARGUMENTS = {"city": "Rom"}
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
SHOWN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
LOOPED = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endif %}{% endfor %}"
)
FIRST = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}"
    "{% else %}{{ m.content[0].text }}{% endif %}{% endfor %}"
)
CALLS = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ WHAT }}{% endfor %}{% endfor %}"


def text_of(source: str, *messages, **options) -> str:
    return CompiledTemplate(source, {}).render(list(messages), **options)[0]


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def call(arguments: object, content: str | None = None) -> dict[str, object]:
    function = {"name": "f", "arguments": arguments}
    calls = [{"id": "abcdefghi", "type": "function", "function": function}]
    return {"role": "assistant", "content": content, "tool_calls": calls}


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize(
    ("source", "text"),
    [
        (LOOPED, "[a][b]"),
        (FIRST, "a\nb"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "a\nb"),
        ("{% for m in messages %}{{ '' + m.content }}{% endfor %}", "a\nb"),
        ("{% for m in messages %}{{ m.content | tojson }}{% endfor %}", '"a\\nb"'),
    ],
)
def test_parts_go_to_templates_that_print_them(source, text, role):
    """
    A template that prints all parts gets them, any other one their lines.
    """
    assert text_of(source, {"role": role, "content": parts("a", "b")}) == text


def test_a_role_decides_whether_parts_are_printed():
    """
    A template may print the parts of a user and join nothing of the system's.
    """
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ '' + m.content }}"
        "{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
    )
    both = [{"role": role, "content": parts("a", "b")} for role in ("system", "user")]

    assert text_of(source, *both) == "a\nbab"


@pytest.mark.parametrize("arguments", [ARGUMENTS, json.dumps(ARGUMENTS)])
@pytest.mark.parametrize("content", [None, ""])
@pytest.mark.parametrize(
    "what",
    [
        "c.function.name ~ (c.function.arguments | tojson)",
        "c.function.name + c.function.arguments",
        "c.function.name ~ c.function.arguments",
        "(c.function.name + c.function.arguments) if m.content is none",
        "(c.function.name ~ c.function.arguments|tojson) if m.content is none",
    ],
)
def test_calls_have_the_arguments_that_a_template_prints(what, content, arguments):
    """
    A mapping, or JSON in a text, and no content or an empty one.
    """
    source = CALLS.replace("WHAT", what)

    assert text_of(source, USER, call(arguments, content)) == 'f{"city": "Rom"}'


def test_templates_may_loop_over_tools_that_nobody_gave():
    """
    Without tools the variable is undefined: None is nothing to loop over.
    """
    source = "{% for tool in tools %}{{ tool.name }}{% endfor %}{{ tools is defined }}"

    assert [text_of(source, USER, tools=tools) for tools in (None, [], [FUNCTION])] == [
        "False",
        "False",
        "fTrue",
    ]


def test_templates_may_fill_lists_and_print_what_filters_give():
    """
    Lists of its own grow, and generators are JSON.
    """
    source = (
        "{% set seen = [] %}{% for m in messages %}{% set _ = seen.append(m) %}"
        "{% endfor %}{{ seen | map(attribute='content') | tojson }}"
    )

    assert text_of(source, USER, USER) == '["hi", "hi"]'


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (SHOWN, "<system>a"),
        (SHOWN + "{# 'system' #}{{ '' if 'developer' }}", "<developer>a"),
        (
            "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
            "{% elif m.role == 'developer' %}{% endif %}{% endfor %}",
            "a",
        ),
    ],
    ids=["prints any role", "knows developers", "knows and drops them"],
)
def test_a_developer_is_heard(source, text):
    """
    Where a template does not name developers, or prints nothing of them, they are the system.
    """
    assert text_of(source, {"role": "developer", "content": "a"}) == text


@pytest.mark.parametrize("read", ["reasoning_content", "thinking"])
@pytest.mark.parametrize("given", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_many_names(given, read):
    """
    Whichever a client sends, a template finds the one that it reads.
    """
    source = "{% for m in messages %}" + f"{{{{ m.{read} }}}}" + "{% endfor %}"
    answer = {"role": "assistant", "content": "b"}

    assert text_of(source, USER, answer | {given: "because"}) == "because"


@pytest.mark.parametrize(
    ("source", "takes"),
    [
        (SHOWN, False),
        ("{{ 'tools' if tools }}{{ messages[0].content }}", False),
        ("{% for t in tools or [] %}{{ t.function.name }}{% endfor %}", True),
        ("{% for t in tools or [] %}{{ t.name }}{% endfor %}", True),
        ("{% if messages|length > 1 %}{{ tools | tojson }}{% endif %}", True),
        ("{{ raise_exception('never') }}", True),
    ],
)
def test_tools_are_taken_if_they_stand_in_the_prompt(source, takes):
    """
    To name tools is not to print them; where no chat can be tried, a template is believed.
    """
    assert CompiledTemplate(source, {}).takes.tools is takes
