"""A directory of files where others have put anything: nothing hangs, breaks or goes."""

import errno
import fcntl
import json
import os
import resource
import shutil
import tempfile
from hashlib import sha256
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from pyllama_raw.engine import directory_lock, disk_store
from pyllama_raw.engine.disk_store import DiskStore
from pyllama_raw.engine.disk_writer import DiskWriter
from pyllama_raw.engine.span_keys import SpanKeys
from pyllama_raw.engine.state_file import BODY_AT, HEADER_BYTES, MAGIC
from pyllama_raw.errors import ConfigError
from tests.engine.hostile import STRANGERS, ordinary_user, seen, within_bound
from tests.engine.test_disk_store import MANY, n_used, put, state_of, tokens_of

UNIQUE = "0123456789abcdef" * 2
# Where a stranger's thing may lie, beside files of ours.
BESIDE = {
    "state": f"model/{UNIQUE}.plrstate",
    "part": f"model/{UNIQUE}.plrpart",
    "state of another model": f"other/{UNIQUE}.plrstate",
    "part of another model": f"other/{UNIQUE}.plrpart",
}


def make_root(tmp_path: Path) -> Path:
    """A directory with one state, two levels below *tmp_path*."""
    root = tmp_path / "a" / "b"
    put(DiskStore(root, "model", MANY), 1)
    (root / "other").mkdir()
    return root


def found(store: DiskStore) -> list[bytes]:
    return [known.tokens.tobytes() for known in store.scan(SpanKeys())]


@pytest.mark.parametrize("place", BESIDE)
@pytest.mark.parametrize("kind", STRANGERS)
def test_what_is_not_ours_is_a_miss_and_stays(tmp_path, kind, place):
    """
    Whatever has the name of one of our files, the files of ours beside it are of use.
    """
    root = make_root(tmp_path)
    strange = root / BESIDE[place]
    STRANGERS[kind](strange)
    before = seen(strange)

    store = within_bound(lambda: DiskStore(root, "model", MANY))
    at_start = within_bound(lambda: found(store))
    file = within_bound(lambda: put(store, 2))

    assert at_start == [tokens_of(1)]
    assert np.array_equal(store.read(file), state_of(2))
    assert seen(strange) == before


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_lock_that_is_not_ours_stops_writes_only(tmp_path, kind):
    """
    The caller is warned; files are found and read, and the next state is not written.
    """
    root = make_root(tmp_path)
    lock = root / ".plrlock"
    lock.unlink()
    STRANGERS[kind](lock)
    before = seen(lock)

    with pytest.warns(RuntimeWarning, match="keeps nothing new"):
        store = within_bound(lambda: DiskStore(root, "model", MANY))
    (known,) = store.scan(SpanKeys())
    written = within_bound(lambda: store.write(None, tokens_of(2), state_of(2)))

    assert np.array_equal(store.read(known.payload), state_of(1))
    assert written is None
    assert seen(lock) == before


@pytest.mark.parametrize("kind", sorted(STRANGERS.keys() - {"directory"}))
def test_a_folder_that_is_not_ours_holds_nothing(tmp_path, kind):
    """
    The caller is warned; nothing is found there, nothing is written or deleted.
    """
    root = make_root(tmp_path)
    folder = root / "new"
    STRANGERS[kind](folder)
    before = seen(folder)

    with pytest.warns(RuntimeWarning, match="keeps nothing new"):
        store = within_bound(lambda: DiskStore(root, "new", MANY))
    known = within_bound(lambda: store.scan(SpanKeys()))
    written = within_bound(lambda: store.write(None, tokens_of(2), state_of(2)))

    assert (known, written) == ([], None)
    assert seen(folder) == before


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_file_that_became_something_else_is_a_miss(tmp_path, kind):
    """
    An index may be older than the directory: what is there now is not opened or deleted.
    """
    root = make_root(tmp_path)
    store = DiskStore(root, "model", MANY)
    file = put(store, 2)
    file.path.unlink()
    STRANGERS[kind](file.path)
    before = seen(file.path)

    state = within_bound(lambda: store.read(file))
    within_bound(lambda: store.delete(file))

    assert state is None
    assert seen(file.path) == before


