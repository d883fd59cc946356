"""What is said in a chat, without a model."""

import pytest

from pyllama_raw.cli.inputs import HELP, Conversation


def test_turns_are_kept_after_the_system_message():
    """
    The next message comes after all that was said; a turn without an answer is not kept.
    """
    talk = Conversation("Be brief.")
    talk.take("one", "1")
    talk.take("stopped before the first token", "")

    messages = talk.with_message("two")

    assert [(m["role"], m["content"]) for m in messages] == [
        ("system", "Be brief."),
        ("user", "one"),
        ("assistant", "1"),
        ("user", "two"),
    ]


@pytest.mark.parametrize(
    ("line", "told", "contents"),
    [
        ("/reset", "forgotten", ["old", "hi"]),
        ("/system  new one ", "system message set", ["new one", "q", "a", "hi"]),
        ("/system", "no system message", ["q", "a", "hi"]),
        ("/help", HELP, ["old", "q", "a", "hi"]),
        ("/rest", "/rest is no command: /help lists them", ["old", "q", "a", "hi"]),
    ],
)
def test_commands(line, told, contents):
    """
    Each says what it did, and changes nothing else.
    """
    talk = Conversation("old")
    talk.take("q", "a")

    assert talk.command(line) == told
    assert [m["content"] for m in talk.with_message("hi")] == contents
