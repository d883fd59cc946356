"""
Values that a process makes once for all who want the same.

A fork finds none of them, because no thread of its own loads or encodes, and nobody there lets
go of a lock.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from threading import RLock
from typing import Generic, TypeVar

T = TypeVar("T")


class Shared(Generic[T]):
    """Values by their keys, and how many use each. Thread: any."""

    def __init__(self) -> None:
        self._users = Counter[T]()
        self._begin_anew()
        os.register_at_fork(after_in_child=self._begin_anew)

    def _begin_anew(self) -> None:
        self.lock = RLock()  # a finaliser can leave where it is held
        self._found: dict[object, T] = {}

    def __len__(self) -> int:
        return len(self._found)

    def enter(self, key: object, make: Callable[[], T]) -> T:
        """Use the value of *key*, which *make* makes while others wait, if there is none."""
        with self.lock:
            value = self._found[key] if key in self._found else make()
            self._found[key] = value
            self._users[value] += 1
            return value

    def share(self, value: T) -> None:
        """Another one uses *value*."""
        with self.lock:
            self._users[value] += 1

    def leave(self, value: T) -> bool:
        """One user leaves; True: the last one, who is to free *value*."""
        with self.lock:
            self._users[value] -= 1
            if self._users[value] > 0:
                return False
            del self._users[value]
            self.forget(value)
            return True

    def forget(self, value: T) -> None:
        """Whoever comes from now on makes another one."""
        with self.lock:
            self._found = {k: v for k, v in self._found.items() if v is not value}
