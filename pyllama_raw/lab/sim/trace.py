"""Requests of a trace or a request log, as they came; equal blocks are equal tokens."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from pyllama_raw.core.request import Request
from pyllama_raw.engine.request_log import RequestRecord
from pyllama_raw.errors import ConfigError
from pyllama_raw.lab.bench.trace_files import of_log, read
from pyllama_raw.lab.bench.trace_formats import Arrival
from pyllama_raw.lab.checked import Checked, Factor
from pyllama_raw.lab.sim.executor import Answer
from pyllama_raw.lab.sim.workload import FIRST_TOKEN, coming, cut, make_pool


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
