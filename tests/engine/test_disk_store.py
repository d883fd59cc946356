"""Files of states: complete, verified, within their limit, whoever else writes there."""

import os
import signal
import subprocess
import sys
from array import array
from pathlib import Path
from random import Random
from threading import Thread

import numpy as np
import pytest

from pyllama_raw.engine.disk_store import DiskStore
from pyllama_raw.engine.span_keys import SpanKeys
from pyllama_raw.engine.state_file import HEADER_BYTES, StoredFile
from pyllama_raw.errors import ConfigError

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


def age(file: StoredFile, seconds: int) -> None:
    """As if *file* had last been used that long before now."""
    used = file.path.stat().st_mtime_ns - seconds * 10**9
    os.utime(file.path, ns=(used, used))


def n_used(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*/*"))


def test_what_is_written_is_found_and_read(tmp_path):
    """
    A new process finds namespace, tokens and state as they were; sizes add up.
    """
    store = DiskStore(tmp_path, "model", MANY)
    file = put(store, 7, namespace="tenant ü")

    again = DiskStore(tmp_path, "model", MANY)
    (known,) = again.scan(SpanKeys())

    assert known.namespace == "tenant ü"
    assert known.tokens.tobytes() == tokens_of(7)
    assert known.payload == file
    assert known.n_bytes + len(tokens_of(7)) == file.n_bytes == n_used(tmp_path)
    assert np.array_equal(again.read(file), state_of(7))


def test_files_come_in_the_order_of_use(tmp_path):
    """
    Reading a file counts as a use, also for the next process.
    """
    store = DiskStore(tmp_path, "model", MANY)
    files = [put(store, seed) for seed in range(3)]
    for file in files:
        age(file, 100)

    store.read(files[0])

    assert [known.payload for known in store.scan(SpanKeys())][-1] == files[0]


def test_every_changed_byte_is_noticed(tmp_path):
    """
    One flipped bit anywhere makes the file a miss, and it is removed.
    """
    rng = Random(1)  # noqa: S311
    store = DiskStore(tmp_path, "model", MANY)
    n_bytes = put(store, 0).n_bytes
    places = [0, 8, 39, 40, HEADER_BYTES - 1, HEADER_BYTES, n_bytes - 1]

    for place in [*places, *rng.sample(range(n_bytes), 40)]:
        file = put(store, 1)
        flip(file.path, place)
        assert store.read(file) is None
        assert not file.path.exists()


def test_damaged_heads_are_not_indexed(tmp_path):
    """
    A flipped bit in header or tokens removes the file when the next process starts.
    """
    store = DiskStore(tmp_path, "model", MANY)
    rest = HEADER_BYTES + len(tokens_of(0))

    for place in Random(2).sample(range(rest), 30):  # noqa: S311
        file = put(store, 1)
        flip(file.path, place)
        assert store.scan(SpanKeys()) == []
        assert not file.path.exists()


@pytest.mark.parametrize("change", [-1, 1, -500, -(10**6)])
def test_other_sizes_are_noticed(tmp_path, change):
    """
    A file that was cut off, or has more bytes, is a miss for both ways to look at it.
    """
    store = DiskStore(tmp_path, "model", MANY)
    for use in (lambda: store.scan(SpanKeys()), None):
        file = put(store, 3)
        os.truncate(file.path, max(file.n_bytes + change, 0))
        assert (store.read(file) if use is None else use()) in (None, [])
        assert not file.path.exists()


def test_another_file_under_the_same_name_is_a_miss(tmp_path):
    """
    The index means one content: a valid file of other tokens in its place is not read.
    """
    store = DiskStore(tmp_path, "model", MANY)
    one, two = put(store, 1), put(store, 2)

    two.path.replace(one.path)

    assert store.read(one) is None


def test_files_of_other_fingerprints_are_not_found(tmp_path):
    """
    Another model's files stay where they are; one in the wrong folder is removed.
    """
    other = DiskStore(tmp_path, "other", MANY)
    kept, moved = put(other, 1), put(other, 2)
    store = DiskStore(tmp_path, "model", MANY)
    moved.path.rename(tmp_path / "model" / moved.path.name)

    assert store.scan(SpanKeys()) == []
    assert [path.name for path in tmp_path.glob("*/*")] == [kept.path.name]


def test_a_file_that_vanished_is_a_miss(tmp_path):
    """
    Another process may delete a file at any time; so may its own.
    """
    store = DiskStore(tmp_path, "model", MANY)
    file = put(store, 1)

    store.delete(file)
    store.delete(file)

    assert store.read(file) is None


def test_the_limit_is_for_all_files_of_all_models(tmp_path):
    """
    What was not used for longest goes first, and the limit is met to the byte.
    """
    size = put(DiskStore(tmp_path, "other", MANY), 0).n_bytes
    store = DiskStore(tmp_path, "model", 3 * size)
    files = [put(store, seed) for seed in (1, 2)]
    for file, seconds in zip(files, (50, 100), strict=True):
        age(file, seconds)
    foreign = next((tmp_path / "other").iterdir())
    os.utime(foreign, (1, 1))

    put(store, 3)
    assert not foreign.exists()
    assert n_used(tmp_path) == store.max_bytes

    put(store, 4)
    assert [file.path.exists() for file in files] == [True, False]
    assert n_used(tmp_path) == store.max_bytes


def test_a_lower_limit_holds_from_the_start(tmp_path):
    """
    Opening a directory that is too full deletes until it is not.
    """
    store = DiskStore(tmp_path, "model", MANY)
    size = [put(store, seed).n_bytes for seed in range(5)][-1]

    DiskStore(tmp_path, "model", 2 * size + 1)

    assert n_used(tmp_path) == 2 * size


def test_what_cannot_fit_deletes_nothing(tmp_path):
    """
    A state larger than the limit is not written, and no other file goes for it.
    """
    store = DiskStore(tmp_path, "model", MANY)
    file = put(store, 1)
    small = DiskStore(tmp_path, "model", file.n_bytes)

    assert small.write(None, tokens_of(2), state_of(2, 1001)) is None
    assert file.path.exists()


def test_a_namespace_too_long_for_the_header_is_not_written(tmp_path):
    """
    The header has one size; what does not fit is a miss, not an error.
    """
    store = DiskStore(tmp_path, "model", MANY)

    assert store.write("x" * HEADER_BYTES, tokens_of(1), state_of(1)) is None
    assert n_used(tmp_path) == 0


def test_a_disk_that_refuses_is_a_miss(tmp_path, monkeypatch):
    """
    No file, not even a part of one, is left when syncing fails.
    """
    store = DiskStore(tmp_path, "model", MANY)

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)

    assert store.write(None, tokens_of(1), state_of(1)) is None
    assert n_used(tmp_path) == 0


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    """
    A file where the directory should be is a mistake of the caller, named as such.
    """
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match="directory"):
        DiskStore(tmp_path / "file", "model", MANY)


