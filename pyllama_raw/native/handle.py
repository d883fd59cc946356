"""
Ownership of C pointers: freed once, and never before what was made from them.

A parent that is closed while children are open is unusable at once, but freed only when
the last child is. Hence any order of close() and of garbage collection is safe.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self

from pyllama_raw.errors import ClosedError

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
            if self.n_children or self.free is None:
                return
            free, self.free = self.free, None
        free(self.pointer)
        self.pointer = None
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
        with _lock:
            owners = [parent._open_resource() for parent in parents]
            self._resource = _Resource(pointer, free, owners)
            for owner in owners:
                owner.n_children += 1
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
