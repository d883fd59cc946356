"""The specification of a chat template."""

from __future__ import annotations

import pytest

from pyllama_raw.replies.derive import by_markers, spec_for
from pyllama_raw.replies.spec import CallsSpec, ReasoningSpec, ReplySpec, bundled
from tests.replies.test_derive import FakeTemplate, objects, refuses

DERIVED = ReplySpec(
    reasoning=ReasoningSpec(),
    calls=CallsSpec(
        start=("<tool_call>\n", "<tool_call>"),
        end=("\n</tool_call>", "</tool_call>"),
        separator="\n",
    ),
)


def test_markers_of_a_family_find_its_specification() -> None:
    """All markers have to be there; a template that refuses is known by them alone."""
    markers = bundled()["kimi_k2"].markers

    found = spec_for(" ".join(markers), refuses)

    assert found == bundled()["kimi_k2"]
    assert by_markers(" ".join(markers)[:-1]) != bundled()["kimi_k2"]


@pytest.mark.parametrize("family", ["think", "kimi_k2"])
def test_a_family_that_does_not_read_what_is_printed_gives_way(family: str) -> None:
    """Markers in the template, and calls of another layout in its prompts: it is derived."""
    template = " ".join(bundled()[family].markers) + family

    found = spec_for(template, FakeTemplate(objects, thinks=True))

    assert found == DERIVED


def test_a_family_that_reads_what_is_printed_is_taken() -> None:
    """It knows more than what is derived, such as other spellings."""
    template = " ".join([*bundled()["hermes"].markers, "printed"])

    found = spec_for(template, FakeTemplate(objects, thinks=True))

    assert found == bundled()["hermes"]
