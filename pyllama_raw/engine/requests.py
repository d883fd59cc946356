"""
Requests of an engine, from the moment they are posted until they have ended.

Rules:
1. The thread of the caller makes the record of a request. Each operation on a dict is atomic, so
   any thread may look a record up, also while the engine thread is stuck.
2. A request counts, and pins its adapters, from `Door.enter()` to `Door.leave()`. So those that
   lie in the mailbox are bounded like those that wait. What was posted during a long step counts
   as what is in the queue.
3. A request that finds a slot free when it comes is never refused. The prompt of any other one
   counts in tokens until the request has had a slot. Which one gets the next slot is the policy's
   business, and nothing to these counts. Texts that become vectors need no slot: they count as a
   request, and not in tokens.
4. Requests whose images and sounds are being encoded are in the waiting room. The scheduler does
   not know them yet, so it never sees a span without rows. A request leaves the room for the
   scheduler in any case: also if it is to end there at once.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Protocol, TypeAlias

from pyllama_raw.core.encodes import RowNeed
from pyllama_raw.core.request import Finished, Request, SlotChange
from pyllama_raw.core.scheduling.roster import Deadlines
from pyllama_raw.core.stats import SchedulerStats
from pyllama_raw.engine.adapters import Adapters, KnownAdapter
from pyllama_raw.engine.logs import warms_up
from pyllama_raw.engine.mailbox import NOBODYS, Stream
from pyllama_raw.engine.watcher import Watcher
from pyllama_raw.errors import (
    InvalidRequest,
    PyllamaError,
    QueueFull,
)

Rows: TypeAlias = "array[float]"


class Cancellable(Protocol):
    """An encode that runs."""

    def cancel(self) -> None:
        """End it soon; safe to call too late."""


class Task(Protocol):
    """An image or a sound of a request."""

    @property
    def need(self) -> RowNeed:
        """Its key and its bytes."""

    def control(self) -> Cancellable:
        """For encode()."""

    def encode(self, control: Cancellable) -> Rows | None:
        """Its rows; None if it was cancelled. Takes long."""


@dataclass(slots=True, eq=False)
class RequestEncodes:
    """The encodes of a request, from enter() to leave()."""

    request_id: int
    tasks: Sequence[Task]
    error: PyllamaError | None = None  # of the first encode that failed
    seconds: float = 0.0


MAX_ENDS = 32  # requests that the pace is taken from


@dataclass(slots=True, eq=False)
class Ticket:
    """The tokens that an open request counts for."""

    n_tokens: int = 0  # of a prompt that waits; 0: it found a slot, or has had one
    is_open: bool = True


class Admission:
    """
    The counts of the requests of one engine that have not ended: rule 3.

    Not thread-safe: the door, which shares it between threads, has the lock.
    """

    def __init__(
        self, n_slots: int, max_waiting: int = 1024, max_waiting_tokens: int = 2**20
    ) -> None:
        self.n_slots = n_slots
        self.max_waiting = max_waiting
        self.max_waiting_tokens = max_waiting_tokens
        self.n_open = 0
        self.n_tokens = 0  # of prompts that wait

    @property
    def max_requests(self) -> int:
        """The most requests that an engine has at once."""
        return self.n_slots + self.max_waiting

    def enter(self, requests: Sequence[Request]) -> list[Ticket]:
        """
        Take on all *requests*, the outputs of one prompt, or none.

        Returns:
            A ticket for each.

        Raises:
            QueueFull: too much waits at present.
            InvalidRequest: there are more outputs than an idle engine takes.
        """
        # The first ones find slots free, so nothing of them counts in tokens.
        n_free = max(self.n_slots - self.n_open, 0)
        counts = [0] * len(requests)
        # The others wait. Texts that become vectors wait for no slot.
        if len(requests) > n_free:
            counts[n_free:] = [
                0 if request.lot.makes_vectors else request.n_prompt
                for request in requests[n_free:]
            ]
            self._check_room(requests, sum(counts))
        self.n_open += len(requests)
        self.n_tokens += sum(counts)
        return [Ticket(n_tokens) for n_tokens in counts]

    def seat(self, ticket: Ticket) -> None:
        """The request has got a slot; can be repeated."""
        self.n_tokens -= ticket.n_tokens
        ticket.n_tokens = 0

    def leave(self, ticket: Ticket) -> None:
        """The request has ended; can be repeated."""
        self.seat(ticket)
        self.n_open -= ticket.is_open
        ticket.is_open = False

    def _check_room(self, requests: Sequence[Request], n_tokens: int) -> None:
        # All are outputs of one prompt, so the first one tells how many could ever wait.
        n_prompt = requests[0].n_prompt
        n_fitting = self.max_waiting_tokens // n_prompt
        n_most = self.n_slots + min(self.max_waiting, n_fitting)
        if len(requests) > n_most:
            allowed = f"at most {n_most} outputs of a prompt of {n_prompt} tokens, "
            allowed += "or raise max_waiting or max_waiting_tokens"
            raise InvalidRequest("n", len(requests), allowed)
        # Others are open, so fewer than that may wait at present.
        n_waiting = self.n_open + len(requests) - self.n_slots
        if n_waiting > self.max_waiting:
            raise QueueFull("max_waiting", n_waiting, self.max_waiting)
        n_tokens += self.n_tokens
        if n_tokens > self.max_waiting_tokens:
            raise QueueFull("max_waiting_tokens", n_tokens, self.max_waiting_tokens)


@dataclass(slots=True, eq=False)
class OpenRequest:
    """
    A request that has not ended.

    The engine thread changes it; `Door` changes `ticket` and `adapters` under its lock.
    """

    request: Request
    submitted: float  # on the engine clock
    stream: Stream = NOBODYS  # where its events go
    context: Context = field(default_factory=copy_context)  # of the caller
    ticket: Ticket = field(default_factory=Ticket)
    adapters: tuple[KnownAdapter, ...] = ()  # that it has pinned
    waits_since: float | None = None  # for a slot; None: it has one
    encodes: RequestEncodes | None = None  # of its images and sounds


class OpenRequests(dict[int, OpenRequest]):
    """All that are open, by request_id."""

    def all(self) -> list[OpenRequest]:
        """Records of this moment. Thread: any."""
        return list(self.values())

    def of_stream(self, stream: Stream) -> list[OpenRequest]:
        """The outputs of one prompt. Thread: any."""
        return [record for record in self.all() if record.stream is stream]

    def warms_up(self, request_id: int) -> bool:
        """Whether a request only warms the engine up."""
        record = self.get(request_id)
        return record is not None and warms_up(record.request.policy_data)

    @property
    def oldest(self) -> float | None:
        """Moment at which the oldest one came; None: there is none."""
        return min((record.submitted for record in self.all()), default=None)

    @property
    def oldest_wait(self) -> float | None:
        """Since when the one waits that has waited longest for a slot."""
        waits = [record.waits_since for record in self.all()]
        return min((since for since in waits if since is not None), default=None)


class Door(Watcher):
    """
    Counts requests when they come in, and once when they go out, and makes their records.

    Args:
        admission: not touched by anybody else.
    """

    def __init__(self, admission: Admission, adapters: Adapters) -> None:
        self.records = OpenRequests()
        self._admission = admission
        self._adapters = adapters
        self._lock = Lock()  # no other one is taken while it is held

    def enter(
        self, requests: tuple[Request, ...], stream: Stream, now: float
    ) -> tuple[OpenRequest, ...]:
        """
        Open all *requests*, or none of them. Thread: their caller's.

        Raises QueueFull, InvalidRequest, AdapterNotFound.
        """
        context = copy_context()
        pinned: list[tuple[KnownAdapter, ...]] = [()] * len(requests)
        # First, because an adapter must not go while the request waits for the lock.
        if any(request.lot.adapters for request in requests):
            pinned = self._adapters.pin(requests)
        try:
            with self._lock:
                # All of them count, or none does.
                tickets = self._admission.enter(requests)
                records = tuple(
                    OpenRequest(request, now, stream, context, ticket, adapters, now)
                    for request, ticket, adapters in zip(
                        requests, tickets, pinned, strict=True
                    )
                )
                self.records.update((r.request.request_id, r) for r in records)
        except PyllamaError:
            # There is no room for them, so nothing of them is left.
            for adapters in pinned:
                self._adapters.unpin(adapters)
            raise
        return records

    def changed(self, change: SlotChange, request_id: int, now: float) -> None:
        """A request that loses its slot waits anew, and counts no second time."""
        record = self.records.get(request_id)
        if record is None:
            return
        # A slot, or a wait that begins anew.
        record.waits_since = None if change == "running" else now
        # Its prompt no longer counts as waiting, also if it waits again.
        if record.ticket.n_tokens:
            with self._lock:
                self._admission.seat(record.ticket)

    def leave(self, record: OpenRequest) -> None:
        """A request has ended, or was refused; can be repeated. Thread: any."""
        with self._lock:
            self._admission.leave(record.ticket)
            # Once, although several may say that it has ended.
            adapters, record.adapters = record.adapters, ()
            self.records.pop(record.request.request_id, None)
        if adapters:
            self._adapters.unpin(adapters)

    def take_streams(self) -> set[Stream]:
        """The streams of all that are open, which are forgotten. Thread: any, several."""
        with self._lock:
            streams = {record.stream for record in self.records.all()}
            self.records.clear()
        return streams


class WaitingRoom:
    """Requests that wait for rows of images and sounds. The engine thread owns it."""

    def __init__(self) -> None:
        self.waiting: list[OpenRequest] = []  # others read it
        self._deadlines = Deadlines()

    def put(self, records: Iterable[OpenRequest]) -> None:
        """Keep *records*."""
        for record in records:
            self.waiting.append(record)
            self._deadlines.add(record.request, record.submitted)

    def take(self, request_id: int) -> OpenRequest | None:
        """Take a request out; None: it is not here."""
        for index, record in enumerate(self.waiting):
            if record.request.request_id == request_id:
                return self.waiting.pop(index)
        return None

    @property
    def next_deadline(self) -> float | None:
        """The earliest moment at which time may be over for a request that waits here."""
        return self._deadlines.next(
            {record.request.request_id for record in self.waiting}
        )

    def expired(self, now: float) -> Iterator[int]:
        """Ids of requests whose time may be over at *now*; some may have left."""
        return self._deadlines.expired(now)

    def counted(self, stats: SchedulerStats) -> SchedulerStats:
        """*stats* of the scheduler, with the requests that wait here."""
        n_tokens = sum(record.request.n_prompt for record in self.waiting)
        return replace(
            stats,
            submitted=stats.submitted + len(self.waiting),
            waiting=stats.waiting + len(self.waiting),
            waiting_tokens=stats.waiting_tokens + n_tokens,
        )


class Pace(Watcher):
    """How soon the queue is empty, by how long the last requests had one of *n_slots*."""

    def __init__(self, records: OpenRequests, n_slots: int) -> None:
        self._records, self._n_slots = records, n_slots
        self._held_s: deque[float] = deque(maxlen=MAX_ENDS)

    def ended(self, request: Request, end: Finished) -> None:  # noqa: ARG002
        """Note one that had a slot."""
        if end.timings.admitted is not None:
            self._held_s.append(end.timings.finished - end.timings.admitted)

    @property
    def queue_s(self) -> float | None:
        """
        Seconds until a request that comes now has a slot, as an estimate.

        It is 0 while a slot is free, and None before any request has ended.
        """
        n_open = len(self._records)
        # A slot is free.
        if n_open < self._n_slots:
            return 0.0
        held_s = tuple(self._held_s)
        # Nobody has ended yet, so nobody knows.
        if not held_s:
            return None
        n_waiting = sum(
            record.waits_since is not None for record in self._records.all()
        )
        n_running = max(n_open - n_waiting, 1)  # fewer than slots if cells are scarce
        return (n_waiting + 1) * sum(held_s) / len(held_s) / n_running
