"""The cost of a step: a sum of what it does, with coefficients fitted to a step log."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from pyllama_raw.engine.step_log import Size
from pyllama_raw.engine.watcher import StepRecord
from pyllama_raw.errors import ConfigError
from pyllama_raw.lab.checked import Checked, NotNegative

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

HELD_OUT = 5  # every fifth step is not fitted to, but predicted


@dataclass(frozen=True, slots=True)
class CostModel(Checked):
    """Seconds, each for one; the defaults stand for no machine that we measured."""

    step: NotNegative = 4e-3
    prefill_token: NotNegative = 1e-3
    decode_token: NotNegative = 2e-3
    context_cell: NotNegative = 1e-7  # that a token looks at
    saved_token: NotNegative = 2e-6
    loaded_token: NotNegative = 2e-6

    def seconds(self, size: Size) -> float:
        """Seconds that a step of *size* takes."""
        return (
            self.step
            + self.prefill_token * size[0]
            + self.decode_token * size[1]
            + self.context_cell * size[2]
            + self.saved_token * size[3]
            + self.loaded_token * size[4]
        )

    def save(self, path: Path) -> None:
        """Write it as a JSON object."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> CostModel:
        """
        Read what save() has written.

        Raises:
            ConfigError: the file is another one.
        """
        try:
            values = json.loads(path.read_text())
            return cls(**{name: float(value) for name, value in values.items()})
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(f"{path} is no cost model: {error}") from error


def until_next(steps: Sequence[StepRecord]) -> list[StepRecord]:
    """*steps* of one log, each as long as until the next one, if requests went on."""
    spans = []
    for step, then in zip(steps, [*steps[1:], None], strict=True):
        if then is not None and step.n_running:
            step = step._replace(seconds=then.at_s - step.at_s)  # noqa: PLW2901
        spans.append(step)
    return spans


class Fit(NamedTuple):
    """A cost model and how well it fits."""

    cost: CostModel
    r2: float  # share of the variance that it explains, of the steps it was fitted to
    error: float  # median relative error of single steps that were held out
    total_error: float  # relative error of the time of all of these together
    n_steps: int


def fit(records: Sequence[StepRecord]) -> Fit:
    """
    The least squares fit to *records* in which nothing costs less than nothing.

    Steps that warmed an engine up do not count. A loaded token costs what restores took, if there were some: core decides by that whether a
    swap is worth it, and whole steps are too noisy to tell.

    Raises:
        ConfigError: there are fewer steps than it takes to know anything.
    """
    import numpy as np

    records = [record for record in records if not record.warms_up]
    names = [field.name for field in fields(CostModel)]
    if len(records) < HELD_OUT * len(names):
        n_least = HELD_OUT * len(names)
        raise ConfigError(f"{len(records)} steps are too few: log at least {n_least}")
    sizes = np.array([(1, *record[2:7]) for record in records], dtype=float)
    seconds = np.array([record.seconds for record in records])
    is_test = np.arange(len(records)) % HELD_OUT == HELD_OUT - 1
    costs = _least_squares(sizes[~is_test], seconds[~is_test], _restore_s(records))
    training, fitted = seconds[~is_test], sizes[~is_test] @ costs
    variance = float(((training - training.mean()) ** 2).sum())
    r2 = 1 - float(((training - fitted) ** 2).sum()) / variance if variance else 1.0
    actual, predicted = seconds[is_test], sizes[is_test] @ costs
    error = median(abs(predicted - actual) / np.maximum(actual, 1e-9))
    total_error = abs(float(predicted.sum() / actual.sum()) - 1)
    model = CostModel(**dict(zip(names, map(float, costs), strict=True)))
    return Fit(model, r2, float(error), total_error, len(records))


def _restore_s(records: Sequence[StepRecord]) -> float | None:
    """Seconds to restore a token; None if none was restored."""
    costs = [r.restore_s / r.n_loaded for r in records if r.restore_s and r.n_loaded]
    return median(costs) if costs else None


def _least_squares(
    sizes: NDArray[np.float64], seconds: NDArray[np.float64], last: float | None
) -> NDArray[np.float64]:
    """Without negative costs: what would have one is left out, the worst first."""
    import numpy as np

    scale = np.maximum(sizes.max(axis=0), 1.0)
    used = list(range(sizes.shape[1] - (last is not None)))
    if last is not None:
        seconds = seconds - last * sizes[:, -1]
    while True:
        costs = np.zeros(sizes.shape[1])
        costs[-1] = last or 0.0
        solution, *_ = np.linalg.lstsq(
            sizes[:, used] / scale[used], seconds, rcond=None
        )
        costs[used] = solution / scale[used]
        if not used or (costs >= 0).all():
            return costs
        used.remove(int((costs * scale).argmin()))
