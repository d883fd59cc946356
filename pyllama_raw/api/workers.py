"""
Worker threads of an engine, for what takes too long for an event loop.

Each kind of work has a few threads of its own. No kind therefore waits for another one, or
for other work that the program runs in threads. The threads are few because threads that
compute in Python take turns of 5 ms, and an event loop waits for one turn of each.

All start with the engine. A thread that is started for a request may lack memory, and an
event loop that starts one which dies at once waits for it for ever.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event, Thread, current_thread
from typing import Any, Literal, TypeVar, cast

from pyllama_raw.engine.mailbox import CALLER_LEFT, Errand, Stream, wake
from pyllama_raw.errors import ClosedError

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

Queue = SimpleQueue[Errand | None]  # None: a thread is to end


class Workers:
    """Runs functions; any event loop may ask. close() ends the threads."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._closed = False
        self._busy = set[Thread]()  # one operation on a set cannot be interrupted
        self._queues: dict[Kind, Queue] = {kind: SimpleQueue() for kind in N_THREADS}
        self._threads = [
            Thread(
                target=_work,
                args=(self._queues[kind], self._busy),
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

    async def run(self, kind: Kind, function: Callable[[], T]) -> T:
        """
        Run *function* in a worker; return what it returns.

        A caller that is cancelled leaves at once. A function that has begun goes on alone,
        and finds CALLER_LEFT set.

        Raises:
            ClosedError: the threads have ended, or are about to.
        """
        if self._pid != os.getpid():
            raise ClosedError(
                "the engine belongs to the parent process: open one after the fork"
            )
        left, context = Event(), copy_context()
        context.run(CALLER_LEFT.set, left)
        job = Errand(partial(context.run, function))
        self._queues[kind].put(job)
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
            with suppress(Empty):
                while (job := queue.get_nowait()) is not None:
                    job.refuse(ClosedError("the engine is closed"))
            for _ in range(N_THREADS[kind]):
                queue.put(None)

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


def _work(queue: Queue, busy: set[Thread]) -> None:
    while (job := queue.get()) is not None:
        busy.add(current_thread())
        job()
        del job  # its error or its prompt would stay until the next one
        busy.discard(current_thread())