def test_files_behind_a_link_are_not_counted_or_deleted(tmp_path):
    """
    A link to another cache directory gives nobody a reason to empty that.
    """
    elsewhere = DiskStore(tmp_path / "elsewhere", "model", MANY)
    kept = [put(elsewhere, seed) for seed in range(3)]
    root = tmp_path / "root"
    root.mkdir()
    (root / "linked").symlink_to(kept[0].path.parent)

    store = DiskStore(root, "model", kept[0].n_bytes)
    file = put(store, 9)

    assert [f.path.exists() for f in kept] == [True, True, True]
    assert np.array_equal(store.read(file), state_of(9))


@pytest.mark.parametrize(
    "name",
    [
        b"notes.plrstate",
        b"notes.plrpart",
        b"\xff\xfe.plrstate",
        b"\n" + b"0" * 32 + b".plrstate",
        b"0" * 32 + b".plrstate.bak",
        b"0" * 33 + b".plrpart",
        b"A" * 32 + b".plrstate",
    ],
)
def test_files_under_other_names_stay(tmp_path, name):
    """
    A user's own file with an end like ours is neither read nor deleted nor counted.
    """
    root = make_root(tmp_path)
    path = Path(os.fsdecode(os.fsencode(root / "model") + b"/" + name))
    path.write_bytes(bytes(10_000))

    store = DiskStore(root, "model", MANY)
    small = DiskStore(root, "model", 1)

    assert found(store) == found(small) == []
    assert path.read_bytes() == bytes(10_000)


def test_a_list_of_forged_headers(tmp_path):
    """
    Sizes that no file has, other types and fields: the file goes, and no memory is taken.
    """
    root = make_root(tmp_path)
    store = DiskStore(root, "model", MANY)
    for body in FORGED:
        path = root / BESIDE["state"]
        forge(path, body)
        assert within_bound(lambda: found(store)) == [tokens_of(1)], body
        assert not path.exists()


FACTS = {
    "fingerprint": "model",
    "namespace": None,
    "n_tokens": 5,
    "state_bytes": 1000,
    "tokens_digest": sha256(tokens_of(3)).hexdigest(),
    "state_digest": sha256(state_of(3)).hexdigest(),
}
ODD = [None, True, -1, 0, 2**31, 2**63, 10**400, 1.5, 5.0, float("nan"), "5", [5], {}]
FORGED = [
    *(json.dumps(FACTS | {name: odd}) for name in ("n_tokens", "state_bytes") for odd in ODD),
    *(json.dumps(FACTS | {name: 1}) for name in FACTS if name != "n_tokens"),
    *(json.dumps(FACTS | {"n_tokens": 5 - n, "state_bytes": 1000 + 4 * n}) for n in (-250, 5, 6)),
    *(json.dumps({k: v for k, v in FACTS.items() if k != name}) for name in FACTS),
    json.dumps(FACTS | {"more": 1}),
    json.dumps(FACTS | {"fingerprint": "other"}),
    json.dumps(list(FACTS)),
    "[" * 4000,
    '{"a":' * 800,
    "null",
    "",
    "\udcff{",
]  # fmt: skip


def forge(path: Path, body: str) -> None:
    """A file with a header that nobody here has written, and a digest that fits."""
    raw = body.encode("utf-8", "surrogateescape").ljust(HEADER_BYTES - BODY_AT)
    block = MAGIC + sha256(raw).digest() + raw
    path.write_bytes(block + tokens_of(3) + state_of(3).tobytes())


def test_a_forged_header_of_true_facts_is_found(tmp_path):
    """
    The list above is refused for what it says, not for how it is made.
    """
    root = make_root(tmp_path)
    forge(root / BESIDE["state"], json.dumps(FACTS))

    assert found(DiskStore(root, "model", MANY)) == [tokens_of(1), tokens_of(3)]


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


def test_a_user_without_a_home_is_refused(monkeypatch):
    """
    So is `~somebody`, if the system does not know that name.
    """
    with pytest.raises(ConfigError, match=r"CacheConfig\.directory='~nobody-here"):
        DiskStore(Path("~nobody-here-of-that-name/x"), "model", MANY)


class FakeTime:
    """A clock that only a sleep moves."""

    def __init__(self) -> None:
        self.now, self.n_sleeps = 0.0, 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.n_sleeps += 1


