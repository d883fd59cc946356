"""States in a directory: complete, verified, within their limit, whoever else writes there."""

import os
import signal
import sqlite3
import subprocess
import sys
from array import array
from pathlib import Path
from random import Random
from threading import Thread

import numpy as np
import pytest

from pyllama_raw.core.request import Adapted
from pyllama_raw.engine.disk_store import DiskStore
from pyllama_raw.engine.state_files import (
    ENTRY_BYTES,
    INDEX_BYTES,
    SpanKeys,
    StoredFile,
)

ROOT = Path(__file__).parents[2]
MANY = 10**9


def tokens_of(seed: int, n_tokens: int = 5) -> bytes:
    return array("i", [seed + i for i in range(n_tokens)]).tobytes()


def state_of(seed: int, n_bytes: int = 1000):
    return np.frombuffer(Random(seed).randbytes(n_bytes), np.uint8)  # noqa: S311


def put(
    store: DiskStore, seed: int, *, namespace: str | None = None, n_bytes: int = 1000
) -> StoredFile:
    file = store.write(namespace, tokens_of(seed), state_of(seed, n_bytes))
    assert file is not None
    return file


def found(store: DiskStore) -> list[bytes]:
    """Tokens of what is there, the latest used last."""
    return [known.tokens.tobytes() for known in store.scan(SpanKeys())]


def states_in(directory: Path) -> list[Path]:
    return list(directory.glob("*.plrstate"))


def n_used(directory: Path) -> int:
    """Bytes of all files, those of SQLite included."""
    return sum(path.stat().st_size for path in directory.iterdir())


def room_for(file: StoredFile, n_files: int) -> int:
    """The limit that so many files like *file* fill to the byte."""
    return INDEX_BYTES + n_files * file.counted_bytes


@pytest.mark.parametrize("namespace", [None, "tenant ü", Adapted("ab", None)])
def test_what_is_written_is_found_and_read(tmp_path, namespace):
    """
    A new process finds namespace, tokens and state as they were; sizes add up.
    """
    store = DiskStore(tmp_path, "model", MANY)
    file = put(store, 7, namespace=namespace)

    again = DiskStore(tmp_path, "model", MANY)
    (known,) = again.scan(SpanKeys())

    assert known.namespace == namespace
    assert known.tokens.tobytes() == tokens_of(7)
    assert known.payload == file
    assert known.n_bytes + len(tokens_of(7)) == file.n_bytes + ENTRY_BYTES
    assert file.n_bytes == file.path.stat().st_size
    assert np.array_equal(again.read(file), state_of(7))


def test_files_come_in_the_order_of_use(tmp_path):
    """
    Reading a file counts as a use, also for the next process.
    """
    store = DiskStore(tmp_path, "model", MANY)
    files = [put(store, seed) for seed in range(3)]

    store.read(files[0])
    store.close()

    again = DiskStore(tmp_path, "model", MANY)
    assert found(again) == [tokens_of(1), tokens_of(2), tokens_of(0)]


def test_every_changed_byte_is_noticed(tmp_path):
    """
    One flipped bit anywhere makes the file a miss, and it is removed.
    """
    rng = Random(1)  # noqa: S311
    store = DiskStore(tmp_path, "model", MANY)

    for _ in range(40):
        put(store, 1)
        ((path,), again) = states_in(tmp_path), DiskStore(tmp_path, "model", MANY)
        flip(path, rng.randrange(path.stat().st_size))
        states = [again.read(known.payload) for known in again.scan(SpanKeys())]
        again.close()
        assert states in ([None], [])
        assert states_in(tmp_path) == found(store) == []


@pytest.mark.parametrize("change", [-1, 1, -500, -(10**6)])
def test_other_sizes_are_noticed(tmp_path, change):
    """
    A file that was cut off, or has more bytes, is a miss for both ways to look at it.
    """
    store = DiskStore(tmp_path, "model", MANY)
    for use in (found, None):
        file = put(store, 3)
        os.truncate(file.path, max(file.n_bytes + change, 0))
        assert (store.read(file) if use is None else use(store)) in (None, [])
        assert not file.path.exists()


