"""The points of a search: a choice of every knob for one file, and what each one costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from pyllama_raw.errors import PyllamaError
from pyllama_raw.lab.tune.knobs import Knob, Point, settings_of
from pyllama_raw.lab.tune.work import Work
from pyllama_raw.options.profile import Measured, Settings

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
