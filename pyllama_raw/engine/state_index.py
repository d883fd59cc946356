"""
The index of a cache directory: a SQLite database with a row for each file.

Rules:
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

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path

from pyllama_raw.engine.state_file import ENTRY_BYTES, LAYOUT
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
        database = sqlite3.connect(uri, wait_s, isolation_level=None, uri=True)
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
