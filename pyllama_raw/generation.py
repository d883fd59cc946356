"""
One request being generated: an async iterator that is also an async context manager.

Rules:
1. It can be read once, by one task.
2. Leaving the block, cancel(), and dropping the object end the request; none of them
   waits for anything.
3. A reader that comes late finds what happened since merged into one delta.
"""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from pyllama_raw.core import request as core
from pyllama_raw.core.request import Finished, FinishReason, Request
from pyllama_raw.engine.loop import EngineThread
from pyllama_raw.engine.stream import Refused, Stream
from pyllama_raw.errors import PyllamaError
from pyllama_raw.results import Delta, Result, Timings, Usage, timings_of


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked request, and the seed its sampling will use."""

    request: Request
    seed: int


class Generation:
    """What `AsyncEngine.generate` returns; it starts when entered or first read."""

    def __init__(
        self, thread: EngineThread, prepare: Callable[[], Awaitable[Prepared]]
    ) -> None:
        self._thread = thread
        self._prepare = prepare
        self._prepared: Prepared | None = None
        self._stream: Stream | None = None
        self._started = thread.clock()
        self._claimed = False  # started, or about to be
        self._left = False  # cancelled by its owner
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._finished: Finished | None = None
        self._error: PyllamaError | None = None

    # -- reading ----------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        if not self._claimed:
            await self._start()
        while not self._ended:
            if self._stream is None:
                break  # cancelled before it began
            await self._stream.wait()
            delta = self._merge()
            if delta is not None:
                return delta
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    async def collect(self) -> Result:
        """Wait for the end without being woken for every token."""
        if not self._claimed:
            await self._start()
        while not self._ended and self._stream is not None:
            self._stream.eager = False
            await self._stream.wait()
            self._merge()
        return self.result

    @property
    def result(self) -> Result:
        """
        Everything together, once the generation has ended.

        Raises:
            PyllamaError: what the request failed with.
            RuntimeError: the generation has not ended.
        """
        self._merge()
        if self._error is not None:
            raise self._error
        if self._finished is None and not self._left:
            raise RuntimeError("the generation has not ended: read it to the end first")
        return self._make_result()

    def cancel(self) -> None:
        """End the request within one step; the result keeps what was generated."""
        self._claimed = True
        if not self._ended and not self._left:
            self._left = True
            if self._prepared is not None:
                self._thread.cancel(self._prepared.request.request_id)

    def __del__(self) -> None:
        if getattr(self, "_prepared", None) is None or self._left:
            return
        self._merge()
        if not self._ended and self._prepared is not None:
            self._thread.forget(self._prepared.request.request_id)
            warnings.warn(
                f"{self!r} was dropped before it ended: use `async with`",
                ResourceWarning,
                source=self,
                stacklevel=1,
            )

    # -- inside -----------------------------------------------------------------

    @property
    def _ended(self) -> bool:
        return self._finished is not None or self._error is not None

    async def _start(self) -> None:
        if self._claimed:
            raise RuntimeError("a generation can be used once")
        self._claimed = True
        self._thread.check()
        prepared = await self._prepare()
        if self._left:
            return
        stream = Stream()
        self._thread.submit(prepared.request, stream)
        self._stream, self._prepared = stream, prepared

    def _merge(self) -> Delta | None:
        """Take in what has arrived; None if there is nothing to show."""
        texts: list[str] = []
        tokens: list[int] = []
        events = self._stream.events if self._stream is not None else None
        while events:
            event = events.popleft()
            if type(event) is core.Delta:
                texts.append(event.text)
                tokens.append(event.token)
            elif isinstance(event, Refused):
                self._error = event.error
            else:
                assert isinstance(event, Finished)
                self._finished, self._error = event, event.error
                texts.append(event.text)
        text = "".join(texts)
        if not text and not tokens:
            return None
        self._texts.append(text)
        self._tokens += tokens
        return Delta(text, tuple(tokens))

    def _make_result(self) -> Result:
        prepared, finished = self._prepared, self._finished
        n_prompt = prepared.request.n_prompt if prepared is not None else 0
        reason: FinishReason | None = FinishReason.CANCELLED
        n_cached, tier, timings = 0, None, self._timings_when_left()
        if finished is not None:
            reason, timings = finished.reason, timings_of(finished.timings)
            n_cached, tier = finished.n_cached, finished.cache_tier
        assert reason is not None
        return Result(
            text="".join(self._texts),
            token_ids=tuple(self._tokens),
            finish_reason=reason,
            usage=Usage(n_prompt, len(self._tokens), n_cached, tier),
            timings=timings,
            seed=prepared.seed if prepared is not None else 0,
        )

    def _timings_when_left(self) -> Timings:
        """The owner left and did not wait for the engine's account."""
        elapsed = self._thread.clock() - self._started
        return Timings(None, None, None, None, None, elapsed)
