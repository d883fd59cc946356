"""Several steps in one call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pyllama_raw.native.libllama import ffi

MAX_STEPS = 64  # in one call


class StepRun:
    """
    How many steps of one batch a call may do, and what ends it early.

    Args:
        n_vocab: of the model; tokens are below it.
        max_s: no step begins later than that after the call.

    Thread:
        interrupt() from any, all else from that of the context.
    """

    def __init__(self, n_vocab: int, max_s: float = 0.0) -> None:
        self._ends = bytearray(n_vocab)  # by token: 1 if a request ends with it
        self._n_users = Counter[int]()  # by token
        self._interrupt = bytearray(1)
        self.raw = ffi.new("plr_run *")
        self._views = (
            ffi.from_buffer("uint8_t[]", self._ends),
            ffi.from_buffer("uint8_t[]", self._interrupt),
        )
        self.raw.ends, self.raw.interrupt = self._views
        self.limit(1)
        self.raw.max_ns = int(max_s * 1e9)

    def limit(self, n_steps: int) -> None:
        """At most so many steps a call, from 1; more than MAX_STEPS are cut to that."""
        self.raw.n_steps = max(min(n_steps, MAX_STEPS), 1)

    def tell_each(self, wanted: bool) -> None:
        """Whether a call returns after each step, and goes on, or when it is over."""
        self.raw.tells = wanted

    def add_ends(self, tokens: Iterable[int]) -> None:
        """No step follows one that samples one of *tokens*."""
        for token in tokens:
            self._n_users[token] += 1
            self._ends[token] = 1

    def remove_ends(self, tokens: Iterable[int]) -> None:
        """Take back what add_ends() was called with."""
        for token in tokens:
            self._n_users[token] -= 1
            self._ends[token] = self._n_users[token] > 0

    def interrupt(self) -> None:
        """The running call does no further step, nor does a later one before resume()."""
        self._interrupt[0] = 1

    def resume(self) -> None:
        """Take interrupt() back."""
        self._interrupt[0] = 0
