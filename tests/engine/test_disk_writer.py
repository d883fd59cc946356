"""The thread that writes files, and what the engine thread makes of its reports."""

import weakref
from array import array
from dataclasses import replace
from threading import Event

import numpy as np
import pytest

from pyllama_raw.core.memory.cache import PrefixCache
from pyllama_raw.core.memory.snapshots import SnapshotKind
from pyllama_raw.core.memory.tiers import StoredState, Tier
from pyllama_raw.core.request import CacheTier
from pyllama_raw.core.step import Fetched
from pyllama_raw.engine import state_files
from pyllama_raw.engine.disk_store import DiskStore
from pyllama_raw.engine.state_files import REST_FACTOR, SLICE_BYTES, DiskWriter
from pyllama_raw.engine.thread import EngineThread
from pyllama_raw.testing import FakeExecutor, fake_limits, fake_parts
from pyllama_raw.testing.executor import FakeFile
from tests.core.support import make_request
from tests.engine.support import HANG_S, PlainLoop, PlainStream
from tests.engine.test_disk_store import MANY, state_of, tokens_of


class HeldStore(DiskStore):
    """Each write waits until the test allows it."""

    def __init__(self, directory):
        super().__init__(directory, "model", MANY)
        self.begun, self.allowed = Event(), Event()

    def write(self, namespace, tokens, state, rest):
        self.begun.set()
        assert self.allowed.wait(HANG_S)
        return super().write(namespace, tokens, state, rest)


def make_writer(store, **options):
    writer = DiskWriter(store, **options)
    reports = []
    writer.report = reports.append
    return writer, reports


def test_a_complete_file_is_reported(tmp_path):
    """
    With its bytes, those of the tokens apart; it can be read until it is deleted.
    """
    store = DiskStore(tmp_path, "model", MANY)
    writer, reports = make_writer(store)

    writer.write(7, "salt", tokens_of(1), state_of(1))
    writer.drain()
    ((write_id, written),) = reports
    writer.fetch(3, written.payload)
    writer.drain()
    writer.delete([written.payload])
    writer.drain()
    writer.fetch(4, written.payload)
    writer.drain()

    assert write_id == 7
    assert written.n_bytes == written.payload.counted_bytes - len(tokens_of(1))
    fetched, gone = reports[1:]
    assert (fetched.fetch_id, gone.fetch_id, gone.payload) == (3, 4, None)
    assert np.array_equal(fetched.payload.data, state_of(1))
    writer.close()


def test_a_state_is_freed_before_it_is_reported(tmp_path):
    """
    Whoever hears that a file is complete may fill its memory again.
    """
    writer, _ = make_writer(DiskStore(tmp_path, "model", MANY))
    freed = []
    writer.report = lambda *_: freed.append(state() is None)
    held = state_of(1)
    state = weakref.ref(held)
    writer.write(1, None, tokens_of(1), held)
    del held
    writer.close()

    assert freed == [True]


def test_close_writes_what_is_left(tmp_path):
    """
    Nothing that was accepted is lost; a writer that never wrote has no thread.
    """
    writer, reports = make_writer(DiskStore(tmp_path, "model", MANY))
    for write_id in range(5):
        writer.write(write_id, None, tokens_of(write_id), state_of(write_id))
    writer.close()
    idle, _ = make_writer(DiskStore(tmp_path, "model", MANY))
    idle.close()

    assert len(reports) == len(list(tmp_path.glob("*.plrstate"))) == 5


@pytest.mark.parametrize("others_compute", [True, False])
def test_files_rest_while_others_compute(tmp_path, monkeypatch, others_compute):
    """
    After each slice that is hashed, written or read, longer than it took; else not at all.
    """
    rests = []
    monkeypatch.setattr(state_files.time, "sleep", rests.append)
    writer, reports = make_writer(DiskStore(tmp_path, "model", MANY))
    writer.others_compute = others_compute
    state = state_of(1, 2 * SLICE_BYTES + 1)

    writer.write(1, None, tokens_of(1), state)
    writer.drain()
    n_written = len(rests)
    writer.fetch(1, reports[0].saved.payload)
    writer.drain()

    assert np.array_equal(reports[1].payload.data, state)
    assert (n_written, len(rests)) == ((6, 9) if others_compute else (0, 0))
    assert sum(rests[n_written:]) <= REST_FACTOR * reports[1].seconds
    writer.close()


