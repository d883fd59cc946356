"""
States of slots in a directory: found when they are complete, verified before use.

Rules:
1. A file is written, synced, and then gets its row in the index. Names are unique and contents
   never change, so readers need no lock: a file that is gone, cut off or changed is a miss.
2. A writer holds the lock of the index. So the files of all processes and models, the one
   being written included, are never more than max_bytes, and a file without a row that the
   holder finds is nobody's: its writer was killed.
3. What was not used for longest is deleted first; a read counts as a use.
4. No call waits or works without an end, and none but the first raises for what is in the
   directory, whoever has put it there.

    DIR/plrstates.sqlite
    DIR/<unique>.plrstate
"""

from __future__ import annotations

import json
import sqlite3
import uuid
from array import array
from collections import deque
from contextlib import suppress
from itertools import islice
from pathlib import Path

from pyllama_raw.core.memory.tiers import StoredState
from pyllama_raw.core.namespace import Adapted
from pyllama_raw.engine import state_index as sql
from pyllama_raw.engine.span_keys import SpanKeys, from_file
from pyllama_raw.engine.state_file import (
    ENTRY_BYTES,
    INDEX_BYTES,
    BadFile,
    Pause,
    State,
    StoredFile,
    digest_of,
    make_key,
    namespace_of,
    no_pause,
    opened,
    read_state,
    write_file,
)

MAX_LATER = 2**14
MAX_DELETED = 2**12  # files that are nobody's, in one call
NAMES = "[0-9a-f]" * 32 + ".plrstate"


