"""
Requests that come to a simulation: drawn ones, those of a trace, and what callers know of them.

A `Workload` draws times, lengths, prefixes and clients. A `Trace` has requests as they came; equal
blocks are equal tokens. A request of either allows as many tokens as it will get, so a policy that
reads `max_tokens` knows the future. Callers do not: they give one limit to all requests, and at
best a guess. So does `Guessed`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal, NamedTuple, Protocol, cast

from pydantic import Field

from pyllama_raw.core.request import Request
from pyllama_raw.engine.logs import RequestRecord
from pyllama_raw.errors import ConfigError
from pyllama_raw.lab.workloads import Arrival, of_log, read
from pyllama_raw.options.frozen import Checked, Count, Factor

Kind = Literal["fixed", "uniform", "exponential", "lognormal"]
POOL = 2**16  # random tokens that prompts are cut from
END_TOKEN = 0  # the last token of every output
FIRST_TOKEN = 2  # those below mean something to the executor
MOST = 2**20  # tokens of one length
Mean = Annotated[float, Field(ge=1, le=MOST, allow_inf_nan=False)]
Sigma = Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)]
Prefix = Annotated[int, Field(ge=0, le=MOST)]
MAX_GUESS = 2**31 - 1


class Answer(NamedTuple):
    """The output that a simulated request will have: `Request.sampling` of it."""

    n_output: int
    first_token: int  # of output; prefixes of outputs are shared where these are equal


@dataclass(frozen=True, slots=True)
class Lengths(Checked):
    """Whole numbers of one distribution, at least 1 and at most *limit*."""

    mean: Mean
    kind: Kind = "fixed"
    sigma: Sigma = 1.0  # of the logarithm, for lognormal
    limit: Count = MOST

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.mean > self.limit:
            raise ConfigError(f"Lengths.mean={self.mean}: give at most {self.limit}")

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """`200`, `uniform:200`, `exponential:200` or `lognormal:200:0.8`."""
        kind, *numbers = text.split(":") if ":" in text else ("fixed", text)
        try:
            mean, sigma = [*map(float, numbers), 1.0][:2]
            return cls(mean, cast(Kind, kind), sigma)
        except ValueError as error:
            raise ConfigError(f"{text!r} is no distribution: {error}") from error

    def draw(self, rng: Random) -> int:
        """The next one."""
        match self.kind:
            case "fixed":
                number = self.mean
            case "uniform":
                number = rng.uniform(1, 2 * self.mean - 1)
            case "exponential":
                number = rng.expovariate(1 / self.mean)
            case _:
                middle = math.log(self.mean) - self.sigma**2 / 2
                number = rng.lognormvariate(middle, self.sigma)
        return min(max(round(number), 1), self.limit)


@dataclass(frozen=True, slots=True)
class Workload(Checked):
    """
    An open loop: requests come whether others have ended or not.

    Gaps are gamma distributed: a burstiness of 1 is a Poisson process, below 1 requests
    come in bursts.
    """

    n_requests: Count = 1000
    rate: Factor = 1.0  # requests a second
    burstiness: Factor = 1.0
    prompt: Lengths = Lengths(200, "lognormal", 0.8)
    output: Lengths = Lengths(50, "exponential")
    n_groups: Count = 1  # prefixes, equally likely
    prefix_tokens: Prefix = 0  # of each; the prompt comes after it
    n_clients: Count = 1
    # Times as many requests as of others come from the first client.
    heavy: Factor = 1.0
    deadline_s: Lengths | None = None  # seconds from arrival
    seed: int = 0

    def requests(self, n_most: int) -> Iterator[tuple[float, Request]]:
        """
        Requests with the time that each comes at; made one after the other.

        Args:
            n_most: tokens of a prompt and its output together; longer ones are cut.
        """
        rng = Random(self.seed)  # noqa: S311 - it is to be repeated
        pool = make_pool(rng)
        prefixes = [cut(pool, rng, self.prefix_tokens) for _ in range(self.n_groups)]
        weights = [self.heavy, *[1.0] * (self.n_clients - 1)]
        clients = [f"client {number}" for number in range(self.n_clients)]
        gap_s = 1 / (self.rate * self.burstiness)
        now = 0.0
        for request_id in range(self.n_requests):
            now += rng.gammavariate(self.burstiness, gap_s)
            prefix = prefixes[rng.randrange(self.n_groups)]
            n_output = min(self.output.draw(rng), n_most // 2)
            n_prompt = len(prefix) + self.prompt.draw(rng)
            tail = cut(pool, rng, max(n_prompt - len(prefix), 1))
            tail[0] = FIRST_TOKEN + request_id  # so that no two are equal
            tokens = (prefix + tail)[: n_most - n_output]
            wait_s = None if self.deadline_s is None else self.deadline_s.draw(rng)
            (client,) = rng.choices(clients, weights)
            answer = Answer(n_output, FIRST_TOKEN + request_id)
            yield coming(
                request_id, now, tokens, answer, deadline_s=wait_s, client=client
            )


def coming(
    request_id: int,
    at_s: float,
    tokens: array[int],
    answer: Answer,
    *,
    max_tokens: int = 0,
    deadline_s: float | None = None,
    **options: Any,
) -> tuple[float, Request]:
    """A request and its time; it allows *max_tokens*, or its whole output if that is more."""
    return at_s, Request(
        request_id,
        tokens,
        max_tokens=max(max_tokens, answer.n_output),
        sampling=answer,
        stop_token_ids=frozenset({END_TOKEN}),
        deadline=None if deadline_s is None else at_s + deadline_s,
        **options,
    )


def make_pool(rng: Random) -> array[int]:
    """Random tokens."""
    return array("i", (rng.randrange(FIRST_TOKEN, 2**31) for _ in range(POOL)))


def cut(pool: array[int], rng: Random, n_tokens: int) -> array[int]:
    """Some run of *pool*, repeated where it is too short."""
    start = rng.randrange(POOL)
    tokens = pool[start : start + n_tokens]
    while len(tokens) < n_tokens:
        tokens += pool[: n_tokens - len(tokens)]
    return tokens


@dataclass(frozen=True, slots=True)
class Trace(Checked):
    """
    Arrivals at *speed* times their pace.

    Raises:
        ConfigError: the trace does not say how many tokens a prompt has, or the speed is
            not allowed.
    """

    UNCHECKED = ("arrivals",)
    arrivals: Sequence[Arrival]
    speed: Factor = 1.0

    def __post_init__(self) -> None:
        if any(arrival.prompt is not None for arrival in self.arrivals):
            raise ConfigError("a simulation needs prompt_tokens instead of a prompt")
        Checked.__post_init__(self)

    @classmethod
    def read(
        cls, path: Path, n_requests: int | None = None, speed: float = 1.0
    ) -> Trace:
        """The first *n_requests* of a file in a format that `bench` knows."""
        return cls(read(path, n_requests), speed)

    @classmethod
    def of_log(cls, log: Iterable[RequestRecord], speed: float = 1.0) -> Trace:
        """The requests of a request log that count, from the first one on."""
        return cls(of_log(log), speed)

    @property
    def n_requests(self) -> int:
        """In all."""
        return len(self.arrivals)

    def requests(self, n_most: int) -> Iterator[tuple[float, Request]]:
        """Like `Workload.requests`."""
        rng = Random(0)  # noqa: S311 - it is to be repeated
        pool, numbers = make_pool(rng), dict[int, int]()
        for request_id, arrival in enumerate(self.arrivals):
            now = arrival.at_s / self.speed
            own = FIRST_TOKEN + 2 * request_id + 1  # begins no block
            n_output = min(arrival.n_output, n_most // 2)
            tokens = array("i")
            for block in arrival.blocks:
                number = numbers.setdefault(block, len(numbers))
                n_tokens = min(arrival.block, arrival.n_prompt - len(tokens))
                if n_tokens > 0:
                    tokens += _block(pool, number, n_tokens)
            n_left = arrival.n_prompt - len(tokens)
            if n_left > 0 or not tokens:
                tail = cut(pool, rng, max(n_left, 1))
                tail[0] = own
                tokens += tail
            prompt, answer = tokens[: n_most - n_output], Answer(n_output, own)
            allowed = {"max_tokens": arrival.max_tokens or 0, **arrival.asked}
            yield coming(request_id, now, prompt, answer, **allowed)


def _block(pool: array[int], number: int, n_tokens: int) -> array[int]:
    """The first tokens of a block; blocks of different numbers begin differently."""
    tokens = cut(pool, Random(number), n_tokens)  # noqa: S311
    tokens[0] = FIRST_TOKEN + 2 * number
    return tokens


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
