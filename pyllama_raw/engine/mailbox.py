"""
Between threads: commands to the engine thread, events of requests for readers, aborts of steps,
and workers.

Commands are functions, in the order they were posted. The threads that engines run in must not wait
for an engine. Hooks of policies, watchers and step logs run there. What they wait for comes when
they have returned, or when another such thread has.

Events: the engine thread appends and never waits; `deque.append` is atomic. The reader's event
loop is woken once a step for all its streams. A slow reader finds everything that
happened since in one piece, unless an output that outgrows its slot is not read at all.
To wake a loop is a system call, in which the engine thread gives the GIL away. Usually the
next step is being computed meanwhile (ARCHITECTURE.md, Steps ahead).

Aborts: a step is aborted only if nobody wants what it computes. The flag is set only while a
step is published, and one lock covers both, so no stop reaches a step it was not meant for.

Workers do what takes too long for an event loop. Each kind of work has a few threads of its own. No
kind therefore waits for another one, or for other work that the program runs in threads. Within a
kind clients take turns, because one that sends many costly schemas must not delay all others. The
threads are few because threads that compute in Python take turns of 5 ms, and an event loop waits
for one turn of each. All start with the engine. A thread that is started for a request may lack
memory, and an event loop that starts one which dies at once waits for it for ever.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from threading import Lock, RLock, Thread, current_thread
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast

import anyio
from anyio.lowlevel import checkpoint_if_cancelled, current_token

from pyllama_raw.errors import ClosedError, PyllamaError, WrongUse
from pyllama_raw.options.arguments import SENDER

if TYPE_CHECKING:
    from pyllama_raw.core.request import Event
    from pyllama_raw.core.step import Work


LINGER_S = 5e-4  # silence that ends a burst
BURST_S = 1e-2  # longest wait for its end

Command = Callable[[], object]

# Set in an errand that takes long, once nobody waits for its answer any more.
CALLER_LEFT: ContextVar[threading.Event | None] = ContextVar(
    "CALLER_LEFT", default=None
)


class OwnThread(Thread):
    """Runs an engine."""


def check_may_wait() -> None:
    """Raise WrongUse in the thread of an engine."""
    if isinstance(current_thread(), OwnThread):
        raise WrongUse(
            "a hook, a watcher or a step log called an engine, which would wait for its "
            "return for ever: let another thread call"
        )


@dataclass(frozen=True, slots=True)
class Errand:
    """A function whose answer somebody waits for."""

    function: Callable[[], Any]
    answer: Future[Any] = field(default_factory=Future)

    def __call__(self) -> None:
        """Run the function, unless whoever asked has left."""
        if not self.answer.set_running_or_notify_cancel():
            return
        try:
            result = self.function()
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            self.answer.set_exception(error)
        else:
            self.answer.set_result(result)

    def refuse(self, error: BaseException) -> None:
        """Answer by *error*, unless there is an answer or nobody waits for it."""
        if not self.answer.done() and self.answer.set_running_or_notify_cancel():
            self.answer.set_exception(error)


class Mailbox:
    """
    Many writers, one reader.

    post() may interrupt itself, so finalisers can post, whatever they interrupted.

    A lock is the bell, because `SimpleQueue.get(timeout=...)` of CPython can wait for ever: it
    does if its time is over before the wait begins, as in a thread that lost its CPU.

    Args:
        n_enough: a burst of that many commands is not waited for any longer.
        clock: says when a burst has been waited for long enough.
    """

    def __init__(self, n_enough: int, clock: Callable[[], float]) -> None:
        self._n_enough = n_enough
        self._clock = clock
        self._posted: deque[Command] = deque()
        self._current: deque[Command] = deque()
        self._bell = Lock()  # free: it has rung since the reader last heard it
        self._coming = set[object]()  # one operation on a set cannot be interrupted

    def post(self, command: Command) -> None:
        try:
            self._posted.append(command)
        finally:  # an interrupt after the one is followed by the other
            try:  # noqa: SIM105 - suppress() could be interrupted before
                self._bell.release()
            except RuntimeError:  # it has rung, and the reader will look
                pass

    @contextmanager
    def coming(self) -> Iterator[None]:
        """While a command is being prepared, a burst does not end."""
        ticket = object()
        self._coming.add(ticket)
        try:
            yield
        finally:
            self._coming.discard(ticket)

    def take(self, timeout_s: float | None = 0.0) -> deque[Command]:
        """
        All commands there are; waits for the first one (None: for ever).

        One that had to be waited for is often the first of a burst, of which a step
        that began at once would get one request: so the others are waited for, too.

        Returns:
            Always the same deque. The reader removes a command once it is obeyed, so
            those it does not come to are found by rest().
        """
        if timeout_s != 0.0:
            wait_s = -1 if timeout_s is None else timeout_s  # -1: a lock waits for ever
            while not self._posted:  # the bell may have rung for what was taken
                if not self._bell.acquire(timeout=wait_s):
                    break
            # The engine was idle, and the first command may be the first of many: until nothing
            # comes for a while, and nobody prepares a request.
            end = self._clock() + BURST_S
            while 0 < len(self._posted) < self._n_enough and self._clock() < end:
                if not (self._bell.acquire(timeout=LINGER_S) or self._coming):
                    break
        for _ in range(len(self._posted)):
            self._current.append(self._posted.popleft())
        return self._current

    def rest(self) -> Iterator[Command]:
        """Remove what was not obeyed, when the reader is gone. Thread: any, several."""
        for commands in (self._current, self._posted):
            with suppress(IndexError):
                while True:
                    yield commands.popleft()


@dataclass(frozen=True, slots=True)
class Refused:
    """The last event of a request that never reached the scheduler, or lost it."""

    error: PyllamaError


class Stream:
    """A buffer with one writer, the engine thread, and one reader, a task of `loop`."""

    __slots__ = ("_arrival", "eager", "events", "loop", "max_events")

    def __init__(self, loop: object = None) -> None:
        self.loop = loop or current_token().native_token
        self.eager = True  # False: the reader wants to be woken at the end only
        self.events: deque[Event | Refused] = deque()
        self.max_events = sys.maxsize  # that may be unread
        self._arrival: anyio.Event | asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """
        Return when there are events; a checkpoint in any case.

        Raises:
            WrongUse: another event loop runs this task. notify() could not wake it, and the
                attempt would end a loop of trio.
        """
        if self.events:
            await checkpoint_if_cancelled()
        while not self.events:
            here: object = None
            with suppress(RuntimeError):  # a loop of another kind runs here
                if isinstance(self.loop, asyncio.AbstractEventLoop):
                    here = asyncio.get_running_loop()
                else:
                    here = current_token().native_token
            if here is not self.loop:
                raise WrongUse(
                    "this was begun in another event loop: begin and read it in one, and hand "
                    "on what it reads"
                )
            if isinstance(self.loop, asyncio.AbstractEventLoop):
                # What an anyio.Event would wait for, in half the time.
                self._arrival = self.loop.create_future()
                await self._arrival
            else:
                self._arrival = anyio.Event()
                await self._arrival.wait()

    def notify(self) -> None:
        """Wake the reader. Thread: the event loop's only."""
        arrival = self._arrival
        # trio.
        if isinstance(arrival, anyio.Event):
            arrival.set()
        elif arrival is not None and not arrival.done():
            arrival.set_result(None)


