"""
Files that hold the state of one slot: their bytes, and the threads that write and read them.

A file has the token ids as C ints and the state. What the state is of, its key, and a digest of
both stand in the index. The key is made of the tokens that were found, so a state is only ever
given for what it was written for. Memory of which a range can be saved has a state in parts of some
tokens, so that it is loaded a part at a time: a load keeps the running streams waiting, and a long
state takes longer than a step may.

    count, then bytes and tokens of each part, then the parts

Whatever compares prompts compares ints: so the key of a span, 32 bytes, gets a number below 0, as
each row of the span has it in the tokens of a prompt. A number is never given to another key. A key
that was forgotten gets a new one: what is cached under the old one is not found again, which is a
miss. The numbers of rows are of one engine, so a file has keys instead: each row is -1, and behind
the tokens is a record of each span, then their number, below 0. All of it are C ints.

One thread writes and deletes, in the order that was decided. Another one reads, because a
request waits for that, and a write may wait for the lock of the directory. States on their
way count against `max_bytes` of host memory, so those that come too fast are not even
copied. The threads of libllama wait for each other many times in a step, so whoever takes a CPU
from one of them delays all running streams. Both therefore rest most of the time while others
compute.
"""

from __future__ import annotations

import json
import os
import re
import struct
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from errno import EINVAL
from fcntl import LOCK_EX, LOCK_NB, flock
from functools import lru_cache, partial
from hashlib import sha256
from io import FileIO
from itertools import count
from logging import getLogger
from pathlib import Path
from queue import Queue
from threading import Lock, Thread
from typing import TYPE_CHECKING, NamedTuple, Protocol
from uuid import uuid4

from pyllama_raw.core.memory.slot_states import SLOT_SAVE, plan_copy, plan_fill
from pyllama_raw.core.memory.slots import Contents
from pyllama_raw.core.request import Adapted, Spans
from pyllama_raw.core.step import (
    DecodeStatus,
    Fetched,
    Saved,
    StepPlan,
    StepResult,
    Written,
)
from pyllama_raw.errors import InvalidRequest, SnapshotFailed
from pyllama_raw.native.libllama import new_bytes

if TYPE_CHECKING:
    from pyllama_raw.core.scheduling.scheduler import Scheduler
    from pyllama_raw.core.step import Executor

ENTRY_BYTES = 4096  # a file counts as so many more, for its row in the index
INDEX_BYTES = 2**16  # of an index of few rows, and of its journal
TOKEN_BYTES = array("i").itemsize
SLICE_BYTES = 2**18
PART_TOKENS = 128
_COUNT, _ENTRY = struct.Struct("<I"), struct.Struct("<QI")
_SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

State = memoryview
Pause = Callable[[float], None]


def no_pause(_worked_s: float) -> None:
    """Work on at once."""


def slices(state: State, pause: Pause) -> Iterator[State]:
    """
    Parts of *state*, to be worked on one by one, for half a millisecond or so each.

    Args:
        pause: called after each, with the seconds that a CPU worked for it.
    """
    for start in range(0, len(state), SLICE_BYTES):
        worked_s = time.thread_time()
        yield state[start : start + SLICE_BYTES]
        pause(time.thread_time() - worked_s)


class BadFile(Exception):
    """The file is not what it should be; never leaves the engine."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A complete file, as it was when it was written or found."""

    path: Path
    state_at: int  # behind the tokens
    n_bytes: int
    key: bytes
    digest: bytes  # of key and state

    @property
    def counted_bytes(self) -> int:
        """Bytes that it takes of the limit."""
        return self.n_bytes + ENTRY_BYTES


def make_key(fingerprint: str, namespace: str | Adapted | None, tokens: bytes) -> bytes:
    """Key of what a state is of."""
    facts = [fingerprint, namespace, sha256(tokens).hexdigest()]
    return json.dumps(facts).encode()


def namespace_of(label: bytes) -> str | Adapted | None:
    """Namespace that json.dumps() made *label* of; JSON has no tuples. Raises ValueError."""
    match json.loads(label):
        # Prefixes that were computed with adapters.
        case [str(digest), None | str() as salt]:
            return Adapted(digest, salt)
        # Those without, of a salt or of nobody.
        case None | str() as salt:
            return salt
    raise ValueError("no namespace")


