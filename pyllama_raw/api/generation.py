"""
One request being generated: an async iterator that is also an async context manager.

Rules:
1. It can be read once, by one task at a time. A second reader is refused; the one that has
   left its loop may go on in another.
2. Leaving the block, cancel(), and dropping the object end the request; none of them
   waits for anything.
3. A reader that comes late finds what happened since merged into one delta an output.
4. With n > 1 an output that fails does not end the others: reading raises only if all
   have failed.
5. Whether the engine takes the request on is known when the block is entered.
"""

from __future__ import annotations

from collections import deque
from copy import copy
from typing import TYPE_CHECKING, Self

from anyio.lowlevel import checkpoint, checkpoint_if_cancelled

from pyllama_raw.api.batches import whole
from pyllama_raw.api.model import Owner
from pyllama_raw.api.preparation import Choice
from pyllama_raw.api.results import Delta, Result, Score, Timings, Usage
from pyllama_raw.core.request import FinishReason, Request
from pyllama_raw.engine.info import Operation
from pyllama_raw.engine.mailbox import Refused, Stream
from pyllama_raw.errors import DeadlineExceeded, InvalidRequest, PyllamaError, WrongUse

if TYPE_CHECKING:
    from pyllama_raw.api.batches import Continuations
    from pyllama_raw.api.session import Sessions
    from pyllama_raw.options.requests import RequestOptions
    from pyllama_raw.options.sampling import SamplingParams
    from pyllama_raw.prompts.prompt import Prompt

MANY_EVENTS = 256  # an event loop may wait while so many are taken in


