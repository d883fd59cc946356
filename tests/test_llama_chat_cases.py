"""The reader of llama.cpp's chat cases: C++ that is written like data."""

from __future__ import annotations

import pytest

from scripts.cpp_values import Block, Expression, Statement, Unread, tokens_of, tree_of
from scripts.llama_chat_cases import Case, Message, Reader

SOURCE = r"""
#include "chat.h"
static common_chat_tool a_tool{
    /* .name = */ "a", "about", R"({"type": "object"})",
};
const common_chat_msg message_user{ "user", "Hey!", {}, {}, "", "", "", };
const common_chat_msg known = simple_assist_msg("text", "thought", "a", "{}");

static void test_both(const std::string & path, bool detailed_debug) {
    auto tst = peg_tester(path, detailed_debug);
    tst.test("one " "two").run(); // .run()
}

static void test_template_output_peg_parsers(bool detailed_debug) {
    for (const char * path : { "models/x.jinja", "models/y.jinja" }) {
        test_both(path, detailed_debug);
    }
    {
        auto tst = peg_tester("models/z.jinja", detailed_debug);
        const std::string call = "<call>";
        tst.test("\"say\"" + call)
            .reasoning_format(COMMON_REASONING_FORMAT_AUTO)
            .enable_thinking(false)
            .messages({ message_user })
            .continue_final_message(COMMON_CHAT_CONTINUATION_CONTENT)
            .tools({ a_tool })
            .expect(known)
            .run();
        tst.test("").unheard_of(1).run();
        if (call.empty()) {
            tst.test("").run();
        }
    }
}
"""


def test_cases_are_read_with_loops_functions_and_names() -> None:
    """A case has its line, its template, its options and what it expects."""
    reader = Reader(SOURCE)

    tool = {
        "name": "a",
        "description": "about",
        "parameters": {"type": "object"},
    }
    assert reader.cases == [
        Case(11, "x.jinja", "one two"),
        Case(11, "y.jinja", "one two"),
        Case(
            21,
            "z.jinja",
            '"say"<call>',
            tools=[{"type": "function", "function": tool}],
            messages=[Message("user", "Hey!")],
            expected=Message("assistant", "text", "thought", [("a", "{}", "")]),
            takes_reasoning=True,
            enable_thinking=False,
            continues="content",
        ),
    ]


def test_cases_that_are_not_read_are_told() -> None:
    """An unknown option and a case in a condition are named by their lines."""
    reader = Reader(SOURCE)

    assert reader.unread == {
        29: "line 29: the option unheard_of is not known",
        31: "in a block of if",
    }


def test_texts_are_joined_and_unescaped() -> None:
    """Texts side by side are one; raw ones keep their letters."""
    tokens = list(tokens_of(r'"a\n" R"x(b\n")x" + name'))

    value = Expression(tokens, {"name": "c"}, lambda *_: None).value()

    assert value == 'a\nb\\n"c'


def test_braces_are_blocks_or_lists() -> None:
    """A brace after a name begins a list, one after a parenthesis a block."""
    kinds = [type(node) for node in tree_of("int a{1}; f() { b; } { c; }")]

    assert kinds == [Statement, Block, Block]


@pytest.mark.parametrize("source", ["", "f(", "{1 2}", "a b", "unknown"])
def test_what_is_not_like_data_is_unread(source: str) -> None:
    """No other exception leaves an expression."""
    expression = Expression(list(tokens_of(source)), {"a": 1}, lambda *_: None)

    with pytest.raises(Unread):
        expression.value()