def test_another_file_under_the_same_name_is_a_miss(tmp_path):
    """
    The index means one content: a valid file of other tokens in its place is not read.
    """
    store = DiskStore(tmp_path, "model", MANY)
    one, two = put(store, 1), put(store, 2)

    two.path.replace(one.path)

    assert store.read(one) is None


def test_a_state_is_not_given_for_what_it_was_not_written_for(tmp_path):
    """
    A row that says another model, salt or number of tokens than was written is a miss.
    """
    changes = [
        "fingerprint = x'61'",
        "namespace = x'223122'",
        "state_at = state_at + 4",
    ]
    for number, change in enumerate(changes):
        root = tmp_path / str(number)
        put(DiskStore(root, "model", MANY), 1, namespace="0")
        with sqlite3.connect(root / "plrstates.sqlite") as database:
            database.execute(f"UPDATE states SET {change}")  # noqa: S608
        database.close()

        store = DiskStore(root, "a" if number == 0 else "model", MANY)
        (known,) = store.scan(SpanKeys())

        assert store.read(known.payload) is None


def test_files_of_other_fingerprints_are_not_found(tmp_path):
    """
    Another model's files stay where they are.
    """
    other = DiskStore(tmp_path, "other", MANY)
    kept = put(other, 1)
    store = DiskStore(tmp_path, "model", MANY)
    put(store, 2)

    assert found(store) == [tokens_of(2)]
    assert np.array_equal(other.read(kept), state_of(1))


def test_a_file_that_vanished_is_a_miss(tmp_path):
    """
    Another process may delete a file at any time; so may its own.
    """
    store = DiskStore(tmp_path, "model", MANY)
    deleted, vanished = put(store, 1), put(store, 2)

    store.delete(deleted)
    store.delete(deleted)
    vanished.path.unlink()

    assert (store.read(deleted), store.read(vanished), found(store)) == (None, None, [])


def test_the_limit_is_for_all_files_of_all_models(tmp_path):
    """
    What was not used for longest goes first, and the limit is met to the byte.
    """
    foreign = put(DiskStore(tmp_path, "other", MANY), 0)
    limit = room_for(foreign, 3)
    store = DiskStore(tmp_path, "model", limit)
    files = [put(store, seed) for seed in (1, 2)]

    store.read(files[0])
    put(store, 3)
    assert not foreign.path.exists()
    assert [file.path.exists() for file in files] == [True, True]

    put(store, 4)
    assert [file.path.exists() for file in files] == [True, False]
    assert n_used(tmp_path) <= limit


def test_a_lower_limit_holds_from_the_start(tmp_path):
    """
    Opening a directory that is too full deletes until it is not, and the index shrinks.
    """
    store = DiskStore(tmp_path, "model", MANY)
    file = [put(store, seed) for seed in range(50)][-1]

    limit = room_for(file, 2) + 1
    DiskStore(tmp_path, "model", limit)

    assert len(states_in(tmp_path)) == 2
    assert n_used(tmp_path) <= limit


def test_what_cannot_fit_deletes_nothing(tmp_path):
    """
    A state larger than the limit is not written, and no other file goes for it.
    """
    store = DiskStore(tmp_path, "model", MANY)
    file = put(store, 1)
    small = DiskStore(tmp_path, "model", room_for(file, 1))

    assert small.write(None, tokens_of(2), state_of(2, 1001)) is None
    assert file.path.exists()


@pytest.mark.parametrize(("n_chars", "n_found"), [(1024, 1), (3000, 0)])
def test_a_namespace_too_long_for_the_index_is_not_written(tmp_path, n_chars, n_found):
    """
    A row has one size at most; the longest salt of ASCII fits.
    """
    store = DiskStore(tmp_path, "model", MANY)

    store.write("x" * n_chars, tokens_of(1), state_of(1))

    assert len(states_in(tmp_path)) == n_found


def test_a_disk_that_refuses_is_a_miss(tmp_path, monkeypatch):
    """
    No file, not even a part of one, is left when syncing fails.
    """
    store = DiskStore(tmp_path, "model", MANY)

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)

    assert store.write(None, tokens_of(1), state_of(1)) is None
    assert states_in(tmp_path) == []