def test_only_the_owner_can_read(tmp_path):
    """
    Files hold prompts: nobody else may look at them.
    """
    file = put(DiskStore(tmp_path / "new", "model", MANY), 1)

    modes = [path.stat().st_mode & 0o077 for path in (file.path, file.path.parent)]
    assert modes == [0, 0]


def test_writers_at_once_stay_within_the_limit(tmp_path):
    """
    Several stores on one directory: at no write is more there than the limit allows.
    """
    size = put(DiskStore(tmp_path, "model0", MANY), 0).n_bytes
    limit = 4 * size
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
    assert max(seen) == limit


class Watched(DiskStore):
    """Measures the directory after each write, still under the lock."""

    def _put(self, block, tokens, state, rest):
        path = super()._put(block, tokens, state, rest)
        self.__dict__.setdefault("seen", []).append(n_used(self._root))
        return path


def test_killed_writers_leave_nothing_wrong(tmp_path):
    """
    kill -9 of a writing process at ten moments: afterwards every file is whole, parts
    are gone, and the limit holds.
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
            assert not list(tmp_path.glob("*/*.plrpart"))
            for known in store.scan(SpanKeys()):
                seed = known.tokens[0]
                assert np.array_equal(store.read(known.payload), state_of(seed, 2**20))
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
