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

The index is a SQLite database with a row for each file. Its rules:
1. Each use opens the database anew and checks it, so damage is noticed in time, and no
   connection is shared between threads, or kept over a fork.
2. A process that changes something holds the write lock, from before the first file is touched until
   the rows are committed. A process that is killed lets go of it, and its rows are undone.
3. The journal is a file for undoing, because a WAL needs memory that processes share, and
   cannot be read where nothing can be written.
4. All columns are integers or bytes, because text that was damaged cannot be read.
5. Others may write to the directory, so no call takes long for what stands in it: the file has
   the one table that this one makes, no view and no trigger, and at most MAX_ROWS rows, and SQLite
   gives up after MAX_STEPS of its steps.
"""

from __future__ import annotations

import json
import sqlite3
import uuid
from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import count, islice
from pathlib import Path

from pyllama_raw.core.memory.tiers import StoredState
from pyllama_raw.core.request import Adapted
from pyllama_raw.engine.shared_models import LAYOUT
from pyllama_raw.engine.state_files import (
    ENTRY_BYTES,
    INDEX_BYTES,
    BadFile,
    Pause,
    SpanKeys,
    State,
    StoredFile,
    digest_of,
    from_file,
    make_key,
    namespace_of,
    no_pause,
    opened,
    read_state,
    write_file,
)
from pyllama_raw.errors import ConfigError

WAIT_S = 10.0  # a write takes less, unless its state has more than a GB
MAX_NAMESPACE_BYTES = 2048
MAX_ROWS = 2**16
MAX_FILE_BYTES = MAX_ROWS * ENTRY_BYTES
MAX_STEPS = 2**26  # a second or two
STEPS = 2**16  # between two looks at their number

# Rows come in the order of use. `PRAGMA quick_check` verifies the CHECKs, too.
_TABLE = f"""
CREATE TABLE states (
    used INTEGER PRIMARY KEY,
    name BLOB NOT NULL CHECK (typeof(name) = 'blob'),
    fingerprint BLOB NOT NULL CHECK (typeof(fingerprint) = 'blob'),
    namespace BLOB NOT NULL
        CHECK (typeof(namespace) = 'blob' AND length(namespace) <= {MAX_NAMESPACE_BYTES}),
    state_at INTEGER NOT NULL CHECK (typeof(state_at) = 'integer' AND state_at > 0),
    n_bytes INTEGER NOT NULL CHECK (typeof(n_bytes) = 'integer' AND n_bytes >= state_at),
    digest BLOB NOT NULL CHECK (typeof(digest) = 'blob')
)
"""
SIZES = "SELECT used, name, n_bytes FROM states ORDER BY used"
FIND = (
    "SELECT name, namespace, state_at, n_bytes, digest FROM states"
    " WHERE fingerprint = ? ORDER BY used"
)
TABLES = "SELECT sql FROM sqlite_master LIMIT 2"
MANY = f"SELECT 1 FROM states LIMIT 1 OFFSET {MAX_ROWS}"  # noqa: S608
ADD = "INSERT INTO states VALUES (NULL, ?, ?, ?, ?, ?, ?)"
USE = "UPDATE states SET used = (SELECT max(used) + 1 FROM states) WHERE used = ?"
REMOVE = "DELETE FROM states WHERE used = ?"

Row = tuple[bytes, bytes, int, int, bytes]  # a row as FIND gives it


class StateIndex:
    """
    The database in *directory*; both are made if they are not there.

    Raises:
        ConfigError: that cannot be, or something else is there.
        sqlite3.Error: by each method; the database is damaged, or cannot be used now.
    """

    def __init__(self, directory: Path, wait_s: float = WAIT_S) -> None:
        self._wait_s = self._max_wait_s = wait_s
        try:
            self.root = directory.expanduser().absolute()
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            is_older = (self.root / ".plrlock").exists()
        # RuntimeError: of `~` without a home; ValueError: NUL, or a character without bytes.
        except (OSError, RuntimeError, ValueError) as error:
            problem = f"it is no directory and cannot be made one: {error}"
            advice = "give a directory that you may write to"
            raise _refusal(directory, problem, advice) from error
        # Files of other versions are not counted, so limits would not hold.
        if is_older:
            raise _refusal(directory, "an earlier version has written it", "delete it")
        path = self._path = self.root / "plrstates.sqlite"
        try:
            with self._opened("rwc", wait_s):
                pass
        except (OSError, sqlite3.OperationalError) as error:
            problem, advice = f"{path}: {error}", "see that you may write to it"
            raise _refusal(directory, problem, advice) from error
        except sqlite3.Error as error:
            problem, advice = f"{path} is no index of ours: {error}", "delete that file"
            raise _refusal(directory, problem, advice) from error

    def rows(self, fingerprint: str) -> list[Row]:
        """Rows that FIND finds, from the file used longest ago to the latest."""
        with self._opened("rw", self._max_wait_s) as database:
            return database.execute(FIND, (fingerprint.encode(),)).fetchall()

    @contextmanager
    def held(self, *, waits: bool = True) -> Iterator[sqlite3.Connection]:
        """
        Hold the lock; changes are kept if nothing is raised, and undone otherwise.

        A process that is stopped does not let go. After a wait in vain there is therefore
        no other one until the lock was had again: all that close() still has to write waits
        once.
        """
        wait_s = self._wait_s if waits else 0.0
        self._wait_s = 0.0 if waits else self._wait_s
        with self._opened("rw", wait_s) as database, database:
            database.execute("BEGIN IMMEDIATE")
            self._wait_s = self._max_wait_s
            yield database

    @contextmanager
    def _opened(self, mode: str, wait_s: float) -> Iterator[sqlite3.Connection]:
        # Whoever may write here must not make us write elsewhere.
        if self._path.is_symlink():
            raise sqlite3.DatabaseError("a link leads elsewhere")
        if self._path.is_file() and self._path.stat().st_size > MAX_FILE_BYTES:
            raise sqlite3.DatabaseError(f"it has more than {MAX_FILE_BYTES} bytes")
        # Each use is a connection of its own, with a limit of work.
        uri = f"{self._path.as_uri()}?mode={mode}"
        database = sqlite3.connect(uri, timeout=wait_s, isolation_level=None, uri=True)
        n_looks = count()
        database.set_progress_handler(
            lambda: next(n_looks) * STEPS > MAX_STEPS, n=STEPS
        )
        try:
            with closing(database):
                # A new file gets its table; another process may do that at the same time.
                if mode == "rwc" and not _fact(database, "page_count"):
                    self._path.chmod(0o600)
                    _make_table(database)
                _check(database)
                yield database
        except UnicodeDecodeError as error:  # of a message with names that are damaged
            raise sqlite3.DatabaseError("its names are damaged") from error
        except sqlite3.OperationalError as error:
            if "interrupted" not in str(error):
                raise
            raise sqlite3.DatabaseError("what is in it takes too long") from error


def _refusal(directory: Path, problem: str, advice: str) -> ConfigError:
    return ConfigError(
        f"CacheConfig.directory={str(directory)!r} cannot be used: {problem}: {advice}, or "
        "give another directory"
    )


def _make_table(database: sqlite3.Connection) -> None:
    """Two processes may come here at once."""
    database.execute("PRAGMA auto_vacuum = FULL")  # it is as small as its rows
    with database:
        database.execute("BEGIN IMMEDIATE")
        if not database.execute(TABLES).fetchall():
            database.execute(_TABLE)
        database.execute(f"PRAGMA application_id = {LAYOUT}")


def _check(database: sqlite3.Connection) -> None:
    if _fact(database, "application_id") != LAYOUT:
        raise sqlite3.DatabaseError("another version or program has written it")
    # A view may have rows without an end, and a trigger may do anything.
    tables = database.execute(TABLES).fetchall()
    if [sql.split() for (sql,) in tables if isinstance(sql, str)] != [_TABLE.split()]:
        raise sqlite3.DatabaseError("it has other tables, views or triggers")
    if database.execute(MANY).fetchone() is not None:
        raise sqlite3.DatabaseError(f"it has more than {MAX_ROWS} rows")
    if (problem := _fact(database, "quick_check(1)")) != "ok":
        raise sqlite3.DatabaseError(str(problem))


def _fact(database: sqlite3.Connection, name: str) -> object:
    (value,) = database.execute(f"PRAGMA {name}").fetchone()
    return value


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
        wait_s: float = WAIT_S,
    ) -> None:
        self.max_bytes = max(max_bytes - INDEX_BYTES, 0)
        self._index = StateIndex(directory, wait_s)
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
        if len(label) > MAX_NAMESPACE_BYTES:
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
                index.execute(ADD, row)
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
            self._later.append((USE, bytes.fromhex(file.path.stem)))
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
        self._later.append((REMOVE, name))

    def _look_at(self, row: Row, keys: SpanKeys) -> StoredState | None:
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
        rows = index.execute(SIZES).fetchall()
        owned = {self._path_of(name) for _, name, _ in rows}
        if not self._delete_unowned(owned) or n_bytes > self.max_bytes:
            return False
        n_used = sum(size for _, _, size in rows) + len(rows) * ENTRY_BYTES
        n_rows = len(rows)
        # Then those that were not used for longest, until there is room.
        for used, name, size in rows:
            if n_used + n_bytes <= self.max_bytes and n_rows < MAX_ROWS:
                break
            if _delete(self._path_of(name)):
                index.execute(REMOVE, (used,))
                n_used -= size + ENTRY_BYTES
                n_rows -= 1
        return n_used + n_bytes <= self.max_bytes and n_rows < MAX_ROWS

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
        numbers = {name: used for used, name, _ in index.execute(SIZES)}
        last = max(numbers.values(), default=0)
        while self._later:
            change, name = self._later.popleft()
            # Another process has deleted it meanwhile.
            if (used := numbers.get(name)) is None:
                continue
            index.execute(change, (used,))
            if change == USE:
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
