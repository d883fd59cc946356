"""
The search for the fastest options: what can be turned, in which order, and what a point costs.

A choice of a knob is the fields it sets, by part of EngineConfig, so a knob may set several. A new
option is a new line of the table; search and measurement know of none.

One knob is turned at a time, from the defaults, until none gains any more. Knobs hardly depend on
each other here, so a pass over them finds what the whole grid would, in its sum of choices instead
of its product; a second pass finds the pairs. Before a knob is turned, both sides are measured
again: a neighbour may have slowed one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyllama_raw.errors import ConfigError, PyllamaError
from pyllama_raw.lab.tune.work import Work
from pyllama_raw.options.profile import Measured, Settings

Choice = Mapping[str, dict[str, Any]]
Point = tuple[int, ...]  # the choice of each knob, by index
MIN_GAIN = 0.01  # of the cost; less is noise, and the default is better known
MAX_PASSES = 2


@dataclass(frozen=True, slots=True)
class Knob:
    """Something to turn, and the positions it has."""

    name: str
    choices: tuple[Choice, ...]


def knobs(n_cpus: int, n_threads: int) -> tuple[Knob, ...]:
    """
    The table for a machine; what matters most is turned first.

    Args:
        n_cpus: logical CPUs that may be used.
        n_threads: the default.
    """
    counts = (n_cpus, n_cpus - 1, n_cpus // 2, n_cpus // 4)
    threads = dict.fromkeys(n for n in counts if n > 0 and n != n_threads)
    wide = {"n_threads_batch": n_cpus}  # prompts gain from threads that streams do not
    return (
        _knob("threads", "context", *({"n_threads": n} for n in threads)),
        _knob("threads for prompts", "context", wide),
        # Left as in the file, for our kernels, or in libllama's order, as for AMX.
        _knob("weights", "model", *({"use_extra_bufts": on} for on in (False, True))),
        _knob("flash attention", "context", {"flash_attn": "off"}),
        _knob("KV layout", "context", {"kv_unified": False}),
        _knob("KV type", "context", {"type_k": "q8_0", "type_v": "q8_0"}),
        _knob("ubatch", "context", *({"n_ubatch": n} for n in (256, 1024))),
        _knob("sampler placement", "engine", {"sampler_placement": "backend"}),
        _knob("token budget", "scheduler", *({"token_budget": n} for n in (256, 1024))),
    )


def _knob(name: str, part: str, *choices: dict[str, Any]) -> Knob:
    return Knob(name, ({}, *({part: fields} for fields in choices)))


def settings_of(table: Sequence[Knob], point: Point) -> Settings | None:
    """Settings of *point*; None if its choices do not fit each other."""
    settings = Settings()
    try:
        for knob, index in zip(table, point, strict=True):
            settings = settings.updated(knob.choices[index])
    except ConfigError:
        return None
    context = settings.engine_config().context
    if context.n_threads_batch and context.n_threads_batch == context.threads:
        return None  # as many threads for prompts as there are without it
    return settings


Cost = Callable[[Point], float]


def descend(
    sizes: Sequence[int], cost: Cost, may_go_on: Callable[[], bool] = lambda: True
) -> Point:
    """
    The best point that was measured.

    Args:
        sizes: choices of each knob; 0 is the default.
        cost: lower is better, infinite for what does not run; never more when asked again.
        may_go_on: whether there is time for one more knob.
    """
    costs: dict[Point, float] = {}

    def cost_of(point: Point) -> float:
        if point not in costs:
            costs[point] = cost(point)
        return costs[point]

    def gains(point: Point, best: Point) -> bool:
        return cost_of(point) < cost_of(best) * (1 - MIN_GAIN)

    best: Point = (0,) * len(sizes)
    for _ in range(MAX_PASSES):
        before = best
        for knob, size in enumerate(sizes):
            if not may_go_on():
                return best
            neighbours = [_turned(best, knob, choice) for choice in range(size)]
            best_of_knob = min(neighbours, key=cost_of)
            if gains(best_of_knob, best):
                costs.update({point: cost(point) for point in (best_of_knob, best)})
                best = best_of_knob if gains(best_of_knob, best) else best
        if best == before:
            break
    return best


def _turned(point: Point, knob: int, choice: int) -> Point:
    return (*point[:knob], choice, *point[knob + 1 :])


Speed = Callable[[Settings], Measured]


class Space:
    """
    Measures points; of several times the fastest counts.

    Args:
        speed: does the work; an error means that the settings do not run.
    """

    def __init__(self, table: Sequence[Knob], work: Work, speed: Speed) -> None:
        self.table, self.work, self.speed = table, work, speed
        self.default: Point = (0,) * len(table)
        self._measured: dict[Point, Measured] = {}

    @property
    def sizes(self) -> list[int]:
        """Choices of each knob."""
        return [len(knob.choices) for knob in self.table]

    def measure(self, point: Point) -> Measured:
        """
        Do the work; what was faster before stands.

        Raises:
            PyllamaError: these settings do not work here.
        """
        settings = settings_of(self.table, point)
        assert settings is not None
        speed = self.speed(settings)
        best = min(speed, self._measured.get(point, speed), key=self.work.seconds)
        self._measured[point] = best
        return best

    def cost(self, point: Point) -> float:
        """Seconds of the work; infinite if *point* does not run."""
        settings = settings_of(self.table, point)
        if settings is None:
            return math.inf
        try:
            return self.work.cost(settings, self.measure(point))
        except PyllamaError:
            return math.inf
