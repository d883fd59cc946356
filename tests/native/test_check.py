"""Codes become the exceptions that say what can be done. Runs without libllama."""

import pytest

from pyllama_raw.errors import DecodeAborted, DecodeFailed, InvalidBatch, NoKVSpace
from pyllama_raw.native.libllama import EXCEPTION, check_decode, decode_error


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (1, NoKVSpace),
        (2, DecodeAborted),
        (-1, InvalidBatch),
        (-2, DecodeFailed),
        (-3, DecodeFailed),
        (EXCEPTION, DecodeFailed),
        (-77, DecodeFailed),
        (3, DecodeFailed),
    ],
)
def test_every_code_has_its_exception(code, kind):
    """
    Known codes map to their class; an unknown one is the worst: the context is lost.
    """
    with pytest.raises(kind) as caught:
        check_decode(code, "said libllama")

    assert type(caught.value) is kind
    assert (caught.value.function, caught.value.returned) == ("llama_decode", code)
    assert "said libllama" in str(caught.value)


def test_zero_is_success():
    """
    Code 0 raises nothing.
    """
    assert check_decode(0) is None


def test_a_code_explains_itself():
    """
    Without a message of libllama the code still says what happened.
    """
    assert str(decode_error(1)) == (
        "llama_decode returned 1: no room in the KV memory; nothing has changed"
    )
