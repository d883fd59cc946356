"""The points of a search: a file and a choice of every knob, and what each one costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from pyllama_raw.errors import PyllamaError
from pyllama_raw.lab.tune.knobs import Knob, Point, grid, settings_of
from pyllama_raw.lab.tune.work import Work
from pyllama_raw.options.profile import Measured, Settings

Measure = Callable[[Path, Settings, Work], Measured]


class Space:
    """
    Measures points; of several times the fastest counts.

    Args:
        files: the model first, then what it was requantised to.
        measure: does the work; an error means that the settings do not go.
        progress: called after each measurement.
    """

    def __init__(
        self,
        files: Sequence[Path],
        table: Sequence[Knob],
        work: Work,
        measure: Measure,
        progress: Callable[[], object] = lambda: None,
    ) -> None:
        self.files = files
        self.table = table
        self.work = work
        self._measure = measure
        self._progress = progress
        self.measured: dict[Point, Measured] = {}

    @property
    def sizes(self) -> tuple[int, ...]:
        """Choices of each dimension; the file is the first."""
        return (len(self.files), *(len(knob.choices) for knob in self.table))

    @property
    def default(self) -> Point:
        return (0,) * len(self.sizes)

    def points(self) -> list[Point]:
        """All of them that go together."""
        return [(file, *p) for file in range(len(self.files)) for p in grid(self.table)]

    def settings(self, point: Point) -> Settings | None:
        return settings_of(self.table, point[1:])

    def measure(self, point: Point) -> Measured:
        """
        Do the work; what was faster before stands.

        Raises:
            PyllamaError: these settings do not work here.
        """
        settings = self.settings(point)
        assert settings is not None
        found = self.measure_file(self.files[point[0]], settings)
        best = min(found, self.measured.get(point, found), key=self.work.seconds)
        self.measured[point] = best
        return best

    def measure_file(self, file: Path, settings: Settings) -> Measured:
        """Do the work with *file*. Raises as measure() does."""
        try:
            return self._measure(file, settings, self.work)
        finally:
            self._progress()

    def cost(self, point: Point) -> float:
        """Seconds of the work; infinite if *point* does not go."""
        settings = self.settings(point)
        if settings is None:
            return math.inf
        try:
            return self.work.cost(settings, self.measure(point))
        except PyllamaError:
            return math.inf
