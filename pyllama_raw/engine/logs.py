"""
Logs of steps and requests: records, what keeps them in memory, and what writes them to files.

Rules:
1. A record has no text. `hash_ids` says which blocks of prompts are equal, so that the sharing of
   prefixes can be replayed.
2. Nobody waits for the disk. A file that cannot be written any more is told in the log of Python,
   and the engine goes on.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from fcntl import LOCK_EX, LOCK_NB, flock
from functools import cached_property
from hashlib import blake2b
from logging import getLogger
from pathlib import Path
from stat import S_ISREG
from threading import Event, Lock, Thread
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar

from pyllama_raw.core.request import Finished, Private, Request, Value
from pyllama_raw.core.stats import Occupancy
from pyllama_raw.core.step import (
    Copy,
    Decode,
    Load,
    Propose,
    Sampled,
    Save,
    StepPlan,
    StepResult,
    Verify,
)
from pyllama_raw.engine.watcher import StepRecord, Watcher
from pyllama_raw.errors import ConfigError, reason_of

if TYPE_CHECKING:
    from pyllama_raw.options.config import LogConfig

MAX_RECORDS = 2**14  # kept by default
MAX_WAITING = 2**16  # records that wait for the disk; then the oldest are lost
WRITE_S = 1.0  # between two looks at them
R = TypeVar("R", bound=NamedTuple)
_log = getLogger(__name__)
BLOCK = 16  # tokens of a hash_id
STREAMS = (Decode, Verify)  # works of them
ID_BYTES = 6  # every JSON reader keeps so many exactly
# As policy_data: a request that only warms an engine up. Logs have it, and what is fitted or
# replayed leaves it out.
WARM_UP: Mapping[str, Value] = MappingProxyType({"warm_up": True})


def write_records(path: Path, records: Iterable[NamedTuple]) -> None:
    """One JSON object a line."""
    with path.open("w") as file:
        file.writelines(map(line_of, records))


def line_of(record: NamedTuple) -> str:
    """*record* as a line of JSON."""
    return json.dumps(record._asdict()) + "\n"


def read_records(path: Path, make: Callable[..., R]) -> list[R]:
    """
    Read records that were written, as *make* makes them; lists become tuples.

    Raises:
        ValueError: a line is no record.
    """
    records = []
    with path.open() as file:
        for number, line in enumerate(file, 1):
            try:
                # A line may be from anybody: it becomes a record only if all fields fit.
                values = json.loads(line).items()
                records.append(make(**{name: _fixed(value) for name, value in values}))
            except (AttributeError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    return records


def _fixed(value: Any) -> Any:
    return tuple(map(_fixed, value)) if isinstance(value, list) else value


class RecordLog(Watcher, Generic[R]):
    """
    The last records of one driver, the oldest first. Any thread may read.

    Args:
        put: gets each record, too.
    """

    def __init__(
        self, max_records: int = MAX_RECORDS, put: Callable[[R], None] | None = None
    ) -> None:
        self._records: deque[R] = deque(maxlen=max_records)
        self._put = put

    def __iter__(self) -> Iterator[R]:
        return iter(tuple(self._records))

    def keep(self, record: R) -> None:
        """Keep *record* in place of the oldest."""
        self._records.append(record)
        if self._put is not None:
            self._put(record)


class RecordFile:
    """
    JSON lines that a thread writes while an engine runs.

    Nobody waits for the disk. A file that cannot be written any more is told in the log, and
    the engine goes on. A lock keeps others from writing to the same file.

    A file that is there is emptied only if it begins like records of the same kind: any other
    file may be all that somebody has of it, or be mapped as the model.
    """

    def __init__(self, path: Path, kind: type[NamedTuple]) -> None:
        """
        Args:
            kind: of the records.

        Raises:
            ConfigError: *path* cannot be written, is no file for this log, or another log
                writes to it.
        """
        self.n_lost = 0
        self._path = path
        self._waiting: deque[NamedTuple] = deque(maxlen=MAX_WAITING)
        self._closes = Event()
        try:
            file = _open_alone(path, f'{{"{kind._fields[0]}": '.encode())
        except BlockingIOError as error:
            raise ConfigError(
                f"{path} belongs to another log that is open: name another file"
            ) from error
        except (OSError, ValueError) as error:  # a ValueError: a NUL in the path
            reason = reason_of(error)
            raise ConfigError(f"{path} cannot be written: {reason}") from error
        self._thread = Thread(
            target=self._run, args=(file,), name="pyllama-log", daemon=True
        )
        self._thread.start()

    def put(self, record: NamedTuple) -> None:
        """Have *record* written soon. Thread: one."""
        # The disk is too slow: the oldest record is lost, and counted.
        self.n_lost += len(self._waiting) == MAX_WAITING
        self._waiting.append(record)

    def close(self) -> None:
        """Write the rest; can be repeated."""
        self._closes.set()
        self._thread.join()

    def _run(self, file: IO[str]) -> None:
        try:
            with file:
                is_last = False
                while not is_last:
                    # Once a second, and a last time at the end.
                    is_last = self._closes.wait(WRITE_S)
                    while self._waiting:  # each is gone once it is written
                        file.write(line_of(self._waiting.popleft()))
                    file.flush()
        except Exception as error:  # noqa: BLE001 - it is told in the log
            _log.error("%s is not written any more: %s", self._path, error)
        if self.n_lost:
            _log.error("%s lacks %d records", self._path, self.n_lost)


def _open_alone(path: Path, start: bytes) -> IO[str]:
    """
    An empty file at *path*, which its user alone may read, locked as long as it is open.

    Args:
        start: how every file begins that may be emptied.

    Raises:
        BlockingIOError: another one is open.
        ConfigError: there is something else.
    """
    # O_NONBLOCK: a pipe without a reader would keep the caller waiting.
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.fdopen(os.open(path, flags, 0o600), "a", encoding="utf-8")
    try:
        # Two logs in one file would be of use to nobody.
        flock(file, LOCK_EX | LOCK_NB)
        _check(file.fileno(), path, start)
        file.truncate(0)
    except BaseException:
        file.close()
        raise
    return file


def _check(file: int, path: Path, start: bytes) -> None:
    if not S_ISREG(os.fstat(file).st_mode):
        raise ConfigError(f"{path} is no regular file: name a file for the log")
    head = os.pread(file, len(start), 0)
    if head != start[: len(head)]:
        raise ConfigError(
            f"{path} has something else than such a log, it begins with {head!r}: "
            "name another file, or delete it"
        )


def warms_up(policy_data: Mapping[str, Value] | None) -> bool:
    """Whether the request that has *policy_data* does not count."""
    return policy_data is not None and policy_data.get("warm_up") is True


class RequestRecord(NamedTuple):
    """One request that has ended. Moments are on the engine clock, in seconds."""

    request_id: int
    submitted_s: float
    admitted_s: float | None  # got its first slot; None: never
    first_token_s: float | None
    finished_s: float
    why: str  # the finish reason, or the code of the error
    n_prompt: int
    n_output: int
    n_cached: int  # prompt tokens that were not computed
    cache_tier: str | None  # where these came from
    n_preempted: int
    max_tokens: int  # 0: texts become vectors
    priority: int
    deadline_s: float | None  # from its submission
    client: str | None
    policy_data: Mapping[str, Value] | None
    block: int  # prompt tokens of each of hash_ids but the last, which may have fewer
    # Equal ones: equal prompts from the start to here. Texts that become vectors have none.
    hash_ids: tuple[int, ...]

    @property
    def warms_up(self) -> bool:
        """Whether it only warmed the engine up, as its policy_data says."""
        return warms_up(self.policy_data)


def block_ids(request: Request, key: bytes) -> tuple[int, ...]:
    """
    A number for each block of the prompt of *request*.

    Two prompts have equal numbers as far as their blocks are equal from the start, and the
    same callers may use them. A *key* that is drawn once keeps texts from being guessed.
    """
    # Prefixes that cannot be shared have other numbers.
    namespace = request.namespace
    owner = request.request_id if isinstance(namespace, Private) else namespace
    hashed = blake2b(f"{owner!r}\0".encode(), key=key, digest_size=ID_BYTES)
    data, n_bytes = request.tokens.tobytes(), request.tokens.itemsize * BLOCK
    ids = []
    for start in range(0, len(data), n_bytes):
        # Each number stands for all blocks up to here.
        hashed.update(data[start : start + n_bytes])
        ids.append(int.from_bytes(hashed.digest()))
    return tuple(ids)


class RequestLog(RecordLog[RequestRecord]):
    """The last requests of one driver that have ended."""

    @cached_property
    def _key(self) -> bytes:
        return os.urandom(16)

    def ended(self, request: Request, end: Finished) -> None:
        """Make a record."""
        times, deadline = end.timings, request.deadline
        data = request.policy_data
        # Texts that become vectors and sources share no prefixes.
        shares = not request.lot.makes_vectors and request.source is None
        record = RequestRecord(
            request_id=end.request_id,
            submitted_s=times.submitted,
            admitted_s=times.admitted,
            first_token_s=times.first_token,
            finished_s=times.finished,
            why=end.why,
            n_prompt=end.n_prompt,
            n_output=end.n_output,
            n_cached=end.n_cached,
            cache_tier=None if end.cache_tier is None else str(end.cache_tier),
            n_preempted=end.n_preempted,
            max_tokens=request.max_tokens,
            priority=request.priority,
            deadline_s=None if deadline is None else deadline - times.submitted,
            client=request.client,
            policy_data=None if data is None else dict(data),
            block=BLOCK,
            hash_ids=block_ids(request, self._key) if shares else (),
        )
        self.keep(record)


class Size(NamedTuple):
    """Size of what a plan does."""

    n_prefill: int
    n_decode: int
    n_context: int
    n_saved: int
    n_loaded: int
    n_drafted: int = 0
    n_draft_model: int = 0


def size_of(plan: StepPlan) -> Size:
    """Size of what *plan* does."""
    n_prefill = n_decode = n_context = n_saved = n_loaded = n_drafted = (
        n_draft_model
    ) = 0
    for work in plan.works:
        # A draft model has no part in what the other one computes.
        if type(work) is Propose:
            n_draft_model += len(work.tokens) + max(work.n_drafts - 1, 0)
            continue
        # A stream looks at all that is before it.
        if type(work) is Decode:
            n_decode += 1
            n_context += work.pos + 1
        else:
            # Each token of a chunk looks at one more than the token before it.
            n_tokens = len(work.tokens)
            if type(work) is Verify:
                n_decode += 1
                n_drafted += n_tokens - 1
            else:
                n_prefill += n_tokens
            n_context += n_tokens * (2 * work.pos + n_tokens + 1) // 2
    for move in plan.moves:
        if type(move) is Save:
            n_saved += move.stop - move.start
        elif type(move) is Load:
            n_loaded += sum(piece.stop - piece.start for piece in move.pieces)
        elif type(move) is Copy:
            n_loaded += move.n_pos
    return Size(
        n_prefill, n_decode, n_context, n_saved, n_loaded, n_drafted, n_draft_model
    )


def step_fields(plan: StepPlan, result: StepResult, after: Occupancy) -> dict[str, Any]:
    """Fields of a StepRecord: what *plan* did, its *result*, and what was there *after* it."""
    size, n_accepted = size_of(plan), 0
    if size.n_drafted:
        n_accepted = sum(
            len(output.tokens) - 1
            for work, output in zip(plan.works, result.outputs, strict=False)
            if type(work) is Verify and type(output) is Sampled
        )
    return {
        **size._asdict(),
        **after._asdict(),
        "n_accepted": n_accepted,
        "decode_s": result.decode_s,
        "sample_s": result.sample_s,
        "restore_s": sum(result.restore_s.values()),
        "status": result.status.value,
        "decodes": tuple(
            [(w.request_id, w.slot) for w in plan.works if type(w) in STREAMS]
        ),
        "chunks": tuple(
            (w.request_id, w.slot, len(w.tokens))
            for w in plan.works
            if type(w) not in (*STREAMS, Propose)
        ),
    }


class StepLog(RecordLog[StepRecord]):
    """The last steps of one driver."""

    def stepped(self, step: StepRecord) -> None:
        """Keep the record."""
        self.keep(step)


class Logs:
    """Each None if nobody asked for it; *close_files* is called by the last one who closes."""

    def __init__(
        self,
        steps: StepLog | None = None,
        requests: RequestLog | None = None,
        close_files: Callable[[], None] = lambda: None,
    ) -> None:
        self.steps, self.requests, self._close_files = steps, requests, close_files
        self._n_users, self._lock = 1, Lock()

    @property
    def watchers(self) -> tuple[Watcher, ...]:
        """Logs that the driver tells of steps and requests."""
        return tuple(log for log in (self.steps, self.requests) if log is not None)

    def share(self) -> Self | None:
        """The same logs, for parts that go on with them and close them, too; None: too late."""
        with self._lock:
            is_open = self._n_users > 0
            self._n_users += is_open
        return self if is_open else None

    def close(self) -> None:
        """No step of one engine may follow; the last one writes what is to go to files."""
        with self._lock:
            self._n_users -= 1
            is_last = self._n_users <= 0
        if is_last:
            self._close_files()


NO_LOGS = Logs()


def open_logs(config: LogConfig) -> Logs:
    """
    The logs that *config* asks for.

    Raises:
        ConfigError: a file cannot be written.
    """
    with ExitStack() as resources:

        def put(path: str | Path | None, kind: type[NamedTuple]) -> Any:
            """Open a file, if one is asked for."""
            if path is None:
                return None
            file = RecordFile(Path(path), kind)
            resources.callback(file.close)
            return file.put

        put_step = put(config.step_log, StepRecord)
        put_request = put(config.request_log, RequestRecord)
        close_files = resources.pop_all().close
    keeps_steps = config.max_steps or put_step
    keeps_requests = config.max_requests or put_request
    return Logs(
        StepLog(config.max_steps, put_step) if keeps_steps else None,
        RequestLog(config.max_requests, put_request) if keeps_requests else None,
        close_files,
    )
