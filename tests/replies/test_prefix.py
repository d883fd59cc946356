"""The end of the prompt, in which a reply may have begun."""

from __future__ import annotations

import pytest

from pyllama_raw.replies.parser import Content, Part, Reasoning, ReplyParser
from pyllama_raw.replies.spec import ReasoningSpec, ReplySpec

SPEC = ReplySpec(reasoning=ReasoningSpec(end=("</think>\n\n", "</think>")))


@pytest.mark.parametrize(
    ("prefix", "first"),
    [
        ("", Content("one")),
        ("<|im_start|>assistant\n", Content("one")),
        ("<|im_start|>assistant\n<think>\n", Reasoning("one")),
        ("<|im_start|>assistant\n<think>\nFor ", Reasoning("one")),
        ("<think>\n\n</think>", Content("one")),
        ("<think>\n\n</think>\n", Content("one")),
        ("<think>\n\n</think>\n\n", Content("one")),
        ("<|assistant|></think>", Content("one")),
        ("<think>why</think>Because ", Content("one")),
    ],
)
def test_a_reply_goes_on_where_the_prompt_ends(prefix: str, first: Part) -> None:
    """
    Reasoning that the prompt begins, behind the header of the message too, is gone on with; the
    end of reasoning counts although a longer one might have come.
    """
    parser = ReplyParser(SPEC, prefix=prefix)

    parts = [*parser.feed("one"), *parser.finish()]

    assert parts == [first]