@pytest.fixture
def clock(monkeypatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(directory_lock, "time", fake)
    return fake


def test_a_holder_that_is_stopped_is_waited_for_once(tmp_path, clock):
    """
    The open does not wait at all, the first write for a while, further ones not again;
    once the lock is free they are written.
    """
    root = make_root(tmp_path)
    with (root / ".plrlock").open("rb") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        store = DiskStore(root, "model", MANY, lock_wait_s=1)
        waits = [clock.n_sleeps]
        for seed in (2, 3, 4):
            assert store.write(None, tokens_of(seed), state_of(seed)) is None
            waits.append(clock.n_sleeps)

    assert found(store) == [tokens_of(1)]
    assert waits[0] == 0
    assert 1 < waits[1] == waits[2] == waits[3]
    assert store.write(None, tokens_of(2), state_of(2)) is not None


def test_a_lock_that_was_replaced_is_no_lock(tmp_path, clock):
    """
    Whoever holds a file that is not there any more would not keep others from writing.
    """
    root = make_root(tmp_path)
    store = DiskStore(root, "model", MANY)
    lock = root / ".plrlock"
    with lock.open("rb") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        lock.unlink()
        file = put(store, 2)

    assert np.array_equal(store.read(file), state_of(2))


def test_a_directory_that_vanishes_is_a_miss(tmp_path):
    """
    At any moment of a running engine; what was in it is gone, nothing is broken.
    """
    root = make_root(tmp_path)
    store = DiskStore(root, "model", MANY)
    file = put(store, 2)

    shutil.rmtree(root)

    assert store.scan(SpanKeys()) == []
    assert store.read(file) is None
    assert store.write(None, tokens_of(3), state_of(3)) is None
    store.delete(file)
    assert not root.exists()


def test_a_folder_that_vanishes_is_made_again(tmp_path):
    """
    Somebody may clean up below the directory.
    """
    root = make_root(tmp_path)
    store = DiskStore(root, "model", MANY)

    shutil.rmtree(root / "model")

    assert np.array_equal(store.read(put(store, 3)), state_of(3))


def test_no_space_for_the_folder_leaves_the_engine_without_files(tmp_path, monkeypatch):
    """
    A disk may be full before anything is written: that breaks no open.
    """

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(disk_store, "make_folder", full)

    with pytest.warns(RuntimeWarning, match="No space left"):
        store = DiskStore(tmp_path, "model", MANY)

    assert store.scan(SpanKeys()) == []
    assert store.write(None, tokens_of(1), state_of(1)) is None


def test_a_disk_that_is_full_halfway_leaves_no_part(tmp_path):
    """
    The system refuses in the middle of a state: a miss, and the files before it stay.
    """
    root = make_root(tmp_path)
    store = DiskStore(root, "model", MANY)
    before = n_used(root)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        written = store.write(None, tokens_of(2), state_of(2, 10**6))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert written is None
    assert n_used(root) == before


def test_a_directory_that_can_only_be_read_is_read():
    """
    Files somebody has prepared are of use where nothing can be written.
    """
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        with ordinary_user(root):
            file = put(DiskStore(root, "model", MANY), 1)
            for path in (root / ".plrlock", root / "model", root):
                path.chmod(0o500)
            with pytest.warns(RuntimeWarning, match="keeps nothing new"):
                store = DiskStore(root, "model", MANY)
            tokens, state = found(store), store.read(file)
            written = store.write(None, tokens_of(2), state_of(2))
            for path in (root, root / "model"):
                path.chmod(0o700)

    assert tokens == [tokens_of(1)]
    assert np.array_equal(state, state_of(1))
    assert written is None


def test_a_file_that_may_not_be_read_is_a_miss_and_stays():
    """
    Today's permissions say nothing about the contents.
    """
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        with ordinary_user(root):
            store = DiskStore(root, "model", MANY)
            file = put(store, 1)
            file.path.chmod(0)

            missed = found(store), store.read(file)
            file.path.chmod(0o600)
            again = found(store)

    assert missed == ([], None)
    assert again == [tokens_of(1)]


def test_no_more_descriptors_is_a_miss_and_the_file_stays(tmp_path):
    """
    A server that has all its files open loses no states for it.
    """
    root = make_root(tmp_path)
    store = DiskStore(root, "model", MANY)
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