def test_an_unexpected_error_is_a_miss(tmp_path, caplog):
    """
    The log has it; the next state is written.
    """

    class Broken(DiskStore):
        def write(self, namespace, tokens, state, rest):
            if namespace == "broken":
                raise ValueError("nobody thought of it")
            return super().write(namespace, tokens, state, rest)

    writer, reports = make_writer(Broken(tmp_path, "model", MANY))
    writer.write(1, "broken", tokens_of(1), state_of(1))
    writer.write(2, None, tokens_of(2), state_of(2))
    writer.close()

    assert reports[0] == (1, None)
    assert reports[1][1] is not None
    assert "nobody thought of it" in caplog.text


class FakeFiles:
    """Completes what a FakeExecutor has written as soon as somebody waits for it."""

    def __init__(self, memory):
        self.report = None
        self.memory = memory

    def drain(self):
        while self.memory.writing:
            self.report(self.memory.end_write())
        while self.memory.reading:
            self.report(self.memory.end_fetch())


def test_the_engine_writes_at_its_end_what_slots_hold():
    """
    Each slot in a plan of its own, after the last request has ended.
    """
    executor = FakeExecutor(fake_limits())
    files = FakeFiles(executor.memory)
    thread = start(executor, files)
    stream = PlainStream(PlainLoop())
    thread.submit_all((make_request(n_prompt=80, max_tokens=3),), stream)
    stream.read_to_end()

    thread.close()
    assert thread.join(HANG_S)

    (file,) = executor.memory.files
    assert len(file.tokens) == 82
    assert thread.error is None


def test_a_file_can_be_used_as_soon_as_it_is_reported():
    """
    The report is a command to the engine thread; the next request finds the file.
    """
    executor = FakeExecutor(fake_limits(n_slots=1), on_step=lambda *_: files.drain())
    files = FakeFiles(executor.memory)
    thread = start(executor, files)
    ends = []
    for request_id, namespace in enumerate(["a", "b", "a"]):
        stream = PlainStream(PlainLoop())
        request = make_request(request_id, 80, 3, namespace=namespace)
        thread.submit_all((request,), stream)
        ends.append(stream.read_to_end()[-1])
    thread.close()
    assert thread.join(HANG_S)

    assert [end.n_cached for end in ends] == [0, 0, 78]
    assert ends[-1].cache_tier is CacheTier.DISK


def test_streams_go_on_while_a_file_is_read():
    """
    The reader hangs: its request waits without work, others get all of their tokens.
    """
    executor = FakeExecutor(fake_limits(n_slots=2))
    files = FakeFiles(executor.memory)
    file = FakeFile(0, tuple(enumerate(range(100, 190))))
    executor.memory.files.add(file)
    known = StoredState(None, array("i", file.tokens), file, file.n_bytes)
    thread = start(executor, files, [known])
    late, stream = PlainStream(PlainLoop()), PlainStream(PlainLoop())
    thread.submit_all((make_request(0, 90, 2),), late)
    thread.submit_all((make_request(1, 4, 20, namespace="other"),), stream)

    end = stream.read_to_end()[-1]
    works = [work for plan in executor.plans for work in plan.works]
    thread.call(files.drain).result(HANG_S)
    late_end = late.read_to_end()[-1]
    thread.close()
    assert thread.join(HANG_S)

    assert end.n_output == 20
    assert {work.request_id for work in works} == {1}
    assert (late_end.n_output, late_end.n_cached) == (2, 88)
    assert thread.error is None


def test_a_read_does_not_wait_for_a_write(tmp_path):
    """
    A write may wait for the lock of the directory, and a request waits for the read.
    """
    store = HeldStore(tmp_path)
    file = DiskStore(tmp_path, "model", MANY).write(None, tokens_of(1), state_of(1))
    writer, _ = make_writer(store)
    is_read = Event()
    writer.report = lambda report: isinstance(report, Fetched) and is_read.set()
    writer.write(1, None, tokens_of(2), state_of(2))
    assert store.begun.wait(HANG_S)

    writer.fetch(1, file)
    was_read = is_read.wait(HANG_S)
    store.allowed.set()
    writer.close()

    assert was_read


def start(executor, files, known=()):
    """An engine thread whose slots go to files of any size."""
    states = PrefixCache(SnapshotKind.STATE, max_bytes=10**6, max_entries=100)
    host = PrefixCache(SnapshotKind.RANGE, max_bytes=10**6, max_entries=0)
    tier = Tier(CacheTier.DISK, states, lambda n_tokens: 100 * n_tokens, known)
    parts = fake_parts(executor, cache=host, disk=tier)
    return EngineThread(replace(parts, files=files))


def test_the_directory_is_the_callers(tmp_path):
    """
    A store makes its folders, and an index, but no state before there is one to keep.
    """
    DiskStore(tmp_path / "a" / "b", "model", MANY)

    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == [
        "plrstates.sqlite"
    ]
