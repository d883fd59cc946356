"""Specifications of replies by chat templates."""

from __future__ import annotations

import pytest

from pyllama_raw.prompts.rendering.processes import TemplateProcesses, Unreadable
from pyllama_raw.prompts.reply_plan import reply_spec
from pyllama_raw.replies.spec import CallsSpec, ObjectCall, ReplySpec, bundled

STRANGE = """
{%- for message in messages -%}
[{{ message.role }}]{{ message.content }}
{%- for call in message.tool_calls -%}
[CALL]{{ call.function | tojson }}[/CALL]
{%- endfor -%}
[END]
{%- endfor -%}
{%- if add_generation_prompt -%}[assistant]{%- endif -%}
"""


def test_a_template_of_no_known_family_is_rendered() -> None:
    """What it prints around calls is how they are read."""
    found = reply_spec(STRANGE)

    calls = CallsSpec(layout=ObjectCall(), start=("[CALL]",), end=("[/CALL]",))
    assert found == ReplySpec(calls=calls)


def test_a_template_that_refuses_has_what_it_names() -> None:
    """Reasoning by its usual tag, or nothing."""
    refuses = "{{ raise_exception('no') }}"

    found = [reply_spec(refuses), reply_spec(refuses + "<think>")]

    assert found == [None, bundled()["think"]]


def test_a_template_is_rendered_once(monkeypatch) -> None:
    """What was found, also that there is nothing, is known by the text of the template."""
    refuses = "{{ raise_exception('asked twice') }}"
    first = reply_spec(refuses)
    monkeypatch.setattr(TemplateProcesses, "render", None)

    assert (first, reply_spec(refuses)) == (None, None)


def test_an_unreadable_template_is_told() -> None:
    """A template that is no Jinja has no specification."""
    with pytest.raises(Unreadable):
        reply_spec("{% if %}")
