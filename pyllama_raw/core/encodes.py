"""
Turns of images and sounds to be encoded, and the rows that are kept of them.

Rules:
1. Requests take turns, an encode each. Equal keys are encoded once, for all that want them.
2. The rows of a request stay until it ends. After that the least recently used ones go as
   soon as all rows are more than `max_kept_bytes`.
3. What open requests hold together is at most `max_bytes`: their uploads and their rows.
4. A request needs all its rows. When one of its encodes fails, it leaves.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence as Items
from typing import Generic, NamedTuple, TypeVar

from pyllama_raw.core.request import Namespace, is_of
from pyllama_raw.errors import InvalidRequest, QueueFull

U = TypeVar("U")  # a request, as its owner names it


class RowKey(NamedTuple):
    """A key that is equal where rows are equal and may be shared."""

    digest: bytes
    namespace: Namespace = None


class RowNeed(NamedTuple):
    """Rows that a request needs."""

    key: RowKey
    n_bytes: int  # of the rows, and of the upload if they are its first ones


class Encodes(Generic[U]):
    """
    The encodes of all open requests, and the rows that there are.

    Args:
        max_bytes: of open requests.
        max_kept_bytes: of rows, beyond which only those of open requests are kept.
    """

    def __init__(self, max_bytes: int, max_kept_bytes: int) -> None:
        self.max_bytes, self.max_kept_bytes = max_bytes, max_kept_bytes
        self.n_bytes = 0  # that open requests hold
        self.n_kept_bytes = 0  # of all rows
        self.n_encoded = self.n_shared = 0  # encodes since the start, and those spared
        self.running: RowKey | None = None
        self._open: OrderedDict[U, tuple[RowNeed, ...]] = OrderedDict()  # by turn
        self._n_users: Counter[RowKey] = Counter()  # open requests, by key
        self._rows: OrderedDict[RowKey, array[float]] = OrderedDict()  # by last use
        self._cleared = set[RowKey]()  # go with the last open request that has them

    def add(self, user: U, needs: Items[RowNeed]) -> None:
        """
        Take on the encodes of a request.

        Raises:
            QueueFull: open requests hold too much at present.
            InvalidRequest: these are more than an idle engine takes.
        """
        # Equal images of one request count once.
        n_own = sum({need.key: need.n_bytes for need in needs}.values())
        if n_own > self.max_bytes:
            value = f"images and sounds of {n_own} bytes, with their rows"
            raise InvalidRequest("prompt", value, f"at most {self.max_bytes} bytes")
        # What another open request holds already takes no more.
        n_bytes = self.n_bytes + self._n_bytes_of(needs)
        if n_bytes > self.max_bytes:
            raise QueueFull("max_open_bytes", n_bytes, self.max_bytes)
        self.n_bytes = n_bytes
        keys = {need.key for need in needs}
        self.n_shared += sum(key in self._rows or key in self._n_users for key in keys)
        self._open[user] = tuple(needs)
        self._n_users.update(keys)
        # Rows that are needed again are the last to be evicted.
        for key in keys & self._rows.keys():
            self._rows.move_to_end(key)

    def begin(self) -> tuple[U, int] | None:
        """The request whose turn it is, and which of its encodes; None: nothing waits."""
        assert self.running is None
        for user, needs in self._open.items():
            for index, need in enumerate(needs):
                # The first one that is missing; then the turn is that of the next request.
                if need.key not in self._rows:
                    self.running = need.key
                    self._open.move_to_end(user)
                    return user, index
        return None

    def done(self, rows: array[float]) -> list[U]:
        """The encode that runs gave *rows*; returns requests that now have all of theirs."""
        key, self.running = self.running, None
        assert key is not None
        self.n_encoded += 1
        # Else the last request that needs it has just left.
        if key in self._n_users:
            self._rows[key] = rows
            self.n_kept_bytes += len(rows) * rows.itemsize
        ready = [user for user in self.users(key) if self.is_done(user)]
        self._evict()
        return ready

    def fail(self) -> list[U]:
        """The encode that runs failed; returns the requests that leave because of it."""
        key, self.running = self.running, None
        assert key is not None
        failed = self.users(key)
        for user in failed:
            self.leave(user)
        return failed

    def drop(self) -> None:
        """The encode that runs was cancelled."""
        self.running = None

    def leave(self, user: U) -> bool:
        """A request has ended; True: nobody wants the encode that runs any more."""
        needs = self._open.pop(user, ())
        for key in {need.key for need in needs}:
            # Rows that were to be cleared waited for their last request.
            self._n_users[key] -= 1
            if not self._n_users[key]:
                del self._n_users[key]
                if key in self._cleared:
                    self._cleared.remove(key)
                    self._drop(key)
        self.n_bytes -= self._n_bytes_of(needs)
        self._evict()
        return self.running is not None and self.running not in self._n_users

    def rows(self, key: RowKey) -> array[float]:
        """Rows of an open request, which are there."""
        return self._rows[key]

    def clear(self, salt: str | None) -> int:
        """
        Drop the rows of *salt*, None: all; returns the bytes freed at once.

        Those of an open request go when it ends.
        """
        n_before = self.n_kept_bytes
        self._cleared |= {key for key in self._n_users if is_of(key.namespace, salt)}
        for key in self._rows.keys() - self._n_users.keys():
            if is_of(key.namespace, salt):
                self._drop(key)
        return n_before - self.n_kept_bytes

    def _n_bytes_of(self, needs: Items[RowNeed]) -> int:
        """Bytes of those that no other request holds."""
        own = {need.key: need.n_bytes for need in needs}
        return sum(n for key, n in own.items() if key not in self._n_users)

    def is_done(self, user: U) -> bool:
        """Whether a request is open and all its rows are there."""
        needs = self._open.get(user)
        return needs is not None and all(need.key in self._rows for need in needs)

    def users(self, key: RowKey) -> list[U]:
        """Open requests that want it."""
        return [
            user
            for user, needs in self._open.items()
            if any(need.key == key for need in needs)
        ]

    def _evict(self) -> None:
        """Drop rows that no open request has, the least recently used first."""
        if self.n_kept_bytes <= self.max_kept_bytes:
            return
        for key in [key for key in self._rows if key not in self._n_users]:
            self._drop(key)
            if self.n_kept_bytes <= self.max_kept_bytes:
                return

    def _drop(self, key: RowKey) -> None:
        rows = self._rows.pop(key, None)
        if rows is not None:
            self.n_kept_bytes -= len(rows) * rows.itemsize

    def check_integrity(self) -> None:
        """The bytes add up, and no limit is passed."""
        assert self._cleared <= self._n_users.keys()
        users = Counter(
            key for needs in self._open.values() for key in {need.key for need in needs}
        )
        assert users == self._n_users
        sizes = {
            need.key: need.n_bytes for all_ in self._open.values() for need in all_
        }
        assert self.n_bytes == sum(sizes.values()) <= self.max_bytes
        row_sizes = {key: len(rows) * rows.itemsize for key, rows in self._rows.items()}
        assert self.n_kept_bytes == sum(row_sizes.values())
        n_free = sum(n for key, n in row_sizes.items() if key not in users)
        assert not n_free or self.n_kept_bytes <= self.max_kept_bytes
