"""
Memory that Python and C share: the one way from arrays to pointers, checked first.

Arrays are of the standard library, or anything else with a buffer, such as numpy's.
numpy itself takes longer to import than a small model to load, so only what returns its
arrays imports it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from pyllama_raw.native.libllama import ffi

if TYPE_CHECKING:
    from numpy.typing import NDArray

Array: TypeAlias = "array[Any] | NDArray[Any]"
Buffer: TypeAlias = "Array | bytes | memoryview"

# As the modules array and struct name them.
INT32, INT64, UINT8, UINT32, FLOAT32 = "i", "q", "B", "I", "f"

_C_NAMES = {
    INT32: "int32_t[]",
    INT64: "int64_t[]",
    UINT8: "uint8_t[]",
    UINT32: "uint32_t[]",
    FLOAT32: "float[]",
}


def pointer(
    values: Buffer, code: str, *, min_size: int = 0, writable: bool = False
) -> Any:
    """
    Address of the first element of *values*, which stay alive and in place meanwhile.

    Args:
        code: the type of an element: INT32, INT64, UINT8, UINT32 or FLOAT32.

    Raises:
        TypeError: another type, not one-dimensional, not C-contiguous, too short, or
            read-only where C writes; or a memoryview, because its address outlives it
            where the garbage collector clears both, which ends the process: see lent().
    """
    if isinstance(values, memoryview):
        raise TypeError("a memoryview is lent() to C only as long as a block runs")
    _check(values, code, min_size)
    return ffi.from_buffer(_C_NAMES[code], values, require_writable=writable)


@contextmanager
def lent(values: Buffer, code: str, *, writable: bool = False) -> Iterator[Any]:
    """The address of *values* within the block, as pointer() gives it."""
    _check(values, code)
    name = _C_NAMES[code]
    with ffi.from_buffer(name, values, require_writable=writable) as address:
        yield address


def _check(values: Buffer, code: str, min_size: int = 0) -> None:
    """Raise TypeError unless *values* are as pointer() needs them."""
    # numpy's stubs tell of its buffers from Python 3.12 on.
    with memoryview(values) as view:  # type: ignore[arg-type]
        if view.format != code or view.ndim != 1 or not view.c_contiguous:
            raise TypeError(
                f"need a contiguous one-dimensional array of {_C_NAMES[code]}, "
                f"got {view.format!r} of shape {view.shape}"
            )
        if len(view) < min_size:
            raise TypeError(
                f"the array has {len(view)} elements, {min_size} are needed"
            )


def zeros(code: str, count: int) -> array[Any]:
    """An array of *count* zeros."""
    return array(code, [0]) * count


def new_bytes(count: int) -> memoryview:
    """Writable memory of *count* bytes that are not set yet; MemoryError if there is none."""
    allocate = ffi.new_allocator(should_clear_after_alloc=False)
    return memoryview(ffi.buffer(allocate("uint8_t[]", count)))
