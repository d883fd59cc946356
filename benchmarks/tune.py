"""
What `tune` finds against the defaults, and against an exhaustive search of its own grid.

The search may keep a requantised file, as `tune --requantize` does. Then every point of the
grid is measured once, which takes long, and the fastest of them, the setting that tune
found and the defaults are measured again, interleaved. `prefill` is the ratio to the
defaults in tokens a second, `to_best` the time of the work to that of the best of the grid.
"""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from itertools import product
from pathlib import Path
from statistics import median

from load.measure import Report, arguments, parse, say

from pyllama_raw.lab.tune import Space, Work, find_settings, make_spaces, settings_of
from pyllama_raw.native.model import quantize
from pyllama_raw.options.profile import Measured, Settings

N_FINALISTS = 3  # of the grid: the fastest by one measurement is often the luckiest
GRID_WORK = Work(n_repeats=1)
Setting = tuple[Path, Settings]


def exhaustive(spaces: dict[Path, Space]) -> list[Setting]:
    """The fastest points of the whole grid."""
    costs: list[tuple[float, Path, Settings]] = []
    for file, space in spaces.items():
        for point in product(*map(range, space.sizes)):
            settings = settings_of(space.table, point)
            if settings is not None:
                costs.append((space.cost(point), file, settings))
                say(f"{file.name}: {point}, {costs[-1][0]:.2f} s")
    costs.sort(key=lambda pair: pair[0])
    return [(file, settings) for _, file, settings in costs[:N_FINALISTS]]


def compare(
    spaces: dict[Path, Space], settings: dict[str, Setting], rounds: int
) -> dict[str, list[Measured]]:
    """All *settings* in turn, *rounds* times."""
    speeds: dict[str, list[Measured]] = {name: [] for name in settings}
    for index in range(rounds):
        say(f"round {index + 1} of {rounds}")
        for name, (file, changes) in settings.items():
            speeds[name].append(spaces[file].speed(changes))
    return speeds


def measure(options: Namespace, report: Report, scratch: Path) -> None:
    """Tune, search the grid, compare."""
    work = Work()
    copy = scratch / "kept.gguf"
    profile = find_settings(
        options.model, work, keep=copy, progress=lambda text: say(f"tune: {text}")
    ).profile
    assert profile.path is not None
    facts = {"path": profile.path.name}  # it lies in a folder that will be gone
    report.details["profile"] = profile.model_dump(mode="json") | facts
    settings: dict[str, Setting] = {
        "defaults": (options.model, Settings()),
        "tune": (profile.path, profile.settings),
    }
    file = scratch / "q4_0.gguf"
    quantize(options.model, file, "q4_0")
    files = [options.model, file]
    spaces = make_spaces([*files, profile.path], work)
    if not options.no_grid:
        finalists = exhaustive(make_spaces(files, GRID_WORK))
        settings |= {f"grid {i + 1}": choice for i, choice in enumerate(finalists)}
    _conclude(report, work, settings, compare(spaces, settings, options.rounds))


def _conclude(
    report: Report,
    work: Work,
    settings: dict[str, Setting],
    speeds: dict[str, list[Measured]],
) -> None:
    seconds = {name: [work.seconds(m) for m in runs] for name, runs in speeds.items()}
    prefill = {
        name: median(
            mine.prefill_tok_per_s / theirs.prefill_tok_per_s
            for mine, theirs in zip(runs, speeds["defaults"], strict=True)
        )
        for name, runs in speeds.items()
    }
    grid = [name for name in speeds if name.startswith("grid")]
    best = min(grid, key=lambda name: median(seconds[name]), default="tune")
    for name, (file, changes) in settings.items():
        report.add(
            setting=name,
            seconds=median(seconds[name]),
            prefill=prefill[name],
            file=file.name,
            options=str(
                {
                    k: v
                    for part in changes.model_dump().values()
                    for k, v in part.items()
                }
            ),
        )
    report.details["seconds"] = seconds
    report.claim("prefill_to_defaults", prefill["tune"], ">=", 2.3)
    if grid:
        to_best = median(
            a / b for a, b in zip(seconds["tune"], seconds[best], strict=True)
        )
        report.claim("time_to_best_of_grid", to_best, "<=", 1.03)


def main() -> int:
    """Run the script."""
    parser = arguments(__doc__)
    parser.add_argument("--no-grid", action="store_true", help="only the defaults")
    options = parse(parser)
    report = Report("tune", options)
    with tempfile.TemporaryDirectory() as scratch:
        measure(options, report, Path(scratch))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
