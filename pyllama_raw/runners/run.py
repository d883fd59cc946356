"""
A request that a runner serves: an async iterator that is also an async context manager.

Rules:
1. A source is an async generator. It gives None once the request is taken on, then deltas, then
   a Result for each output. It holds no cancel scope while it gives something.
2. Entering the block sends the request; leaving it ends the request and closes the source.
3. It can be read once, by one task at a time.
4. cancel() wakes the reader; the result keeps what was read.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from time import perf_counter
from typing import Self

from anyio import CancelScope

from pyllama_raw.api.results import Delta, Result, Timings, Usage
from pyllama_raw.core.request import FinishReason
from pyllama_raw.errors import WrongUse

Item = Delta | Result | None
Source = AsyncGenerator[Item, None]


class RunHandle:
    """The value of `ModelRunner.generate`; it starts when entered or first read."""

    def __init__(self, make_source: Callable[[], Source]) -> None:
        self._make_source = make_source
        self._source: Source | None = None
        self._scope: CancelScope | None = None  # of the task that reads now
        self._results: dict[int, Result] = {}
        self._deltas: list[Delta] = []
        self._error: Exception | None = None
        self._ended = self._left = False
        self._started_at = perf_counter()

    async def __aenter__(self) -> Self:
        if self._source is not None or self._left:
            raise WrongUse("a run can be used once: generate() makes another one")
        await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()
        # If another task reads, its cancellation closes the source.
        if self._source is not None and self._scope is None:
            with CancelScope(shield=True):
                await self._source.aclose()

    def __aiter__(self) -> Self:
        if self._ended and not self._left:
            raise WrongUse(
                "this run has been read to its end: .result has all of it, and generate() "
                "makes another one"
            )
        return self

    async def __anext__(self) -> Delta:
        if self._source is None and not self._left:
            await self._start()
        while (item := await self._next()) is not None:
            if isinstance(item, Delta):
                self._deltas.append(item)
                return item
            self._results[item.index] = item
        raise StopAsyncIteration

    async def collect(self) -> Result:
        """Read to the end; the first output."""
        async for _ in self:
            pass
        return self.result

    async def collect_all(self) -> tuple[Result, ...]:
        """Read to the end; all outputs that did not fail."""
        await self.collect()
        return self.results

    @property
    def result(self) -> Result:
        """
        Everything of the first output, once the run has ended.

        Raises:
            PyllamaError: what it failed with.
            WrongUse: it has not ended.
        """
        return self.results[0]

    @property
    def results(self) -> tuple[Result, ...]:
        """The outputs by index, once the run has ended; raises as `result`."""
        if self._error is not None:
            raise self._error
        if not self._ended and not self._left:
            raise WrongUse("the run has not ended: read it to the end first")
        results = (self._cut_off() if self._left else {}) | self._results
        return tuple(results[index] for index in sorted(results))

    def cancel(self) -> None:
        """End the run; a task that reads it is woken."""
        self._left = self._left or not self._ended
        if self._scope is not None:
            self._scope.cancel()

    def __repr__(self) -> str:
        """The state of the run, without what it is about."""
        state = "failed" if self._error else "left" if self._left else "ended"
        state = state if self._ended or self._left else "running"
        state = state if self._source or self._left else "not begun"
        return f"<RunHandle: {state}, {len(self._deltas)} deltas read>"

    async def _start(self) -> None:
        self._source = self._make_source()
        first = await self._next()
        assert first is None, "a source gives None first"

    async def _next(self) -> Item:
        """The next item; None at the end and at the beginning."""
        if self._scope is not None:
            raise WrongUse("another task reads this run: let one task read it")
        if self._left or self._ended or self._source is None:
            return None
        try:
            with CancelScope() as self._scope:
                return await anext(self._source)
        except StopAsyncIteration:
            self._ended = True
        except Exception as error:
            self._ended, self._error = True, error
            raise
        finally:
            self._scope = None
        return None

    def _cut_off(self) -> dict[int, Result]:
        """Outputs of a run that was left, as far as they were read."""
        e2e_s, results = perf_counter() - self._started_at, {}
        timings = Timings(None, None, None, None, None, e2e_s)
        for index in {0, *(delta.index for delta in self._deltas)}:
            own = [delta for delta in self._deltas if delta.index == index]
            tokens = tuple(token for delta in own for token in delta.token_ids)
            text, usage = "".join(delta.text for delta in own), Usage(0, len(tokens), 0)
            reason = FinishReason.CANCELLED
            results[index] = Result(text, tokens, reason, usage, timings, None, index)
        return results
