"""What goes to the process of a template, and back."""

import io

import pytest

from pyllama_raw.prompts.rendering.worker import read_frame, write_frame

VALUES = [
    [{}, {"role": "user", "content": "é\n\u2028 \U0001f600 \ud800"}],
    {"a": [1, -2.5, 1e300, True, None, [], [[{"é": ["x"] * 100}]]], "": {}},
    "text",
]


@pytest.mark.parametrize("value", VALUES)
def test_what_is_written_is_read(value):
    """
    Lists and mappings in each other, numbers, and text of any characters.
    """
    pipe = io.BytesIO()

    write_frame(pipe, value)
    pipe.seek(0)

    assert read_frame(pipe) == value