def test_only_the_owner_can_read(tmp_path):
    """
    Files hold prompts and salts: nobody else may look at them, whatever the umask is.
    """
    before = os.umask(0)
    try:
        file = put(DiskStore(tmp_path / "new", "model", MANY), 1)
    finally:
        os.umask(before)

    paths = [*file.path.parent.iterdir(), file.path.parent]
    assert [path.stat().st_mode & 0o077 for path in paths] == [0, 0, 0]


def test_writers_at_once_stay_within_the_limit(tmp_path):
    """
    Several stores on one directory: at no write is more there than the limit allows.
    """
    limit = room_for(put(DiskStore(tmp_path, "model0", MANY), 0), 4)
    seen = []

    def work(number: int) -> None:
        store = Watched(tmp_path, f"model{number % 2}", limit)
        for seed in range(8):
            file = put(store, seed)
            if (state := store.read(file)) is not None:
                assert np.array_equal(state, state_of(seed))
        seen.extend(store.seen)

    threads = [Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(seen) == 32
    assert max(seen) <= limit
    assert len(states_in(tmp_path)) == 4


class Watched(DiskStore):
    """Measures the directory before each write, where the index is still held."""

    def _make_room(self, index, n_bytes):
        has_room = super()._make_room(index, n_bytes)
        if n_bytes:
            self.__dict__.setdefault("seen", []).append(n_used(self._root) + n_bytes)
        return has_room


def test_killed_writers_leave_nothing_wrong(tmp_path):
    """
    kill -9 of a writing process at ten moments: afterwards every file is whole, none is
    nobody's, and the limit holds.
    """
    rng = Random(3)  # noqa: S311
    limit = 5 * 2**20
    with start_writers(tmp_path, limit) as writers:
        for _ in range(10):
            pid = begin(writers, n_files=rng.randint(1, 4))
            busy_wait(rng.randint(0, 20_000))
            os.kill(pid, signal.SIGKILL)
            while writers.stdout.readline() != b"gone\n":
                pass
            assert n_used(tmp_path) <= limit

            store = DiskStore(tmp_path, "model", limit)
            known = store.scan(SpanKeys())
            assert {state.payload.path for state in known} == set(states_in(tmp_path))
            for state in known:
                seed = state.tokens[0]
                assert np.array_equal(store.read(state.payload), state_of(seed, 2**20))
        writers.stdin.close()


def busy_wait(n_turns: int) -> None:
    """A short while that differs: no clock decides what this test shows."""
    for _ in range(n_turns):
        pass


WRITERS = """
import os, sys
from pathlib import Path
from random import Random
import numpy as np
from pyllama_raw.engine.disk_store import DiskStore

for _ in sys.stdin:
    if pid := os.fork():
        os.waitpid(pid, 0)
        print("gone", flush=True)
        continue
    store = DiskStore(Path(sys.argv[1]), "model", int(sys.argv[2]))
    for seed in range(1000):
        print(os.getpid(), flush=True)
        tokens = np.arange(seed, seed + 5, dtype=np.int32).tobytes()
        state = np.frombuffer(Random(seed).randbytes(2**20), np.uint8)
        store.write(None, tokens, state)
"""


def start_writers(directory: Path, limit: int) -> subprocess.Popen:
    """A process that for each line starts one that writes files of 1 MiB."""
    return subprocess.Popen(
        [sys.executable, "-c", WRITERS, str(directory), str(limit)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def begin(writers: subprocess.Popen, n_files: int) -> int:
    """Have one more process write until it has begun *n_files*; its process id."""
    writers.stdin.write(b"go\n")
    writers.stdin.flush()
    return [int(writers.stdout.readline()) for _ in range(n_files)][-1]


def flip(path: Path, place: int) -> None:
    """Change one bit."""
    with path.open("r+b") as stream:
        stream.seek(place)
        (byte,) = stream.read(1)
        stream.seek(place)
        stream.write(bytes([byte ^ 1]))
