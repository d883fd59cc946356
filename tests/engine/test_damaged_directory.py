"""
A directory that is damaged, foreign, full or gone: a miss, or an error that says what to do.

PYLLAMA_RAW_DIRECTORIES is the number of indexes that are damaged.
"""

import os
import resource
import shutil
import sqlite3
import tempfile
from array import array
from contextlib import closing, suppress
from pathlib import Path
from random import Random
from threading import Thread

import numpy as np
import pytest

from pyllama_raw.engine import disk_store
from pyllama_raw.engine.disk_store import DiskStore
from pyllama_raw.engine.state_files import DiskWriter, SpanKeys
from pyllama_raw.errors import ConfigError
from tests.engine.hostile import ordinary_user, within_bound
from tests.engine.test_disk_store import MANY, found, n_used, put, state_of, tokens_of

N_DIRECTORIES = int(os.environ.get("PYLLAMA_RAW_DIRECTORIES", "100"))
INDEX = "plrstates.sqlite"


def make_foreign_database(index: Path) -> None:
    index.unlink()
    with closing(sqlite3.connect(index)) as database:
        database.execute("CREATE TABLE states (name TEXT)")


def make_later_version(index: Path) -> None:
    with closing(sqlite3.connect(index)) as database:
        database.execute(f"PRAGMA application_id = {0x504C5204}")


def make_link(index: Path) -> None:
    shutil.move(index, index.parent.parent / "target")
    index.symlink_to(index.parent.parent / "target")


def make_view(index: Path) -> None:
    """The rows of `states` never end."""
    with closing(sqlite3.connect(index)) as database:
        columns = [row[1] for row in database.execute("PRAGMA table_info(states)")]
        database.execute("DROP TABLE states")
        rows = ", ".join("n" for _ in columns)
        database.execute(
            f"CREATE VIEW states ({', '.join(columns)}) AS WITH RECURSIVE numbers(n) AS "  # noqa: S608
            f"(SELECT 1 UNION ALL SELECT n + 1 FROM numbers) SELECT {rows} FROM numbers"
        )


def make_trigger(index: Path) -> None:
    """Each new row adds all rows again."""
    with closing(sqlite3.connect(index)) as database:
        columns = "name, fingerprint, namespace, state_at, n_bytes, digest"
        database.execute(
            "CREATE TRIGGER more AFTER INSERT ON states BEGIN "  # noqa: S608
            f"INSERT INTO states ({columns}) SELECT {columns} FROM states; END"
        )


def make_rows(index: Path) -> None:
    """300,000 rows of files that are not there."""
    row = (b"model", b"null", 1, 2, b"")
    with closing(sqlite3.connect(index)) as database, database:
        database.executemany(
            "INSERT INTO states VALUES (NULL, ?, ?, ?, ?, ?, ?)",
            ((n.to_bytes(16, "big"), *row) for n in range(300_000)),
        )


HOSTILE = {
    "endless view": make_view,
    "trigger": make_trigger,
    "many rows": make_rows,
}
UNUSABLE = HOSTILE | {
    "no database": lambda index: index.write_bytes(b"not a database" * 1000),
    "cut off": lambda index: os.truncate(index, index.stat().st_size - 5000),
    "foreign": make_foreign_database,
    "later version": make_later_version,
    "link": make_link,
    "pipe": lambda index: (index.unlink(), os.mkfifo(index)),
    "directory": lambda index: (index.unlink(), index.mkdir()),
    "earlier version": lambda index: (index.parent / ".plrlock").touch(),
}


def test_a_damaged_index_is_refused_or_right(tmp_path):
    """
    Bytes changed anywhere: what is found is what was written, or nothing; or the caller is
    told. The same holds if it happens to a store that is open.
    """
    rng = Random(5)  # noqa: S311
    original = tmp_path / "original"
    store = DiskStore(original, "model", MANY)
    for seed in range(8):
        put(store, seed, namespace="ü" * 20)

    for number in range(N_DIRECTORIES):
        root = tmp_path / str(number)
        shutil.copytree(original, root)
        running = DiskStore(root, "model", MANY)
        content = bytearray((root / INDEX).read_bytes())
        for _ in range(rng.choice([1, 1, 1, 30])):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        (root / INDEX).write_bytes(content)
        running.write(None, tokens_of(9), state_of(9))
        check(running)
        with suppress(ConfigError):
            later = DiskStore(root, "model", MANY)
            check(later)
            later.write(None, tokens_of(9), state_of(9))
            later.close()
        shutil.rmtree(root)