def wake(loop: Any, streams: Iterable[Stream]) -> bool:
    """
    Notify *streams* inside *loop*; False if that loop is closed.

    Args:
        loop: an asyncio event loop or a TrioToken.
        streams: all of that loop that have new events; must not change afterwards.
    """
    # asyncio, or trio.
    post = getattr(loop, "call_soon_threadsafe", None) or loop.run_sync_soon
    try:
        post(_notify, streams)
    except Exception:  # noqa: BLE001 - RuntimeError if it is closed; others await theirs
        return False
    return True


def _notify(streams: Iterable[Stream]) -> None:
    for stream in streams:
        stream.notify()


class _Nobody:
    """The event loop of a stream that no task reads."""

    def call_soon_threadsafe(self, *_: object) -> None:
        """There is nobody to wake."""


NOBODYS = Stream(_Nobody())
NOBODYS.events = deque(maxlen=0)  # what comes is dropped


class PolledFlag(Protocol):
    """A flag that a running llama_decode polls."""

    def set(self) -> None:
        """Ask the running decode to stop."""

    def clear(self) -> None:
        """Let decodes run."""


class AbortGate:
    """Decides from any thread whether the step that runs now has to stop."""

    def __init__(self) -> None:
        self._flag: PolledFlag | None = None  # of the running step, or the last one
        self._is_set = False
        self._lock = RLock()  # a finaliser can stop all where the lock is held
        self._running: Items[Work] = ()  # what the running step computes
        self._unwanted: set[int] = set()  # that the scheduler may not know of yet
        self._stops_all = False

    def enter(self, works: Items[Work], flag: PolledFlag) -> None:
        """A step begins that computes *works* and polls *flag*. Thread: the engine's."""
        with self._lock:
            self._flag, self._running = flag, works  # stop() can come in between
            self._stop_if_unwanted()

    def leave(self) -> None:
        """The step is over. Thread: the engine's."""
        with self._lock:
            self._running = ()
            self._unwanted.clear()
        if self._is_set:  # nobody sets it between steps
            assert self._flag is not None
            self._flag.clear()
            self._is_set = False

    def stop(self, request_id: int | None = None) -> None:
        """See `Executor.stop`. Thread: any."""
        with self._lock:
            if request_id is None:
                self._stops_all = True
            else:
                self._unwanted.add(request_id)
            self._stop_if_unwanted()

    def _stop_if_unwanted(self) -> None:
        """Costs next to nothing unless somebody has left."""
        # Nearly always.
        if not self._running or not (self._stops_all or self._unwanted):
            return
        assert self._flag is not None
        gone = self._unwanted
        if self._stops_all or all(work.request_id in gone for work in self._running):
            self._flag.set()
            self._is_set = True