class Generation(Owner):
    """The value of `AsyncEngine.generate`; it starts when entered or first read."""

    def __init__(
        self,
        sessions: Sessions,
        prompt: Prompt,
        params: SamplingParams,
        options: RequestOptions,
        continuations: Continuations | None = None,
    ) -> None:
        """
        Args:
            params, options: checked.
            continuations: each scores its own tokens; None: the model goes on.

        Raises:
            Unsupported: the model generates no text.
        """
        sessions.current.parts.capabilities.check(Operation.GENERATE)
        self._sessions = sessions
        self._thread = sessions.current.thread  # the one that serves, once it has begun
        self._prompt = prompt
        self._params = params
        self._options = options
        self._continuations = continuations
        self._stream: Stream | None = None
        self._started = self._thread.clock()
        self._claimed = False  # started, or about to be
        self._left = False  # cancelled by its owner
        self._reading = OneReader("generation")
        self._is_read = False  # to its end, by an iterator
        self._choices: tuple[Choice, ...] = ()  # by index
        self._by_id: dict[int, Choice] = {}  # those that have not ended
        self._fresh: deque[Choice] = deque()  # those with something to show

    # -- reading ----------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    def __aiter__(self) -> Self:
        if self._is_read:
            raise WrongUse(
                "this generation has been read to its end: .result has all of it, and "
                "generate() makes another one"
            )
        return self

    async def __anext__(self) -> Delta:
        with self._reading:
            if not self._claimed:
                await self._start()
            while self._fresh or self._by_id:
                if self._fresh:
                    await checkpoint_if_cancelled()
                elif self._stream is not None:
                    await self._stream.wait()
                await self._take_in()
                if self._fresh:  # outputs take turns
                    return self._fresh.popleft().take_delta()
        # All outputs have ended.
        self._raise_if_all_failed()
        self._is_read = True
        raise StopAsyncIteration

    async def collect(self) -> Result:
        """Wait for the end without being woken for every token; the first output."""
        await self._wait()
        return self.result

    async def collect_all(self) -> tuple[Result, ...]:
        """Like collect(), all outputs that did not fail."""
        await self._wait()
        return self.results

    async def score(self) -> Score:
        """
        The likelihood of the prompt.

        Raises:
            InvalidRequest: it is a single token.
            DeadlineExceeded, ClosedError: the request ended before every token had its score.
        """
        tokens = self.prompt_token_ids
        if len(tokens) < 2:
            raise InvalidRequest("prompt", self._prompt, "two tokens or more")
        (result,) = whole((await self.collect(),))
        n_scored, n_wanted = len(result.prompt_logprobs), len(tokens) - 1
        if n_scored < n_wanted:
            raise DeadlineExceeded(n_scored, n_wanted)
        return Score(tokens, result.prompt_logprobs)

    @property
    def result(self) -> Result:
        """
        Everything of the first output, once the generation has ended.

        Raises:
            PyllamaError: what the output failed with.
            WrongUse: the generation has not ended.
        """
        self._check_ended()
        if not self._choices:
            return _nothing(self._elapsed_s)
        first = self._choices[0]
        if first.error is not None:
            raise _again(first.error)
        return first.result(self._elapsed_s)

    @property
    def results(self) -> tuple[Result, ...]:
        """
        The outputs that did not fail, by index, once the generation has ended.

        Raises:
            PyllamaError: all have failed; of the first.
            WrongUse: the generation has not ended.
        """
        self._check_ended()
        self._raise_if_all_failed()
        elapsed_s = self._elapsed_s
        return tuple(c.result(elapsed_s) for c in self._choices if c.error is None)

    @property
    def requests(self) -> tuple[Request, ...]:
        """Requests of the outputs, by index, once the generation has begun."""
        return tuple(choice.request for choice in self._choices)

    @property
    def errors(self) -> dict[int, PyllamaError]:
        """The errors of outputs that have failed so far, by index."""
        self._take_events()
        return {c.index: c.error for c in self._choices if c.error is not None}

    @property
    def usage(self) -> Usage:
        """
        Tokens of all outputs so far, of those that failed, too, and of the prompt they share.

        Cached tokens are known once the first output has ended. Before it begins all are 0.
        """
        if not self._choices:
            return Usage(0, 0, 0)
        self._take_events()
        first = self._choices[0]
        # One output that has ended: its result has them.
        if len(self._choices) == 1 and first.finished and not first.error:
            return first.result(self._elapsed_s).usage
        n_cached = 0 if first.finished is None else first.finished.n_cached
        n_output = sum(choice.n_tokens for choice in self._choices)
        return Usage(first.request.n_prompt, n_output, n_cached)

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt as the model sees it, once the generation has begun."""
        if not self._choices:
            raise WrongUse("the generation has not begun: enter or read it first")
        return tuple(self._choices[0].request.tokens)

    def cancel(self) -> None:
        """End the request within one step; the result keeps what was generated."""
        if self._left:
            return
        self._claimed = self._left = True
        for request_id in self._by_id:
            self._thread.cancel(request_id)

    def __repr__(self) -> str:
        """The state of the generation, and the part of it that was read."""
        if not self._choices:
            return f"<Generation: {'left' if self._left else 'not begun'}>"
        n_tokens = sum(choice.n_tokens for choice in self._choices)
        n_ended = sum(choice.ended for choice in self._choices)
        return (
            f"<Generation: {n_ended} of {len(self._choices)} outputs ended"
            f"{', left' * self._left}, {n_tokens} tokens read>"
        )

    def __del__(self) -> None:
        if getattr(self, "_left", True):
            return
        self._take_events()
        for request_id in self._by_id:
            self._thread.forget(request_id)
        if self._by_id:
            self._warn_dropped("before it ended: use `async with`")

    # -- inside -----------------------------------------------------------------

    @property
    def _elapsed_s(self) -> float:
        return self._thread.clock() - self._started

    async def _start(self) -> None:
        if self._claimed:
            raise WrongUse(
                "a generation can be used once: generate() makes another one"
            )
        self._claimed = True
        began = self._thread.clock()
        async with self._sessions.session(self._options) as session:
            waited_s = self._thread.clock() - began
            self._thread = session.thread
            with self._thread.coming():
                choices = await session.preparation.prepare(
                    self._prompt, self._params, self._options, began
                )
                if self._continuations is not None:
                    choices = await session.branches.prepare(
                        self._prompt, choices[0], self._continuations
                    )
                if self._left:
                    return
                # Post the requests. Whether the engine takes them on is known at once,
                # because this thread counts them.
                self._choices, stream = choices, Stream()
                requests = tuple(choice.request for choice in choices)
                try:
                    self._thread.submit_all(requests, stream, waited_s)
                except PyllamaError as error:
                    for choice in choices:
                        choice.error = _again(error)
                    raise
                self._by_id = {c.request.request_id: c for c in choices}
                self._stream = stream
        self._take_events()
        self._raise_if_all_failed()  # the engine ended just now

    async def _wait(self) -> None:
        with self._reading:
            if not self._claimed:
                await self._start()
            while self._by_id and self._stream is not None:
                self._stream.eager = False
                await self._stream.wait()
                await self._take_in()

    async def _take_in(self) -> None:
        """Take in what has arrived; the loop goes on between parts of it."""
        self._take_events(MANY_EVENTS)
        while self._stream is not None and self._stream.events:
            await checkpoint()
            self._take_events(MANY_EVENTS)

    def _take_events(self, limit: int | None = None) -> None:
        """Take in what has arrived, or the first *limit* events of it."""
        if self._stream is None:
            return
        events = self._stream.events
        n_events = len(events)
        for _ in range(n_events if limit is None else min(limit, n_events)):
            event = events.popleft()
            if isinstance(event, Refused):
                for choice in self._by_id.values():
                    choice.error = event.error
                self._by_id.clear()
                return
            choice = self._by_id[event.request_id]
            if choice.take(event):
                self._fresh.append(choice)
            if choice.ended:
                del self._by_id[event.request_id]

    def _check_ended(self) -> None:
        self._take_events()
        if (self._by_id or not self._choices) and not self._left:
            raise WrongUse("the generation has not ended: read it to the end first")

    def _raise_if_all_failed(self) -> None:
        errors = [choice.error for choice in self._choices]
        if errors and errors[0] is not None and None not in errors:
            raise _again(errors[0])


class OneReader:
    """A `with` block for one task at a time; another one would take a part of what comes."""

    __slots__ = ("_is_in", "_subject")

    def __init__(self, subject: str) -> None:
        self._is_in = False
        self._subject = subject

    def __enter__(self) -> None:
        if self._is_in:
            raise WrongUse(
                f"another task reads this {self._subject}: let one task read it, and hand on "
                "what it reads"
            )
        self._is_in = True

    def __exit__(self, *_: object) -> None:
        self._is_in = False


def _again(error: PyllamaError) -> PyllamaError:
    """A copy to raise. The frames that it passes would keep the engine, if it were kept itself."""
    copied = copy(error)
    copied.__cause__ = error.__cause__
    return copied


def _nothing(elapsed_s: float) -> Result:
    """The result of a generation that was left before it began."""
    timings = Timings(None, None, None, None, None, elapsed_s)
    return Result("", (), FinishReason.CANCELLED, Usage(0, 0, 0), timings, seed=0)