class DiskStore:
    """
    Files of one fingerprint, in a directory that others may use, too.

    Thread:
        One at a time, but for read() and delete(), which do not wait for the lock.

    Raises:
        ConfigError: the directory cannot be used.
    """

    def __init__(
        self,
        directory: Path,
        fingerprint: str,
        max_bytes: int,
        wait_s: float = sql.WAIT_S,
    ) -> None:
        self.max_bytes = max(max_bytes - INDEX_BYTES, 0)
        self._index = sql.StateIndex(directory, wait_s)
        self._root = self._index.root
        self._fingerprint = fingerprint
        # Changes that wait for the lock; one that is forgotten costs room until it is evicted.
        self._later = deque[tuple[str, bytes]](maxlen=MAX_LATER)
        # Another process may hold the lock: nobody waits for it here.
        with suppress(sqlite3.Error), self._index.held(waits=False) as index:
            self._make_room(index, 0)  # else a writer makes room

    def scan(self, keys: SpanKeys) -> list[StoredState]:
        """
        Files of this fingerprint, the latest used last; bad ones go.

        Args:
            keys: give the numbers that stand for rows of spans.
        """
        try:
            # No lock is needed to look: a row is there only if its file is whole.
            rows = self._index.rows(self._fingerprint)
        except sqlite3.Error:
            return []
        looked_at = [self._look_at(row, keys) for row in rows]
        return [state for state in looked_at if state is not None]

    def write(
        self,
        namespace: str | Adapted | None,
        tokens: bytes,
        state: State,
        pause: Pause = no_pause,
    ) -> StoredFile | None:
        """
        Store *state*; None if it is larger than the limit, or the disk says no.

        Args:
            pause: see slices().
        """
        label = json.dumps(namespace).encode()
        # Others have to read the row, so it is small.
        if len(label) > sql.MAX_NAMESPACE_BYTES:
            return None
        name, n_bytes = uuid.uuid4().bytes, len(tokens) + state.nbytes
        key = make_key(self._fingerprint, namespace, tokens)
        # The digest comes first, because it takes long and needs no lock.
        digest = digest_of(key, state, pause)
        path = self._path_of(name)
        row = (name, self._fingerprint.encode(), label, len(tokens), n_bytes, digest)
        try:
            with self._index.held() as index:
                # What is displaced goes before the file is there, so the limit is never
                # exceeded.
                if not self._make_room(index, n_bytes + ENTRY_BYTES):
                    return None
                write_file(path, tokens, state, pause)
                index.execute(sql.ADD, row)
        except (OSError, sqlite3.Error):
            _delete(path)
            return None
        return StoredFile(path, len(tokens), n_bytes, key, digest)

    def read(self, file: StoredFile, pause: Pause = no_pause) -> State | None:
        """
        The state in *file*; None, and the file is deleted, if it is not as written.

        Args:
            pause: see slices().
        """
        try:
            state = read_state(file, pause)
        # Damaged or forged: nobody can use it.
        except BadFile:
            self.delete(file)
        except OSError:
            pass  # gone, or not to be read now
        else:
            self._later.append((sql.USE, bytes.fromhex(file.path.stem)))
            return state
        return None

    def delete(self, file: StoredFile) -> None:
        """Remove *file*, if it is still there."""
        self._forget(bytes.fromhex(file.path.stem))

    def close(self) -> None:
        """Note what was read and deleted."""
        if self._later:
            with suppress(sqlite3.Error), self._index.held() as index:
                self._note(index)

    def _path_of(self, name: bytes) -> Path:
        return self._root / f"{name.hex()}.plrstate"

    def _forget(self, name: bytes) -> None:
        _delete(self._path_of(name))
        self._later.append((sql.REMOVE, name))

    def _look_at(self, row: sql.Row, keys: SpanKeys) -> StoredState | None:
        """State that a later read() of the file of *row* can give; None: none."""
        name, label, state_at, n_bytes, digest = row
        path = self._path_of(name)
        try:
            with opened(path, n_bytes) as stream:
                data = stream.read(state_at)
            # Tokens and namespace may have been written by anybody.
            tokens, namespace = from_file(array("i", data), keys), namespace_of(label)
        except (BadFile, FileNotFoundError, ValueError, RecursionError):
            self._forget(name)
            return None
        except OSError:
            return None
        key = make_key(self._fingerprint, namespace, data)
        file = StoredFile(path, state_at, n_bytes, key, digest)
        return StoredState(namespace, tokens, file, file.counted_bytes - len(data))

    def _make_room(self, index: sqlite3.Connection, n_bytes: int) -> bool:
        """
        Delete what is nobody's, and states until *n_bytes* more are within the limit; False
        if there is no room all the same.
        """
        self._note(index)
        # A file without a row is nobody's: its writer was killed.
        rows = index.execute(sql.SIZES).fetchall()
        owned = {self._path_of(name) for _, name, _ in rows}
        if not self._delete_unowned(owned) or n_bytes > self.max_bytes:
            return False
        n_used = sum(size for _, _, size in rows) + len(rows) * ENTRY_BYTES
        n_rows = len(rows)
        # Then those that were not used for longest, until there is room.
        for used, name, size in rows:
            if n_used + n_bytes <= self.max_bytes and n_rows < sql.MAX_ROWS:
                break
            if _delete(self._path_of(name)):
                index.execute(sql.REMOVE, (used,))
                n_used -= size + ENTRY_BYTES
                n_rows -= 1
        return n_used + n_bytes <= self.max_bytes and n_rows < sql.MAX_ROWS

    def _delete_unowned(self, owned: set[Path]) -> bool:
        """Delete files of ours that are in no row; False if some are left."""
        paths = (path for path in self._root.glob(NAMES) if path not in owned)
        for path in islice(paths, MAX_DELETED):
            if not _delete(path):
                return False
        return next(paths, None) is None

    def _note(self, index: sqlite3.Connection) -> None:
        """Carry out changes that waited; a look at all rows gives all their numbers."""
        if not self._later:
            return
        numbers = {name: used for used, name, _ in index.execute(sql.SIZES)}
        last = max(numbers.values(), default=0)
        while self._later:
            change, name = self._later.popleft()
            # Another process has deleted it meanwhile.
            if (used := numbers.get(name)) is None:
                continue
            index.execute(change, (used,))
            if change == sql.USE:
                last += 1
                numbers[name] = last
            else:
                del numbers[name]


def _delete(path: Path) -> bool:
    """Delete the file at *path*; True if there is nothing any more."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return False
    return True
