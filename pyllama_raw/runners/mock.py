"""A runner that says what it is told to, for tests of programs that use runners."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from time import perf_counter

from anyio.lowlevel import checkpoint

from pyllama_raw import Prompt
from pyllama_raw.api.results import Delta, Result, Timings, Usage
from pyllama_raw.core.request import FinishReason
from pyllama_raw.errors import ClosedError
from pyllama_raw.options.requests import RequestOptions
from pyllama_raw.options.sampling import SamplingParams
from pyllama_raw.runners.capabilities import RunnerCapabilities
from pyllama_raw.runners.run import Source
from pyllama_raw.runners.runner import ModelRunner, RunnerHealth

CAPABILITIES = RunnerCapabilities(n=True, token_ids=True, n_ctx=4096, n_slots=4)


class MockRunner(ModelRunner):
    """
    A runner without a model; each piece counts as a token.

    Args:
        pieces: what it says, in order.
        error: what it raises after *n_before* pieces. None: nothing.
        before: awaited before each piece, with its index: a test can hold it up there.
        usage: what it tells. None: one token of prompt, and the pieces.

    Attributes:
        requests: (prompt, params) of all that were taken on.
    """

    def __init__(
        self,
        pieces: Sequence[str] = ("hello ", "world"),
        *,
        name: str = "mock",
        error: Exception | None = None,
        n_before: int = 0,
        before: Callable[[int], Awaitable[None]] | None = None,
        usage: Usage | None = None,
        capabilities: RunnerCapabilities = CAPABILITIES,
    ) -> None:
        super().__init__(name, capabilities)
        self._pieces, self._error, self._n_before = tuple(pieces), error, n_before
        self._before, self._usage = before, usage
        self.requests: list[tuple[Prompt, SamplingParams]] = []

    async def health(self) -> RunnerHealth:
        """Well, until it is closed."""
        is_open = not self._closed
        return RunnerHealth(live=is_open, ready=is_open, n_running=self.n_open)

    async def _source(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions
    ) -> Source:
        started_at = perf_counter()
        self.requests.append((prompt, params))
        yield None
        pieces = self._pieces[: params.max_tokens]
        for at in range(max(len(pieces), self._n_before) + 1):
            await checkpoint()
            if self._before is not None and at < len(pieces):
                await self._before(at)
            if self._error is not None and at == self._n_before:
                raise self._error
            if self._closed:
                raise ClosedError(f"{self!r} was closed while it said something")
            for index in range(params.n if at < len(pieces) else 0):
                yield Delta(pieces[at], (at,), index)
        is_cut = len(pieces) < len(self._pieces)
        reason = FinishReason.LENGTH if is_cut else FinishReason.STOP
        text, tokens = "".join(pieces), tuple(range(len(pieces)))
        usage = self._usage or Usage(1, len(pieces), 0)
        timings = Timings(None, None, None, None, None, perf_counter() - started_at)
        for index in range(params.n):
            seed = (params.seed or 0) + index
            yield Result(text, tokens, reason, usage, timings, seed, index)