def digest_of(key: bytes, state: State, pause: Pause) -> bytes:
    """Takes about a second for 1.5 GB without *pause*."""
    digest = sha256(key)
    for part in slices(state, pause):
        digest.update(part)
    return digest.digest()


def write_file(path: Path, tokens: bytes, state: State, pause: Pause) -> None:
    """
    Write a new file that only its owner may read, and sync it.

    Raises:
        OSError: no file is left.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFELY
    try:
        with os.fdopen(os.open(path, flags, 0o600), "wb") as stream:
            with suppress(OSError):  # not every file system has locks
                flock(stream, LOCK_EX | LOCK_NB)
            # Tokens first, so that a look at them reads no state.
            stream.write(tokens)
            for data in slices(state, pause):
                stream.write(data)
            stream.flush()
            # Only then is the row written that makes the file count.
            os.fsync(stream.fileno())
    except OSError:
        path.unlink(missing_ok=True)
        raise


def read_state(file: StoredFile, pause: Pause) -> State:
    """
    Read what follows the tokens, to the end of *file*.

    Raises:
        BadFile: it is not what was written.
    """
    with opened(file.path, file.n_bytes) as stream:
        stream.seek(file.state_at)
        state, digest = new_bytes(file.n_bytes - file.state_at), sha256(file.key)
        for part in slices(state, pause):
            # Somebody has cut it off since it was opened.
            if stream.readinto(part) != len(part):
                raise BadFile("a wrong size")
            digest.update(part)
    if digest.digest() != file.digest:
        raise BadFile("a damaged state")
    return state


def opened(path: Path, n_bytes: int) -> FileIO:
    """
    The file at *path*; a pipe is not waited for, and no link is followed.

    Raises:
        BadFile: it has not *n_bytes*.
    """
    stream = _reading(path)
    if os.fstat(stream.fileno()).st_size != n_bytes:
        stream.close()
        raise BadFile("a wrong size")
    return stream


def _reading(path: Path) -> FileIO:
    """The file at *path*; a folder leaves no descriptor behind. Raises OSError."""
    return FileIO(path, opener=lambda name, flags: os.open(name, flags | _SAFELY))


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class FileState:
    """A state that was read from a file."""

    data: State

    @property
    def nbytes(self) -> int:
        """Host memory that it takes."""
        return self.data.nbytes


def head_bytes(n_parts: int) -> int:
    """Bytes in front of the parts."""
    return _COUNT.size + n_parts * _ENTRY.size


def n_parts_of(n_tokens: int) -> int:
    """Parts of a state of *n_tokens*."""
    return -(-n_tokens // PART_TOKENS)


def make_head(sizes: Sequence[tuple[int, int]]) -> bytes:
    """Head of a file with parts of so many bytes and tokens each."""
    return _COUNT.pack(len(sizes)) + b"".join(_ENTRY.pack(*size) for size in sizes)


def parts_of(data: State) -> list[tuple[int, int, State]]:
    """
    The parts of *data*, which anybody may have written: start and stop of positions, and their
    state, which is empty if no row has these.

    Raises:
        SnapshotFailed: it is no state in parts.
    """
    try:
        (count,) = _COUNT.unpack_from(data)
        # The count may be anything, so slices are checked by what is there.
        at = head_bytes(count)
        sizes = list(_ENTRY.iter_unpack(data[_COUNT.size : at]))
    except struct.error as error:
        raise SnapshotFailed("parts_of", 0, str(error)) from error
    parts: list[tuple[int, int, State]] = []
    n_tokens = 0
    for n_bytes, n_more in sizes:
        parts.append((n_tokens, n_tokens + n_more, data[at : at + n_bytes]))
        at, n_tokens = at + n_bytes, n_tokens + n_more
    # Parts fill the file exactly.
    if at != len(data) or len(parts) != count:
        raise SnapshotFailed("parts_of", 0, "a state of another size")
    return parts


# -- files of slots --------------------------------------------------------------------------

# A file that a caller names has all in it: a line of JSON that says what it is of and has the digest,
# then tokens and state.
MAGIC = b"pyllama_raw slot 1\n"
MAX_LINE = 2**12
PART = re.compile(r"\.[0-9a-f]{32}\.part")  # the name of one that is not whole
YOUNG_S = 60.0
ANOTHER = (
    "a file of a slot of this model, with these options and this library, that is whole"
)


def write_slot(path: Path, name: str, contents: Contents, state: State) -> int:
    """
    Write a state to the file at *path*, in place of what is there; the bytes of it.

    Args:
        name: of states of this model.

    Raises:
        OSError: what was there is there.
    """
    tokens = contents.tokens.tobytes()
    label, n_tokens = contents.namespace, len(contents.tokens)
    assert label is None or isinstance(label, str)
    digest = digest_of(make_key(name, label, tokens), state, no_pause).hex()
    facts = [name, label, n_tokens, contents.n_prompt, digest]
    head = MAGIC + json.dumps(facts).encode() + b"\n"
    # A rename would put a file in the place of a device, for all programs of the machine.
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(EINVAL, "what is there is no file")
    sweep_parts(path.parent)
    part = path.with_name(f".{uuid4().hex}.part")
    try:
        write_file(part, head + tokens, state, no_pause)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    return len(head) + len(tokens) + len(state)


def sweep_parts(folder: Path) -> None:
    """Remove what processes that were killed have left of files of slots."""
    names: list[str] = []
    with suppress(OSError):
        names = [name for name in os.listdir(folder) if PART.fullmatch(name)]  # noqa: PTH208
    for name in names:
        path = folder / name
        # A lock says that somebody writes it, and a young one has perhaps none yet.
        with suppress(OSError):
            if time.time() - path.lstat().st_mtime > YOUNG_S:
                with FileIO(os.open(path, os.O_RDONLY | _SAFELY)) as stream:
                    flock(stream, LOCK_EX | LOCK_NB)
                    path.unlink()


class SlotLimits(NamedTuple):
    """What a slot may hold at most, so that a file of any size takes no more memory than that."""

    n_vocab: int
    n_tokens: int
    bound: Callable[[int], int]  # no state of so many tokens is larger


def limits_of(scheduler: Scheduler, n_vocab: int) -> SlotLimits:
    """The limits of slots. Thread: the engine's."""
    bound = scheduler.memory.tiers.host.bound
    return SlotLimits(n_vocab, scheduler.limits.n_ctx_slot, bound)


