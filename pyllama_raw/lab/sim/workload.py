"""Requests that come to a simulation: their times, lengths, prefixes and clients."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Annotated, Any, Literal, cast

from pydantic import Field

from pyllama_raw.core.request import Request
from pyllama_raw.errors import ConfigError
from pyllama_raw.lab.checked import Checked, Count, Factor
from pyllama_raw.lab.sim.executor import END_TOKEN, Answer

Kind = Literal["fixed", "uniform", "exponential", "lognormal"]
POOL = 2**16  # random tokens that prompts are cut from
FIRST_TOKEN = 2  # those below mean something to the executor
MOST = 2**20  # tokens of one length
Mean = Annotated[float, Field(ge=1, le=MOST, allow_inf_nan=False)]
Sigma = Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)]
Prefix = Annotated[int, Field(ge=0, le=MOST)]


@dataclass(frozen=True, slots=True)
class Lengths(Checked):
    """Whole numbers of one distribution, at least 1 and at most *most*."""

    mean: Mean
    kind: Kind = "fixed"
    sigma: Sigma = 1.0  # of the logarithm, for lognormal
    most: Count = MOST

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.mean > self.most:
            raise ConfigError(f"Lengths.mean={self.mean}: give at most {self.most}")

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
        return min(max(round(number), 1), self.most)


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
