"""
One knob at a time, from the defaults, until none gains any more.

Knobs hardly depend on each other here, so a pass over them finds what the whole grid
would, in its sum of choices instead of its product; a second pass finds the pairs. Before
a knob is turned, both sides are measured again: a neighbour may have slowed one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pyllama_raw.lab.tune.knobs import Point

MIN_GAIN = 0.01  # of the cost; less is noise, and the default is better known
MAX_PASSES = 2

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