def check(store: DiskStore) -> None:
    """What is read is what was written for these tokens."""
    for known in store.scan(SpanKeys()):
        state = store.read(known.payload)
        assert state is None or np.array_equal(state, state_of(known.tokens[0]))
        assert state is None or known.namespace in ("ü" * 20, None)


@pytest.mark.parametrize("kind", UNUSABLE)
def test_an_index_that_is_none_is_refused(tmp_path, kind):
    """
    The caller is told the directory and what to do; what is there stays as it is.
    """
    root = tmp_path / "root"
    put(DiskStore(root, "model", MANY), 1)
    UNUSABLE[kind](root / INDEX)
    before = sorted(path.name for path in root.iterdir())

    with pytest.raises(ConfigError, match=rf"directory='{root}' .*another directory"):
        within_bound(lambda: DiskStore(root, "model", MANY))

    assert sorted(path.name for path in root.iterdir()) == before


@pytest.mark.parametrize("kind", sorted({*UNUSABLE} - {"earlier version", "cut off"}))
def test_an_index_made_to_stall_stalls_nobody(tmp_path, kind):
    """
    A store that is open finds and writes nothing, and closes within its bound.
    """
    store = DiskStore(tmp_path / "root", "model", MANY)
    file = put(store, 1)
    state = store.read(file)
    UNUSABLE[kind](tmp_path / "root" / INDEX)

    assert state is not None
    assert within_bound(lambda: found(store)) == []
    assert within_bound(lambda: store.write(None, tokens_of(2), state_of(2))) is None
    within_bound(store.close)


def test_rows_and_files_without_a_row_are_bounded(tmp_path, monkeypatch):
    """
    The longest unused gives way to a row more; files that are nobody's go a part at a time.
    """
    monkeypatch.setattr(disk_store, "MAX_ROWS", 3)
    monkeypatch.setattr(disk_store, "MAX_DELETED", 2)
    store = DiskStore(tmp_path, "model", MANY)
    for seed in range(5):
        put(store, seed)
    rows = [array("i", tokens)[0] for tokens in found(store)]
    for number in range(5):
        (tmp_path / f"{number:032x}.plrstate").touch()
    writes = [store.write(None, tokens_of(9), state_of(9)) for _ in range(3)]

    assert rows == [2, 3, 4]
    assert [write is not None for write in writes] == [False, False, True]


@pytest.mark.parametrize("kind", ["pipe", "link", "device", "directory"])
def test_a_file_that_became_something_else_is_a_miss(tmp_path, kind):
    """
    It is not waited for, and no link is followed out of the directory.
    """
    store = DiskStore(tmp_path / "root", "model", MANY)
    file, target = put(store, 2), tmp_path / "target"
    shutil.copy(file.path, target)
    file.path.unlink()
    make = {
        "pipe": os.mkfifo,
        "link": lambda path: path.symlink_to(target),
        "device": lambda path: path.symlink_to("/dev/zero"),
        "directory": os.mkdir,
    }
    make[kind](file.path)

    assert within_bound(lambda: store.read(file)) is None
    assert within_bound(lambda: found(store)) == []
    within_bound(lambda: store.delete(file))
    assert target.exists()


@pytest.mark.parametrize(
    "name", ["notes.plrstate", f"{'0' * 32}.plrstate.bak", "x.state"]
)
def test_files_under_other_names_stay(tmp_path, name):
    """
    A user's own file with an end like ours is neither read nor deleted nor counted.
    """
    (tmp_path / name).write_bytes(bytes(10_000))

    store = DiskStore(tmp_path, "model", MANY)
    put(store, 1)
    DiskStore(tmp_path, "model", 1)

    assert found(store) == []
    assert (tmp_path / name).read_bytes() == bytes(10_000)


