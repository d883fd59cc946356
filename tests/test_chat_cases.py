"""The script that tries llama.cpp's chat cases."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pyllama_raw.replies.spec import ReasoningSpec, ReplySpec
from scripts import chat_cases
from scripts.chat_case_runs import Found, comparable, feeds, mistake_in
from scripts.chat_case_templates import Template
from scripts.llama_chat_cases import Case, Message

SPEC = ReplySpec(reasoning=ReasoningSpec(start=("<|think|>",), end=("<|/think|>",)))
TEMPLATE = """
{%- for message in messages -%}
<|{{ message.role }}|>{{ message.content }}<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|><|think|>{%- endif -%}
"""
EXPECTED = Message("assistant", "Hello", "I think é")
CASE = Case(
    1, "x.jinja", "I think é<|/think|>Hello", expected=EXPECTED, takes_reasoning=True
)


@pytest.fixture
def template(tmp_path: Path) -> Template:
    path = tmp_path / "x.jinja"
    path.write_text(TEMPLATE)
    return Template(path)


def test_a_case_is_held_against_its_parts(template: Template) -> None:
    """No difference is no mistake; another one names both."""
    other = Case(
        2, "x.jinja", CASE.text, expected=Message("", "Bye"), takes_reasoning=True
    )

    found = [mistake_in(case, template, SPEC, 0) for case in (CASE, other)]

    assert found[0] == ""
    assert "'Hello'" in found[1]
    assert "'Bye'" in found[1]


def test_pieces_are_the_text(template: Template) -> None:
    """Drawn pieces are all of the text; control tokens are fed as such, alone."""
    bound = SPEC.bound(lambda text: text in ("<|think|>", "<|/think|>"))

    drawn = list(feeds(CASE.text, bound, random.Random(1)))  # noqa: S311

    assert {"".join(text for text, _ in feed) for feed in drawn} == {CASE.text}
    assert {text for feed in drawn for text, special in feed if special} == {
        "<|/think|>"
    }


def test_arguments_that_are_cut_are_not_compared() -> None:
    """As in llama.cpp's tests: JSON by its value, ids where one is expected."""
    wanted = Found("", "", (("f", '{"a": 1}', ""), ("g", "{", "7")))
    found = Found(" ", "", (("f", '{"a":1}', "made"), ("g", '{"b', "7")))

    assert comparable(found, wanted) == comparable(wanted, wanted)


@pytest.mark.parametrize(
    ("mistakes", "listed", "code"),
    [
        ({}, [], 0),
        ({"x.jinja:1": "has"}, ["x.*"], 0),
        ({"x.jinja:1": "has"}, [], 1),
        ({}, ["x.jinja:1"], 1),
        ({}, ["y.*"], 1),
    ],
    ids=["as expected", "listed", "not listed", "listed and passes", "no such case"],
)
def test_only_what_is_listed_may_differ(
    mistakes: dict[str, str],
    listed: list[str],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A listed case that passes is a mistake as one is that fails and is not listed."""
    table = tmp_path / "table.toml"
    table.write_text(f"[differs]\n'a reason' = {listed}\n")
    monkeypatch.setattr(chat_cases, "TABLE", table)

    assert chat_cases.report([CASE], mistakes, is_all=True) == code