T = TypeVar("T")

Kind = Literal["chat", "template", "text", "media", "rules", "adapters", "embedder"]
N_THREADS: dict[Kind, int] = {
    "chat": 4,  # two wait for a template's process, two make tokens of what it wrote
    "template": 2,  # chats with a template of their own, which is a stranger's program
    "text": 2,  # long prompts: the tokenizer
    "media": 2,  # lists with images and sounds: how many rows these take
    "rules": 2,  # grammars, schemas, stop strings, many tokens
    "adapters": 1,  # files that are read, checked and loaded
    "embedder": 1,  # opened once, and closed
}
JOIN_S = 0.1  # an idle thread ends much sooner


class ErrandQueue:
    """
    Errands that wait for a thread; clients take turns, and those of one come in their order.

    put() and end() take no lock, so finalisers may call them, whatever they interrupt.
    """

    def __init__(self) -> None:
        self._posted: deque[tuple[str | None, Errand]] = deque()
        self._bell = SimpleQueue[
            bool
        ]()  # rings once an errand; False: a thread is to end
        self._lock = Lock()  # of the threads that take errands
        self._waiting = OrderedDict[
            str | None, deque[Errand]
        ]()  # the next client first
        self._refusal: BaseException | None = None

    def put(self, client: str | None, errand: Errand) -> None:
        """Let *errand* wait, behind those of the same *client*; None is a client, too."""
        self._posted.append((client, errand))
        self._bell.put(True)

    def work(self, busy: set[Thread]) -> None:
        """Run errands, until end(); the calling thread is in *busy* meanwhile."""
        while self._bell.get():
            errand = self._next()
            if errand is None:  # end() has answered it
                continue
            busy.add(current_thread())
            if self._refusal is None:
                errand()
            else:
                errand.refuse(self._refusal)
            del errand  # its error or its prompt would stay until the next one
            busy.discard(current_thread())

    def end(self, n_threads: int, refusal: BaseException) -> None:
        """Answer what waits by *refusal*, and end that many threads."""
        self._refusal = refusal
        # A thread may be moving an errand meanwhile; it refuses that one itself.
        with suppress(IndexError):
            while True:
                self._posted.popleft()[1].refuse(refusal)
        for errands in [*self._waiting.values()]:
            with suppress(IndexError):
                while True:
                    errands.popleft().refuse(refusal)
        for _ in range(n_threads):
            self._bell.put(False)

    def _next(self) -> Errand | None:
        with self._lock:
            # What was posted, by clients; end() may take any of it meanwhile.
            with suppress(IndexError):
                while True:
                    client, errand = self._posted.popleft()
                    self._waiting.setdefault(client, deque()).append(errand)
            while self._waiting:
                client, errands = self._waiting.popitem(last=False)
                with suppress(IndexError):
                    errand = errands.popleft()
                    # This client had its turn.
                    if errands:
                        self._waiting[client] = errands
                    return errand
        return None