def read_slot(
    path: Path, name: str, slot: int, limits: SlotLimits
) -> tuple[Contents, State, int]:
    """
    The contents of *slot* in the file at *path*, which anybody may have written, and its bytes.

    Raises:
        BadFile: it is another one, or damaged.
        OSError: it cannot be read.
    """
    with _reading(path) as stream:
        n_bytes = os.fstat(stream.fileno()).st_size
        if stream.read(len(MAGIC)) != MAGIC:
            raise BadFile("another kind")
        line, newline, _ = (stream.read(MAX_LINE) or b"").partition(b"\n")
        try:
            own_name, label, n_tokens, n_prompt, digest = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            raise BadFile("no head") from None
        is_own = newline and own_name == name and (label is None or type(label) is str)
        if not is_own or type(n_tokens) is not int or type(n_prompt) is not int:
            raise BadFile("another model")
        at = len(MAGIC) + len(line) + 1
        n_state = n_bytes - at - n_tokens * TOKEN_BYTES
        if not 1 <= n_tokens <= limits.n_tokens or not 0 <= n_prompt <= n_tokens:
            raise BadFile("a wrong number of tokens")
        if not 1 <= n_state <= limits.bound(n_tokens):
            raise BadFile("a wrong size")
        stream.seek(at)
        tokens, state = new_bytes(n_tokens * TOKEN_BYTES), new_bytes(n_state)
        for part in (tokens, state):
            for data in slices(part, no_pause):
                if stream.readinto(data) != len(data):
                    raise BadFile("a wrong size")
    key = make_key(name, label, tokens.tobytes())
    ids = array("i", tokens.tobytes())
    if digest_of(key, state, no_pause).hex() != digest or not all(
        0 <= token < limits.n_vocab for token in ids
    ):
        raise BadFile("a damaged state")
    return Contents(slot, label, ids, (), n_prompt), state, n_bytes


def copied(
    scheduler: Scheduler, executor: Executor, slot: int
) -> tuple[Contents, State]:
    """
    A copy of what a slot holds. Thread: the engine's.

    Raises:
        InvalidRequest: it has nothing that others may have.
        SnapshotFailed: it could not be copied.
    """
    plan = plan_copy(scheduler.memory, slot)
    contents = None if plan is None else plan[0]
    if plan is None or contents is None or not _is_for_all(contents.namespace):
        allowed = "a slot that holds text and runs no request"
        raise InvalidRequest("slot", slot, f"{allowed}; the rest is not saved")
    result = _done(scheduler, executor, plan[1])
    if SLOT_SAVE not in result.saved:
        raise SnapshotFailed("llama_state_seq_get_data", 0, "the slot was not copied")
    state = result.saved[SLOT_SAVE].payload
    assert isinstance(state, memoryview)
    return contents, state


