"""
Fail each native call of some runs, once at each index, and look at what comes of it.

    python -m scripts.fault_matrix [RUN ...] [--thin] [--values] [--only CALL] [--out FILE]

Of a function that is called more than 50 times only so many calls are failed, evenly spread; with
--thin only the first, second, middle and last one. A run is played
in a process of its own, because a call that is not checked may end it. The exit status is 1 if
anything was not as it must be.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MOST = 50  # calls of a function, evenly spread
DEAD_S = 90  # a process that is silent for so long hangs in C


def main() -> None:
    """Try all runs, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("runs", nargs="*", metavar="RUN")
    parser.add_argument(
        "--thin", action="store_true", help="few calls of each function"
    )
    parser.add_argument(
        "--values", action="store_true", help="only failures that have a value"
    )
    parser.add_argument("--only", metavar="CALL", help="a function")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--start", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.start is not None:
        play_all(options.runs[0], options.start, options)
        return
    from scripts.faults.runs import runs

    report = {name: tried(name, options) for name in options.runs or runs()}
    for name, figures in report.items():
        print(name, json.dumps({k: v for k, v in figures.items() if k != "wrong"}))
        print(*(f"  {mistake}" for mistake in figures["wrong"]), sep="\n", end="")
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    raise SystemExit(any(figures["wrong"] for figures in report.values()))


def tried(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one run, whose processes are begun again after a cell that ended one."""
    counts: Counter[str] = Counter()
    calls: set[str] = set()
    stopped: Counter[str] = Counter()
    wrong: list[str] = []
    start = 0
    while True:
        last = None
        for line in _lines(name, start, options):
            match line["is"]:
                case "begin":
                    last = line["cell"]
                case "end":
                    last, start = None, start + 1
                    calls.add(line["call"])
                    counts["cells"] += 1
                    counts[line["came"]] += 1
                    stopped[line["call"]] += line["came"] == "engine ended"
                    wrong += [
                        f"{line['cell']}: {mistake}" for mistake in line["broken"]
                    ]
        if last is None:
            break
        counts["cells"] += 1
        wrong.append(f"{last}: the process ended")
        start += 1
    return {
        "calls": len(calls),
        **counts,
        "wrong": wrong,
        "ends engines": {k: n for k, n in stopped.items() if n},
    }


def _lines(name: str, start: int, options: argparse.Namespace) -> Iterator[Any]:
    command = [
        sys.executable,
        "-m",
        "scripts.fault_matrix",
        name,
        "--start",
        str(start),
    ]
    command += ["--thin"] * options.thin + ["--values"] * options.values
    command += [] if options.only is None else ["--only", options.only]
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        line_seen = False
        for line in process.stdout:
            line_seen = True
            yield json.loads(line)
    if process.returncode and not line_seen:
        raise SystemExit(f"{name}: no cell could be tried")


def play_all(name: str, start: int, options: argparse.Namespace) -> None:
    """The cells of a run from number *start* on, told line by line."""
    from scripts.faults.lib import install

    faulty = install()
    from scripts.faults.cell import Ground, judge, play
    from scripts.faults.runs import runs

    logging.disable()
    warnings.simplefilter("ignore")
    run = runs()[name]
    wholes = [play(run, faulty, None) for _ in range(3)]
    play(run, faulty, None)
    undisturbed = wholes[0]
    for other in wholes:
        other.compared(undisturbed)
        assert not other.broken + other.errors, (other.broken, other.errors)
    faulthandler.dump_traceback_later(DEAD_S, exit=True)  # has a thread of its own
    ground = Ground(faulty)
    ground.left()
    faulty_counts = _counted(run, faulty)
    for number, fault in enumerate(_faults(faulty_counts, options)):
        if number < start:
            continue
        cell = f"{fault.name} {fault.index} {fault.way}"
        _say({"is": "begin", "cell": cell})
        faulthandler.dump_traceback_later(DEAD_S, exit=True)
        outcome = play(run, faulty, fault)
        judge(outcome, undisturbed, fault, run)
        outcome.broken += [f"left: {remainder}" for remainder in ground.left()]
        message = {
            "is": "end",
            "cell": cell,
            "call": fault.name,
            "came": _came(outcome),
        }
        _say(message | {"broken": outcome.broken})


def _counted(run: Any, faulty: Any) -> dict[str, int]:
    """Calls of an undisturbed run."""
    import anyio

    from scripts.faults.cell import Outcome, _play

    faulty.begin(None)
    anyio.run(_play, run, Outcome())
    return dict(faulty.counts)


def _faults(counts: dict[str, int], options: argparse.Namespace) -> Iterator[Any]:
    from scripts.faults.calls import failures, is_failed
    from scripts.faults.lib import RAISES, Fault

    for name, count in sorted(counts.items()):
        if not is_failed(name) or options.only not in (None, name):
            continue
        few = sorted({0, 1, count // 2, count - 1} & set(range(count)))
        step = -(-count // MOST)
        ways = failures(name) or (() if options.values else (RAISES,))
        for way in ways:
            for index in few if options.thin else range(0, count, step):
                yield Fault(name, index, way)


def _came(outcome: Any) -> str:
    if any(opening != "opened" for opening in outcome.openings):
        return "not opened"
    if outcome.n_stopped:
        return "engine ended"
    return "requests ended" if outcome.errors else "nobody noticed"


def _say(line: dict[str, object]) -> None:
    print(json.dumps(line, default=str), flush=True)


if __name__ == "__main__":
    main()