@pytest.mark.parametrize(
    "name",
    ["nul\0", "\ud800", "x" * 300, "file", "file/below", "loop", "/dev/null", "~\0/x"],
)
def test_a_directory_that_cannot_be_is_refused(tmp_path, monkeypatch, name):
    """
    The caller's mistake, told with the option and the path that was given.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")

    with pytest.raises(ConfigError, match=r"CacheConfig\.directory=.*give a directory"):
        DiskStore(Path(name), "model", MANY)


def test_a_user_without_a_home_is_refused():
    """
    So is `~somebody`, if the system does not know that name.
    """
    with pytest.raises(ConfigError, match=r"CacheConfig\.directory='~nobody-here"):
        DiskStore(Path("~nobody-here-of-that-name/x"), "model", MANY)


def test_a_holder_that_is_stopped_is_waited_for_once(tmp_path, monkeypatch):
    """
    The open does not wait for it, the first write does, further ones do not; once the lock
    is free they are written.
    """
    put(DiskStore(tmp_path, "model", MANY), 1)
    waits = []

    def connect(name, **options):
        waits.append(options["timeout"])
        return database(name, **options)

    database = sqlite3.connect
    with closing(database(tmp_path / INDEX, isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        store = DiskStore(tmp_path, "model", MANY, wait_s=0.01)
        monkeypatch.setattr(sqlite3, "connect", connect)
        for seed in (2, 3, 4):
            assert store.write(None, tokens_of(seed), state_of(seed)) is None
        assert found(store) == [tokens_of(1)]
    for seed in (2, 3):
        put(store, seed)

    assert waits == [0.01, 0, 0, 0.01, 0, 0.01]


def test_a_directory_that_vanishes_is_a_miss(tmp_path):
    """
    At any moment of a running engine; what was in it is gone, nothing is broken.
    """
    root = tmp_path / "root"
    store = DiskStore(root, "model", MANY)
    file = put(store, 2)

    shutil.rmtree(root)

    assert found(store) == []
    assert store.read(file) is None
    assert store.write(None, tokens_of(3), state_of(3)) is None
    store.delete(file)
    store.close()
    assert not root.exists()


@pytest.mark.parametrize("max_bytes", [100, 5000, 100_000])
def test_a_disk_that_is_full_halfway_leaves_no_part(tmp_path, max_bytes):
    """
    The system refuses in the middle of state or index: a miss, and the files before it stay.
    """
    store = DiskStore(tmp_path, "model", MANY)
    file = put(store, 1)
    before = n_used(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, limits[1]))
    try:
        written = store.write(None, tokens_of(2), state_of(2, 10**6))
        store.delete(file) if max_bytes == 100 else None
        store.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert written is None
    assert n_used(tmp_path) <= before
    assert np.array_equal(store.read(put(store, 3)), state_of(3))


def test_a_directory_that_can_only_be_read_is_read():
    """
    Files somebody has prepared are of use where nothing can be written.
    """
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        with ordinary_user(root):
            file = put(DiskStore(root, "model", MANY), 1)
            (root / INDEX).chmod(0o400)
            root.chmod(0o500)
            store = DiskStore(root, "model", MANY)
            tokens, state = found(store), store.read(file)
            written = store.write(None, tokens_of(2), state_of(2))
            root.chmod(0o700)

    assert tokens == [tokens_of(1)]
    assert np.array_equal(state, state_of(1))
    assert written is None


def test_no_more_descriptors_is_a_miss_and_the_file_stays(tmp_path):
    """
    A server that has all its files open loses no states for it.
    """
    store = DiskStore(tmp_path, "model", MANY)
    file = put(store, 2)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        missed = (
            store.read(file),
            store.scan(SpanKeys()),
            store.write(None, tokens_of(3), state_of(3)),
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    assert missed == (None, [], None)
    assert np.array_equal(store.read(file), state_of(2))


def test_a_system_without_threads_loses_no_state(tmp_path, monkeypatch):
    """
    Who hands a state over then writes it; the writer can be drained and closed.
    """

    def refuse(_thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    writer = DiskWriter(DiskStore(tmp_path, "model", MANY))
    reports = []
    writer.report = reports.append
    with monkeypatch.context() as patch:
        patch.setattr(Thread, "start", refuse)
        writer.write(1, None, tokens_of(1), state_of(1))
        writer.fetch(2, reports[0].saved.payload)
    within_bound(writer.drain)
    within_bound(writer.close)

    written, fetched = reports
    assert (written.save_id, fetched.fetch_id) == (1, 2)
    assert np.array_equal(fetched.payload.data, state_of(1))