class Workers:
    """Runs functions; any event loop may ask. close() ends the threads."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._closed = False
        self._busy = set[Thread]()  # one operation on a set cannot be interrupted
        self._queues: dict[Kind, ErrandQueue] = {k: ErrandQueue() for k in N_THREADS}
        self._threads = [
            Thread(
                target=self._queues[kind].work,
                args=(self._busy,),
                name=f"pyllama-{kind}",
                daemon=True,
            )
            for kind, n_threads in N_THREADS.items()
            for _ in range(n_threads)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self.close()
            raise

    async def run(
        self, kind: Kind, function: Callable[[], T], client: str | None = None
    ) -> T:
        """
        Run *function* in a worker; return what it returns.

        A caller that is cancelled leaves at once. A function that has begun goes on alone,
        and finds CALLER_LEFT set.

        Args:
            client: whose turn it takes. None: that of SENDER.

        Raises:
            ClosedError: the threads have ended, or are about to.
        """
        if self._pid != os.getpid():
            raise ClosedError(
                "the engine belongs to the parent process: open one after the fork"
            )
        left, context = threading.Event(), copy_context()
        context.run(CALLER_LEFT.set, left)
        job = Errand(partial(context.run, function))
        self._queues[kind].put(client or SENDER.get(), job)
        if self._closed and job.answer.cancel():
            raise ClosedError("the engine is closed")
        try:
            return await answer_of(job.answer)
        finally:
            left.set()

    def close(self) -> None:
        """
        Drop what waits and end the threads; those that compute end when they are done.

        Nothing is waited for, and no lock is taken, so finalisers may call.
        """
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        for kind, queue in self._queues.items():
            queue.end(N_THREADS[kind], ClosedError("the engine is closed"))

    def join(self) -> None:
        """Wait until the threads that have nothing to do are gone, after close()."""
        if self._pid != os.getpid():
            return
        for thread in self._threads:
            if thread not in self._busy:
                thread.join(JOIN_S)


async def answer_of(answer: Future[T]) -> T:
    """Return the answer of another thread, and block none; cancel what can be cancelled."""
    try:
        await arrival_of(answer)
        return answer.result()
    finally:
        answer.cancel()
        del answer  # an error knows this frame


async def arrival_of(answer: Future[Any]) -> None:
    """Return when *answer* is there; a checkpoint in any case."""
    stream = Stream()

    def come(_: Future[Any]) -> None:
        # The answer itself would be in a circle, so a large one stayed until the collector ran.
        cast("deque[Any]", stream.events).append(None)
        wake(stream.loop, (stream,))

    answer.add_done_callback(come)
    await stream.wait()
