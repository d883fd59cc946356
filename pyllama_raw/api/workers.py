"""
Worker threads for what takes too long for an event loop.

Each kind of work has a few threads of its own in each event loop. No kind therefore waits
for another one, or for other work that the program runs in threads. The threads are few
because threads that compute in Python take turns of 5 ms, and the loop waits for one turn
of each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar

from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar

T = TypeVar("T")

Kind = Literal["chat", "template", "text", "media", "rules", "call", "adapters"]
N_THREADS: dict[Kind, int] = {
    "chat": 4,  # two wait for a template's process, two make tokens of what it wrote
    "template": 2,  # chats with a template of their own, which is a stranger's program
    "text": 2,  # long prompts: the tokenizer
    "media": 2,  # lists with images and sounds: how many rows these take
    "rules": 2,  # grammars, schemas, stop strings, many tokens
    "call": 8,  # answers of the engine thread: these only wait
    "adapters": 1,  # files that are read, checked and loaded
}

_limiters: RunVar[dict[Kind, CapacityLimiter]] = RunVar("pyllama_raw_workers")


async def in_worker(kind: Kind, function: Callable[[], T]) -> T:
    """
    What *function* returns. Who is cancelled leaves at once, and it goes on alone.
    """
    limiters = _limiters.get(None)
    if limiters is None:
        limiters = {name: CapacityLimiter(n) for name, n in N_THREADS.items()}
        _limiters.set(limiters)
    return await to_thread.run_sync(
        function, abandon_on_cancel=True, limiter=limiters[kind]
    )
