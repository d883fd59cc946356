"""Messages are copied if JSON can say them, and refused by name if not."""

import pytest

from pyllama_raw.errors import InvalidRequest
from pyllama_raw.prompts.messages import plain_messages, plain_value


def message(**fields):
    return {"role": "user", "content": "a"} | fields


def nested(n_levels: int) -> list:
    value: list = []
    for _ in range(n_levels):
        value = [value]
    return value


def shared(n_levels: int) -> list:
    """A small list that is huge when written out."""
    value: list = []
    for _ in range(n_levels):
        value = [value, value]
    return value


def endless() -> list:
    value: list = []
    value.append(value)
    return value


def test_what_json_can_say_is_copied():
    """
    Content may be text, parts or nothing; tool calls and other fields are kept.
    """
    messages = (
        message(content=[{"type": "text", "text": "a"}, "b"]),
        message(role="assistant", content=None, tool_calls=({"n": 1.5, "ok": True},)),
    )

    plain = plain_messages(messages)

    assert plain == [
        {"role": "user", "content": [{"type": "text", "text": "a"}, "b"]},
        {"role": "assistant", "content": None, "tool_calls": [{"n": 1.5, "ok": True}]},
    ]
    assert plain[0]["content"] is not messages[0]["content"]


REFUSED = {
    "bytes": b"a",
    "a set": {1, 2},
    "an object": object(),
    "a complex number": 1j,
    "a function": len,
    "an iterator": iter([]),
    "a key that is a number": {1: "a"},
    "a key of bytes": {b"a": 1},
    "a large number": 2**5000,
    "deep": nested(101),
    "very deep": nested(5000),
    "shared": shared(60),
    "endless": endless(),
    "long": ["a" * 2**23] * 3,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_json_cannot_say_is_refused(name):
    """
    Other types, keys that are no text, and too much of anything.
    """
    with pytest.raises(InvalidRequest):
        plain_messages([message(extra=REFUSED[name])])


@pytest.mark.parametrize("fields", [{}, {"contents": "Hi"}, {"text": "Hi"}])
def test_what_a_user_says_has_its_name(fields):
    """
    A misspelt one would be an empty message, and the model would answer to nothing.
    """
    with pytest.raises(InvalidRequest, match='a message with a "content"'):
        plain_messages([message(), {"role": "user"} | fields])


def test_a_function_is_no_description_of_a_tool():
    """
    The error says what makes one of it.
    """
    with pytest.raises(InvalidRequest, match=r"tools=.*schema_of\(\)"):
        plain_value("tools", [print])


@pytest.mark.parametrize("content", [3, b"a", {"text": "a"}, object()])
def test_content_is_text_or_parts(content):
    """
    A mapping is no list of parts.
    """
    with pytest.raises(InvalidRequest, match="a list of parts"):
        plain_messages([message(content=content)])


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "image"}, "images"),
        ({"type": "image_url", "image_url": {"url": "x"}}, "images"),
        ({"type": "input_image", "image": "x"}, "images"),
        ({"image": "x"}, "images"),
        ({"type": "input_audio", "input_audio": {}}, "audio"),
        ({"type": "video_url"}, "videos"),
    ],
)
def test_media_are_refused_by_name(part, kind):
    """
    A template would drop an image without a word.
    """
    with pytest.raises(InvalidRequest, match=f"this model takes no {kind}"):
        plain_messages([message(content=[{"type": "text", "text": "a"}, part])])