def fill(
    scheduler: Scheduler, executor: Executor, contents: Contents, state: State
) -> None:
    """
    Have a slot hold *contents*. Thread: the engine's.

    Raises:
        InvalidRequest: a request runs in it, or others leave too few cells.
        SnapshotFailed: libllama does not take the state; the slot is empty.
    """
    plan = plan_fill(scheduler.memory, contents, state)
    if plan is None:
        allowed = (
            f"a slot without a request, with room for {len(contents.tokens)} tokens"
        )
        raise InvalidRequest("slot", contents.slot, f"{allowed}: try again later")
    if contents.slot in _done(scheduler, executor, plan).not_restored:
        _done(scheduler, executor, StepPlan(()))  # if it has spoilt the context
        raise SnapshotFailed("llama_state_seq_set_data", 0, "the state does not fit")


def _done(scheduler: Scheduler, executor: Executor, plan: StepPlan) -> StepResult:
    """The result of a *plan* without works, which the scheduler knows."""
    result = executor.execute(plan)
    scheduler.memory.settle(result)
    if result.status is not DecodeStatus.OK:  # there is another context, or none
        scheduler.lose_slots()
        raise result.error or SnapshotFailed(
            "llama_state_seq_get_data", 0, "the slot was not copied"
        )
    return result


def _is_for_all(namespace: object) -> bool:
    """Whether *namespace* means the same in another process: neither of adapters, nor private."""
    return namespace is None or isinstance(namespace, str)


# -- spans in files ---------------------------------------------------------------------------

MAX_KEYS = 2**16  # about 10 MB
KEY_BYTES = 32
_ROW = -1
_FACTS = 3  # start, stop, n_pos
_RECORD = _FACTS + KEY_BYTES // TOKEN_BYTES  # ints


class SpanKeys:
    """
    The numbers of one engine.

    Thread:
        Any.
    """

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        numbers = count(-1, -1)
        self._number = lru_cache(max_keys)(lambda _: next(numbers))
        self._lock = Lock()  # two threads with one new key get one number

    def number(self, key: bytes) -> int:
        """The number of *key*, below 0: equal only for equal keys."""
        with self._lock:
            return self._number(key)


def to_file(tokens: bytes, spans: Spans) -> bytes:
    """*tokens*, one C int each, as they are written; *spans* are whole in them."""
    if not spans:
        return tokens
    ints, records = array("i", tokens), array("i")
    for span in spans:
        assert len(span.key) == KEY_BYTES
        # Numbers of this engine mean nothing elsewhere.
        ints[span.start : span.stop] = _rows(_ROW, span.stop - span.start)
        records.extend((span.start, span.stop, span.n_pos))
        records.frombytes(span.key)
    return (ints + records + array("i", [-len(spans)])).tobytes()


def from_file(ints: array[int], keys: SpanKeys) -> array[int]:
    """
    Tokens that to_file() got, with the numbers of this engine; anybody may have written *ints*.

    Raises:
        BadFile: no tokens are written like that.
    """
    # Whatever stands there was written by anybody.
    n_spans = max(-ints[-1], 0)
    n_tokens = len(ints) - n_spans * _RECORD - bool(n_spans)
    if n_tokens < 1:
        raise BadFile("more spans than tokens")
    tokens, end, n_rows = ints[:n_tokens], 0, 0
    for at in range(n_tokens, n_tokens + n_spans * _RECORD, _RECORD):
        start, stop, n_pos = ints[at : at + _FACTS]
        # In order, apart, and within the tokens.
        if not (end <= start < stop <= n_tokens and 1 <= n_pos <= stop - start):
            raise BadFile("a span that is none")
        number = keys.number(ints[at + _FACTS : at + _RECORD].tobytes())
        tokens[start:stop] = _rows(number, stop - start)
        end, n_rows = stop, n_rows + stop - start
    # Every row belongs to a span, and no other token is below 0.
    if n_rows != sum(1 for token in ints[:n_tokens] if token == _ROW) or (
        n_rows != sum(1 for token in tokens if token < 0)
    ):
        raise BadFile("rows of no span")
    return tokens


