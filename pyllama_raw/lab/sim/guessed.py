"""
Requests whose outputs nobody knows before they end.

A request of a `Workload` allows as many tokens as it will get, so a policy that reads
`max_tokens` knows the future. Callers do not: they give one limit to all requests, and at
best a guess.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Annotated, Protocol

from pydantic import Field

from pyllama_raw.core.request import Request
from pyllama_raw.lab.checked import Checked, Count
from pyllama_raw.lab.sim.executor import Answer

MAX_GUESS = 2**31 - 1
Spread = Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)]


class Requests(Protocol):
    """A `Workload` or a `Trace`, guessed or not."""

    @property
    def n_requests(self) -> int:
        """In all."""

    def requests(self, n_most: int) -> Iterator[tuple[float, Request]]:
        """Requests of at most *n_most* tokens, each with the time it comes at; in order."""


@dataclass(frozen=True, slots=True)
class Guessed(Checked):
    """
    The requests of *source*, of which a policy sees a guess and one `max_tokens` for all.

    Requests, their times and their outputs are those of *source*.
    """

    UNCHECKED = ("source",)
    source: Requests
    sigma: Spread | None = None
    """
    Deviation of the logarithm of guess / output, which is normal around 0; 0 guesses right.
    None: no guess.
    """
    max_tokens: Count | None = None
    """Output tokens that each request allows; longer outputs end there. None: half a slot."""
    seed: int = 0
    """The seed of the guesses."""

    @property
    def n_requests(self) -> int:
        """In all."""
        return self.source.n_requests

    def requests(self, n_most: int) -> Iterator[tuple[float, Request]]:
        """Like `Workload.requests`, but a prompt and `max_tokens` may exceed *n_most*."""
        rng = Random(f"guesses {self.seed}")  # noqa: S311 - it is to be repeated
        max_tokens = self.max_tokens or n_most // 2  # no output is longer
        for at_s, request in self.source.requests(n_most):
            data = dict(request.policy_data or {})
            if self.sigma is not None:
                assert isinstance(request.sampling, Answer)
                guess = request.sampling.n_output * rng.lognormvariate(0, self.sigma)
                data["n_output"] = min(max(round(guess), 1), MAX_GUESS)
            yield at_s, replace(request, max_tokens=max_tokens, policy_data=data)
