"""
Pointers between Python and C: objects of C that Python owns, and arrays of Python that C reads.

Rules:
1. An object is freed once, and never before what was made from it. A parent that is closed while
   children are open is unusable at once, but freed only when the last child is. Hence any order of
   close() and of garbage collection is safe.
2. Arrays are of the standard library, or anything else with a buffer, such as numpy's. They are
   checked before C gets their address. numpy itself takes longer to import than a small model to
   load, so only what returns its arrays imports it.
"""

from __future__ import annotations

import threading
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from pyllama_raw.errors import ClosedError
from pyllama_raw.native.libllama import ffi

if TYPE_CHECKING:
    from numpy.typing import NDArray


# Re-entrant: a finaliser can run wherever Python allocates, also inside the lock.
_lock = threading.RLock()


class _Resource:
    """The pointer, its free function and its open children; knows no Handle."""

    __slots__ = ("closed", "free", "n_children", "parents", "pointer")

    def __init__(
        self,
        pointer: Any,
        free: Callable[[Any], object],
        parents: list[_Resource],
    ) -> None:
        self.pointer = pointer
        self.free: Callable[[Any], object] | None = free
        self.parents = parents
        self.n_children = 0
        self.closed = False

    def close(self) -> None:
        """Free now, or when the last child is freed."""
        with _lock:
            self.closed = True
            # Children still read it; the last of them calls this again.
            if self.n_children or self.free is None:
                return
            free, self.free = self.free, None
        # Without the lock: freeing may take long, and C may call back.
        free(self.pointer)
        self.pointer = None
        # Parents that were closed before can be freed now.
        parents, self.parents = self.parents, []
        for parent in parents:
            with _lock:
                parent.n_children -= 1
            if parent.closed:
                parent.close()


class Handle:
    """
    One C object. Close it, leave its `with` block, or let it be collected.

    Args:
        pointer: to the object.
        free: called once with it.
        parents: freed after this one, in whatever order they are closed.

    Raises:
        MemoryError: *pointer* is NULL.
    """

    def __init__(
        self,
        pointer: Any,
        free: Callable[[Any], object],
        *,
        parents: Sequence[Handle] = (),
    ) -> None:
        if not pointer:
            raise MemoryError(f"no memory for {type(self).__name__}")
        # A closed parent is refused before anything is counted.
        with _lock:
            owners = [parent._open_resource() for parent in parents]
            self._resource = _Resource(pointer, free, owners)
            for owner in owners:
                owner.n_children += 1
        # The resource knows no Handle, so the garbage collector can free this one.
        self._finalizer = weakref.finalize(self, self._resource.close)

    def _open_resource(self) -> _Resource:
        if self._resource.closed:
            raise ClosedError(f"{type(self).__name__} is closed")
        return self._resource

    def keep(self, parent: Handle) -> None:
        """Have *parent* freed after this one, as if it had been given at first."""
        with _lock:
            owner = parent._open_resource()
            self._open_resource().parents.append(owner)
            owner.n_children += 1

    @property
    def ptr(self) -> Any:
        """The C pointer. Raises ClosedError after close()."""
        resource = self._resource
        if resource.closed:
            raise ClosedError(f"{type(self).__name__} is closed")
        return resource.pointer

    @property
    def closed(self) -> bool:
        return self._resource.closed

    def close(self) -> None:
        """Free the object, at the latest when its last child is closed. Idempotent."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