def _rows(number: int, n_rows: int) -> array[int]:
    return array("i", [number]) * n_rows


Report = Callable[[Written | Fetched], None]

_log = getLogger(__name__)

REST_FACTOR = 16  # times as long as the work before it


class DiskWorker:
    """Does jobs in a thread of its own, from the first one on, until close()."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: Queue[Callable[[], None] | None] = Queue()
        self._thread: Thread | None = None

    def put(self, job: Callable[[], None]) -> None:
        """Have *job* done after those before; here and now if there is no thread."""
        if self._thread is None:
            # The first job starts the thread; most engines have no files.
            thread = Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has none to give
                self._do(job)
                return
            self._thread = thread
        self._jobs.put(job)

    def drain(self) -> None:
        """Wait until all is done."""
        self._jobs.join()

    def close(self) -> None:
        """Do what is left and end the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._do(job)
            finally:
                del job  # and the state that it may hold
                self._jobs.task_done()

    def _do(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception:  # noqa: BLE001 - the file is a miss, and the log says so
            _log.exception("a file of the cache directory is left out")


class StateStore(Protocol):
    """A directory of files: `DiskStore`, which needs SQLite, so most engines do not load it."""

    def write(
        self,
        namespace: str | Adapted | None,
        tokens: bytes,
        state: State,
        pause: Pause = ...,
    ) -> StoredFile | None: ...
    def read(self, file: StoredFile, pause: Pause = ...) -> State | None: ...
    def delete(self, file: StoredFile) -> None: ...
    def close(self) -> None: ...


class DiskWriter:
    """
    Reads from *store* and writes to it until close().

    Thread:
        The engine thread calls; `report` is called by it or by one of the workers.
    """

    def __init__(self, store: StateStore) -> None:
        self.report: Report = lambda _: None  # until somebody wants to know
        self.others_compute = False  # as of the latest step; set by the engine thread
        self._store = store
        self._writes = DiskWorker("pyllama-disk")
        self._reads = DiskWorker("pyllama-read")

    def write(
        self,
        save_id: int,
        namespace: str | Adapted | None,
        tokens: bytes,
        state: State,
        capture_s: float = 0.0,
    ) -> None:
        """
        Write *state*, which must not change any more, and report the file or None.

        Args:
            capture_s: what it took to capture, which the report repeats.
        """
        self._writes.put(
            partial(self._write, save_id, namespace, tokens, [state], capture_s)
        )

    def fetch(self, fetch_id: int, file: StoredFile) -> None:
        """Report the state in *file*, verified; None if it is gone or damaged."""
        self._reads.put(partial(self._fetch, fetch_id, file))

    def delete(self, files: Iterable[StoredFile]) -> None:
        """Delete *files* before anything is written that was not yet handed over."""
        for file in files:
            self._writes.put(partial(self._store.delete, file))

    def drain(self) -> None:
        """Wait until all is written and read."""
        self._writes.drain()
        self._reads.drain()

    def close(self) -> None:
        """Write what is left and end the threads."""
        self.others_compute = False
        self._reads.close()
        self._writes.close()
        self._store.close()

    def _write(
        self,
        save_id: int,
        namespace: str | Adapted | None,
        tokens: bytes,
        states: list[State],
        capture_s: float,
    ) -> None:
        """*states* holds one; it is taken out, so that it can be freed here."""
        saved, state = None, states.pop()
        try:
            # It rests after each slice, so that steps have the CPU.
            file = self._store.write(namespace, tokens, state, self._rest)
            if file is not None:
                saved = Saved(file, file.counted_bytes - len(tokens), capture_s)
        finally:
            del state  # before its room is given back
            self.report(Written(save_id, saved))

    def _fetch(self, fetch_id: int, file: StoredFile) -> None:
        started, payload = time.perf_counter(), None
        try:
            # A request waits in its slot for this.
            state = self._store.read(file, self._rest)
            payload = None if state is None else FileState(state)
        finally:
            took_s = time.perf_counter() - started
            self.report(Fetched(fetch_id, payload, took_s))

    def _rest(self, worked_s: float) -> None:
        # A sixteenth of a CPU delays steps by as much, at most.
        if self.others_compute:
            time.sleep(REST_FACTOR * worked_s)
