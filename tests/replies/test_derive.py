"""Specifications derived by rendering."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyllama_raw.replies.derive import derive
from pyllama_raw.replies.spec import (
    CallsSpec,
    JsonCall,
    LiteralCall,
    ObjectCall,
    ReasoningSpec,
    ReplySpec,
    TaggedCall,
)

Function = dict[str, Any]
HEAD, END = "<|im_start|>", "<|im_end|>\n"


class FakeTemplate:
    """
    Renders chats as templates do.

    Args:
        calls: the text of calls of functions.
        answer: what stands before and after the text of an answer.
        thinks: whether it prints reasoning.
    """

    def __init__(
        self,
        calls: Callable[[list[Function]], str] | None = None,
        *,
        answer: tuple[str, str] = ("", ""),
        thinks: bool = False,
    ) -> None:
        self._calls, self._answer, self._thinks = calls, answer, thinks

    def __call__(
        self,
        messages: list[Any],
        tools: list[Any],
        *,
        add_generation_prompt: bool,
        **_: Any,
    ) -> str | None:
        text = "".join(self._message(message) for message in messages)
        return f"{json.dumps(tools)}\n{text}" + (
            f"{HEAD}assistant\n" if add_generation_prompt else ""
        )

    def _message(self, message: dict[str, Any]) -> str:
        text = message["content"]
        if message["role"] == "assistant" and text:
            text = text.join(self._answer)
        if self._thinks and message.get("reasoning_content"):
            text = f"<think>\n{message['reasoning_content']}\n</think>\n\n{text}"
        if self._calls and message.get("tool_calls"):
            functions = [call["function"] for call in message["tool_calls"]]
            text += "\n" * bool(text) + self._calls(functions)
        return f"{HEAD}{message['role']}\n{text}{END}"


def objects(functions: list[Function]) -> str:
    return "\n".join(
        f"<tool_call>\n{json.dumps(function)}\n</tool_call>" for function in functions
    )


def array(functions: list[Function]) -> str:
    written = [
        {"tool_name": f["name"], "parameters": f["arguments"]} for f in functions
    ]
    return f"<|ACTION|>{json.dumps(written)}<|END_ACTION|>"


def named(functions: list[Function]) -> str:
    calls = "".join(
        f"<|call|>functions.{f['name']}:{n}<|args|>{json.dumps(f['arguments'])}<|end|>"
        for n, f in enumerate(functions)
    )
    return f"<|calls|>{calls}<|calls_end|>"


def tagged(functions: list[Function]) -> str:
    def one(function: Function) -> str:
        pairs = function["arguments"].items()
        inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in pairs)
        return f"<function={function['name']}>\n{inner}</function>"

    return "\n".join(f"<tool_call>\n{one(f)}\n</tool_call>" for f in functions)


def literal(functions: list[Function]) -> str:
    def one(function: Function) -> str:
        pairs = ", ".join(f"{k}={v!r}" for k, v in function["arguments"].items())
        return f"{function['name']}({pairs})"

    return f"<|calls|>[{', '.join(map(one, functions))}]<|calls_end|>"


CASES = {
    "objects": (
        FakeTemplate(objects, thinks=True),
        ReplySpec(
            reasoning=ReasoningSpec(),
            calls=CallsSpec(
                layout=ObjectCall(),
                start=("<tool_call>\n", "<tool_call>"),
                end=("\n</tool_call>", "</tool_call>"),
                separator="\n",
            ),
        ),
    ),
    "array": (
        FakeTemplate(array, answer=("<|TEXT|>", "<|END_TEXT|>")),
        ReplySpec(
            calls=CallsSpec(
                layout=ObjectCall(name="tool_name", arguments="parameters", array=True),
                open=("<|ACTION|>",),
                close=("<|END_ACTION|>",),
                separator=", ",
            ),
            ignored=("<|TEXT|>", "<|END_TEXT|>"),
        ),
    ),
    "named": (
        FakeTemplate(named),
        ReplySpec(
            calls=CallsSpec(
                layout=JsonCall(
                    header=("functions.{name}:{index}",),
                    header_end=("<|args|>",),
                    header_is_id=True,
                ),
                open=("<|calls|>",),
                close=("<|calls_end|>",),
                start=("<|call|>",),
                end=("<|end|>",),
            ),
        ),
    ),
    "tagged": (
        FakeTemplate(tagged),
        ReplySpec(
            calls=CallsSpec(
                layout=TaggedCall(
                    header_end=(">",),
                    start=("\n<parameter=", "<parameter="),
                    middle=(">\n", ">"),
                    end=("\n</parameter>", "</parameter>"),
                ),
                start=("<tool_call>\n<function=",),
                end=("\n</function>\n</tool_call>", "</function>\n</tool_call>"),
                separator="\n",
            ),
        ),
    ),
    "literal": (
        FakeTemplate(literal),
        ReplySpec(
            calls=CallsSpec(
                layout=LiteralCall(header_end=("(",), quotes=("'", '"')),
                open=("<|calls|>[",),
                close=("]<|calls_end|>",),
                separator=", ",
            ),
        ),
    ),
    "reasoning alone": (
        FakeTemplate(thinks=True),
        ReplySpec(reasoning=ReasoningSpec()),
    ),
}


@pytest.mark.parametrize(("template", "spec"), CASES.values(), ids=CASES)
def test_a_layout_is_found(template: FakeTemplate, spec: ReplySpec) -> None:
    """What a template prints around calls and reasoning is the specification."""
    assert derive(template) == spec


def refuses(*_: Any, **__: Any) -> None:
    """A template that takes no chat."""


def test_nothing_is_derived_where_nothing_is_printed() -> None:
    """A template without calls and reasoning, or that refuses, has no specification."""
    found = [derive(FakeTemplate()), derive(refuses)]

    assert found == [None, None]


def test_messages_with_headers_of_words_are_not_derived() -> None:
    """Words around an answer say what a message is, which rendering does not tell."""
    template = FakeTemplate(named, answer=("<|channel|>final<|message|>", ""))

    assert derive(template) is None


WORDS = [
    "contentvalue", "reasonvalue", "firsttool", "secondtool", "firstvalue", "secondvalue",
    "alphakey", "betakey", "4711", "815", "idaaaaaaa", "<a>", "</a>", "<think>", "[A]",
    "{", "}", "[", "]", "(", ")", ":", "=", ",", '"', "'", " ", "\n", "x", "0",
    '{"alphakey": "firstvalue", "betakey": 4711}',
    '{"alphakey": "secondvalue", "betakey": 815}',
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(WORDS), max_size=30).map("".join)


@given(st.lists(TEXTS, min_size=1, max_size=8))
def test_whatever_a_template_prints_is_no_mistake(texts: list[str]) -> None:
    """A template is a stranger's program: what it prints is a specification or none."""
    left = iter(texts * 20)

    found = derive(lambda *_, **__: next(left))

    assert found is None or isinstance(found, ReplySpec)
