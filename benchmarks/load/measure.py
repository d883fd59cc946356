"""
From times to figures: percentiles, ratios, a table and a JSON file.

Rules:
1. Two systems are compared within one run: in each round both do the same work, one
   after the other. The ratio is the median of the rounds' ratios.
2. A claim is a figure with its limit; a script ends with status 1 if one does not hold.
3. Threads of libllama wait for each other, so one busy neighbour can slow a system many
   times over, and not each alike. Timed figures taken beside such a neighbour prove
   nothing: the report says so, and the script ends with status 2.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from inspect import iscoroutinefunction
from pathlib import Path
from statistics import median
from typing import Any, Literal

import anyio

from pyllama_raw.api.results import percentile
from pyllama_raw.lab.report import table
from pyllama_raw.lab.targets import machine
from pyllama_raw.options.config import SpeculationConfig
from pyllama_raw.options.machine import MAX_OTHERS

from .machine import OthersCpu

__all__ = [
    "NO_DRAFTS",
    "Claim",
    "Report",
    "arguments",
    "median_ratio",
    "parse",
    "percentile",
    "run_script",
    "say",
]

TEST_MODEL = "PYLLAMA_RAW_TEST_MODEL"
# Where drafts are not measured, because outputs that repeat themselves would seem faster.
NO_DRAFTS = SpeculationConfig(mode="off")


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median of above[i] / below[i], i being the round."""
    return median(a / b for a, b in zip(above, below, strict=True))


@dataclass(frozen=True, slots=True)
class Claim:
    """A figure and the limit it has to keep."""

    name: str
    value: float
    relation: Literal["<=", ">="]
    limit: float

    @property
    def holds(self) -> bool:
        """False for nan, too."""
        if self.relation == "<=":
            return self.value <= self.limit
        return self.value >= self.limit

    def __str__(self) -> str:
        verdict = "holds" if self.holds else "DOES NOT HOLD"
        return f"{self.name}: {self.value:.4g} {self.relation} {self.limit:g} {verdict}"


@dataclass
class Report:
    """What one script found. Make it before the work begins."""

    name: str
    options: Namespace
    timed: bool = True  # its claims are about time
    rows: list[Mapping[str, object]] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)  # only in the file
    others: OthersCpu = field(default_factory=OthersCpu)

    def add(self, **row: object) -> None:
        """One more line of the table."""
        self.rows.append(row)

    def claim(
        self, name: str, value: float, relation: Literal["<=", ">="], limit: float
    ) -> None:
        """State that *value* keeps *limit*."""
        self.claims.append(Claim(name, value, relation, limit))

    def finish(self) -> int:
        """Print the table, write the file, return the exit status."""
        n_others = self.others.n_cpus()
        disturbed = self.timed and not n_others <= MAX_OTHERS
        lines = [*table(self.rows), *map(str, self.claims)]
        lines.append(f"other processes kept {n_others:.2f} CPUs busy")
        if disturbed:
            lines.append(f"NO PROOF: more than {MAX_OTHERS}, run it on a quiet machine")
        print("\n".join(lines), flush=True)
        if self.options.out is not None:
            record = self._record() | {"others_cpus": n_others, "disturbed": disturbed}
            text = json.dumps(record, indent=2, default=str)
            Path(self.options.out).write_text(text + "\n")
        if disturbed:
            return 2
        return 0 if all(claim.holds for claim in self.claims) else 1

    def _record(self) -> dict[str, Any]:
        options = {k: v for k, v in vars(self.options).items() if k != "out"}
        if "model" in options:
            options["model"] = Path(options["model"]).name
        return {
            "benchmark": self.name,
            "machine": machine(),
            "options": options,
            "rows": self.rows,
            "claims": [asdict(c) | {"holds": c.holds} for c in self.claims],
            "details": self.details,
        }


def arguments(description: str | None) -> ArgumentParser:
    """The options every script has."""
    parser = ArgumentParser(description=(description or "").strip().split("\n")[0])
    parser.add_argument(
        "--rounds", type=int, default=5, help="interleaved repeats (%(default)s)"
    )
    parser.add_argument("--out", metavar="FILE", help="write the results as JSON")
    parser.add_argument("--model", help=f"a GGUF file; else ${TEST_MODEL}, the default")
    parser.add_argument("--threads", type=int, help="of everyone (one a CPU)")
    parser.add_argument("--no-peers", action="store_true", help="measure only ours")
    return parser


def parse(parser: ArgumentParser) -> Namespace:
    """
    Parse the command line; model and threads become definite.

    From here on SIGTERM ends a script as ^C does, so that no server outlives it.
    """
    from pyllama_raw import ContextConfig
    from pyllama_raw.options.models import resolve_model

    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    options.model = resolve_model(options.model or os.environ.get(TEST_MODEL))
    options.threads = ContextConfig(n_threads=options.threads).threads
    return options


def run_script(
    name: str,
    measure: Callable[[Namespace, Report], object],
    parser: ArgumentParser,
    *,
    timed: bool = True,
) -> int:
    """What most scripts do: the exit status of what *measure* reports; it may be async."""
    options = parse(parser)
    report = Report(name, options, timed=timed)
    if iscoroutinefunction(measure):
        anyio.run(measure, options, report)
    else:
        measure(options, report)
    return report.finish()


def say(line: str) -> None:
    """Progress, beside the table."""
    sys.stderr.write(f"{line}\n")
