"""A request for vectors in progress: which of its texts is next."""

from __future__ import annotations

from array import array

from pyllama_raw.core.embedding.request import EmbedRequest
from pyllama_raw.core.request import Finished, FinishReason, Timings
from pyllama_raw.errors import PyllamaError


class Progress:
    """Its texts are computed in their order."""

    def __init__(self, request: EmbedRequest, submitted: float) -> None:
        self.request = request
        self.n_done = 0  # texts that have a vector
        self.start = 0  # tokens of the next one that are computed
        self._submitted = submitted
        self._admitted: float | None = None  # when its first step began
        self._first: float | None = None  # when it had its first vector

    @property
    def has_begun(self) -> bool:
        """Whether it was in a step."""
        return self._admitted is not None

    @property
    def is_done(self) -> bool:
        return self.n_done == len(self.request.ends)

    def rest(self, n_ahead: int) -> array[int] | None:
        """What is left of the text after *n_ahead* others; None: there is no such text."""
        index = self.n_done + n_ahead
        if index == len(self.request.ends):
            return None
        return self.request.text(index)[0 if n_ahead else self.start :]

    def begin(self, now: float) -> None:
        """It is in a step, for the first time."""
        self._admitted = now

    def advance(self, n_tokens: int) -> None:
        """A part of the next text is computed."""
        self.start += n_tokens

    def complete(self, now: float) -> int:
        """The next text has its vector; returns its index."""
        self.n_done += 1
        self.start = 0
        if self._first is None:
            self._first = now
        return self.n_done - 1

    def end(
        self, reason: FinishReason | None, error: PyllamaError | None, now: float
    ) -> Finished:
        return Finished(
            self.request.request_id,
            reason,
            error,
            n_prompt=self.request.n_prompt,
            n_output=0,
            n_cached=0,
            cache_tier=None,
            n_preempted=0,
            timings=Timings(self._submitted, self._admitted, self._first, now, ()),
        )
