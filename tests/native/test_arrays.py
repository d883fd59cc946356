"""Memory that C is given outlives the call, or is lent for a block."""

from array import array

import pytest

from pyllama_raw.native.libllama import FLOAT32, UINT8, lent, pointer

pytestmark = pytest.mark.native


def test_a_memoryview_is_lent_only():
    """
    C is given arrays and bytes; a memoryview within a block, and free behind it, because
    the garbage collector must not find it in use.
    """
    values = array("B", b"abc")
    view = memoryview(values)

    with pytest.raises(TypeError, match="lent"):
        pointer(view, UINT8)
    with lent(view, UINT8, writable=True) as address:
        address[0] = ord("x")
    view.release()  # BufferError if somebody holds it

    assert (values.tobytes(), pointer(b"abc", UINT8)[1]) == (b"xbc", ord("b"))
    with pytest.raises(TypeError, match="need a contiguous"):
        pointer(values, FLOAT32)
