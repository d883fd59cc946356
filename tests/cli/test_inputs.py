"""Lines of JSON and conversations become requests, or errors with an index."""

import io
import sys
from pathlib import Path

import pytest

from pyllama_raw import SamplingParams
from pyllama_raw.cli.inputs import (
    HELP,
    Conversation,
    InputRequest,
    Outcome,
    from_file,
    parse_line,
)


def test_line_overrides_the_defaults():
    """
    A line's own parameters win over those of the command, field by field.
    """
    line = b'{"prompt": "a", "top_p": 1, "stop": "x", "priority": -2, "deadline_s": 3}'

    request = parse_line(0, line, defaults={"max_tokens": 7, "top_p": 0.5})

    sampling = SamplingParams(max_tokens=7, top_p=1, stop=("x",))
    assert request == InputRequest(
        0, "a", sampling, {"priority": -2, "deadline_s": 3.0}
    )


@pytest.mark.parametrize(
    ("line", "prompt"),
    [
        (b'{"prompt": "a"}', "a"),
        (b'{"prompt": ""}', ""),  # the engine knows whether it becomes a token
        (b'{"prompt": [1, 2]}', [1, 2]),
        (
            b'{"messages": [{"role": "user", "content": "a"}]}',
            [{"role": "user", "content": "a"}],
        ),
    ],
)
def test_prompt_is_text_ids_or_messages(line: bytes, prompt: object):
    """
    Each kind of prompt reaches the engine as it was written.
    """
    request = parse_line(0, line, defaults={})

    assert request == InputRequest(0, prompt, SamplingParams())


def test_a_chat_has_options_of_its_reply():
    """
    Those that the line names reach the engine, and no others.
    """
    tools = '"tools": [{"name": "f"}], "reply": true'
    line = f'{{"messages": [{{"role": "user", "content": "a"}}], {tools}}}'

    request = parse_line(0, line.encode(), defaults={})

    assert request.options == {"tools": [{"name": "f"}], "reply": True}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"nope", "a JSON object"),
        (b"\xff", "a JSON object"),
        (b"[1]", "an object"),
        (b"{}", "either prompt or messages"),
        (b'{"prompt": "a", "messages": [{"role": "u", "content": ""}]}', "either"),
        (b'{"prompt": "a", "foo": 1}', "foo=1 is not allowed: give a known option"),
        (b'{"prompt": "a", "max_tokens": "3"}', "max_tokens='3' is not allowed"),
        (b'{"prompt": "a", "max_tokens": true}', "max_tokens=True is not allowed"),
        (b'{"prompt": "a", "temperature": NaN}', "a finite number"),
        (b'{"prompt": "a", "deadline_s": 0}', "deadline_s=0 is not allowed"),
        (b'{"prompt": "a", "stop": [""]}', "at least 1 character"),
        (b'{"prompt": 5}', "text or a list of token ids"),
        (b'{"prompt": [-1]}', "text or a list of token ids"),
        (b'{"messages": []}', "at least 1 item"),
        (b'{"messages": [{"role": "user"}]}', "messages[0].content"),
    ],
)
def test_wrong_line_says_what_is_wrong(line: bytes, message: str):
    """
    A line that is no JSON, has unknown keys or wrong types becomes an error.
    """
    refused = parse_line(4, line, defaults={})

    assert isinstance(refused, Outcome)
    assert refused.index == 4
    assert type(refused.error).__name__ == "InvalidRequest"
    assert message in str(refused.error)


def test_long_values_are_shortened_in_messages():
    """
    A message stays readable when the wrong value is long.
    """
    refused = parse_line(0, b'{"messages": "' + b"x" * 10_000 + b'"}', defaults={})

    assert isinstance(refused, Outcome)
    assert len(str(refused.error)) < 300


def test_file_gives_a_request_a_line(tmp_path: Path):
    """
    Empty lines and a byte order mark do not count; a bad line keeps its index.
    """
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\n  \nbad\n{"prompt": "b"}')

    first, bad, last = from_file(str(path), defaults={}, options={"deadline_s": 2.0})

    assert first == InputRequest(0, "a", SamplingParams(), {"deadline_s": 2.0})
    assert isinstance(bad, Outcome)
    assert last == InputRequest(2, "b", SamplingParams(), {"deadline_s": 2.0})


def test_dash_is_stdin(monkeypatch: pytest.MonkeyPatch):
    """
    The file name - means standard input.
    """
    data = io.BytesIO(b'{"prompt": "a"}\n')
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(data))

    requests = from_file("-", defaults={}, options={})

    assert requests == [InputRequest(0, "a", SamplingParams())]


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
