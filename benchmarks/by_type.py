"""
Prefill and decode by type of weights and number of streams, against peers at their best.

A batch is 128 tokens in for all streams at once, then 64 steps of all streams. Ours runs through
AsyncEngine.complete_many() with ids of tokens, greedy, without a cache, and samples its
tokens. Its phases are told apart by its step log: prefill ends when the first step that only
decodes is planned, and decode takes the rest of the caller's time. llama.cpp and ik_llama.cpp run
llama-batched-bench, which does not sample. OpenVINO GenAI samples, and runs the types that it reads.
Each peer runs in all settings of peers/batched_bench.py that may be best. In the rounds of
--trials, which do not count, all of them run; those that are the best in one figure go on, and
each figure is compared with the best of these.

Weights are random, in the shapes of scripts/large_models.py, a file for each type, kept in the
user's cache. Shares are parts of what this CPU can do at most, measured at the beginning:
of products of bytes, and of decode also the reading of weights.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from operator import attrgetter
from pathlib import Path
from statistics import median
from subprocess import CalledProcessError
from time import perf_counter
from typing import Any, NamedTuple

import anyio

import build_lib
from benchmarks.load.client import fixed_length
from benchmarks.load.limits import Limits, Weights, limits
from benchmarks.load.measure import NO_DRAFTS, Report, arguments, run_script, say
from benchmarks.load.workloads import generator
from benchmarks.peers import commit_of_ik, is_there
from benchmarks.peers.batched_bench import (
    IK,
    OPENMP,
    OPENVINO,
    OWN,
    SETTINGS,
    Phases,
    batched_bench,
)
from benchmarks.peers.openvino_bench import TYPES as OPENVINO_TYPES
from benchmarks.peers.openvino_bench import openvino_bench
from pyllama_raw import (
    AsyncEngine,
    CacheConfig,
    ContextConfig,
    EngineConfig,
    SchedulerConfig,
)
from pyllama_raw.engine.estimate import kernels_used
from pyllama_raw.engine.watcher import StepRecord, Watcher
from pyllama_raw.lab.report import digits
from pyllama_raw.lab.targets import machine
from pyllama_raw.native.libllama import cpu_level
from pyllama_raw.native.model import Model
from pyllama_raw.options.fetch import cache_dir
from scripts.large_models import typed_model

N_PROMPT, N_OUTPUT, CELLS = 128, 64, 256
N_BATCH = 2048  # of llama.cpp by default
N_REQUESTS = 8  # of a measurement at least: fewer streams repeat
OURS = "ours"
DEFAULT = "default"  # the model of --model, in its own type
SHAPES = {"230m": "llama-230m", "1b": "llama-1b"}
TYPES = ("Q4_K_M", "Q5_K_M", "Q6_K", "Q4_0", "Q4_1", "Q8_0", "IQ4_XS")
PEER_OF = {
    OWN: "llama.cpp",
    OPENMP: "llama.cpp",
    IK: "ik_llama.cpp",
    OPENVINO: "OpenVINO GenAI",
}
PEERS = tuple(dict.fromkeys(PEER_OF.values()))
SPEEDS = {
    "prefill": attrgetter("prefill_tok_per_s"),
    "decode": attrgetter("decode_tok_per_s"),
    "all": attrgetter("tok_per_s"),
}

Runs = dict[str, list[Phases]]  # by system, OURS or a setting of a peer: one a round


class Cell(NamedTuple):
    """What all systems do in turn."""

    model: str
    weights: str
    n_streams: int
    path: Path

    def __str__(self) -> str:
        return f"{self.model} {self.weights}, {self.n_streams} streams"


class Steps(Watcher):
    """Steps of a batch."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def stepped(self, step: StepRecord) -> None:
        self.records.append(step)

    def prefill_s(self) -> float:
        """From the first step to the first of those that only decode; forgets all steps."""
        records, self.records = self.records, []
        last = max(i for i, step in enumerate(records) if step.n_prefill)
        return records[last + 1].at_s - records[0].at_s


# What is measured, one system at a time.


async def measure(options: Namespace, report: Report) -> None:
    """Trials of all settings, then rounds; in each all cells and systems have their turn."""
    systems, cells = [OURS, *settings_of(options)], list(cells_of(options))
    level = build_lib.cpu_of_library()
    if systems[1:] and cpu_level() != level:
        raise SystemExit(
            f"our library is built for the CPU level {cpu_level()}, and {build_lib.cpu_level.VARIABLE} says "
            f"{level}, for which peers are built: build ours for it, too (scripts/bootstrap)"
        )
    trials: dict[Cell, Runs] = {cell: {} for cell in cells}
    rounds: dict[Cell, Runs] = {cell: {} for cell in cells}
    peak = peak_of(options.threads, level)
    report.details |= {"cpu_level": level, "limits": peak and peak._asdict()}
    if any(peer_of(name) == "ik_llama.cpp" for name in systems[1:]):
        report.details["ik_commit"] = commit_of_ik()
    for index in range(options.trials + options.rounds):
        is_trial = index < options.trials
        count = f"round {index - options.trials + 1} of {options.rounds}"
        say("trials" if is_trial else count)
        for cell in cells:
            names = [name for name in systems if knows(name, cell)]
            names = names if is_trial else winners(trials[cell]) or names
            runs = (trials if is_trial else rounds)[cell]
            await turn(cell, names, options.threads, index, runs)
    for cell in cells:
        conclude(report, cell, rounds[cell], peak)
        report.details[str(cell)] = details(cell, trials[cell], rounds[cell])
    if options.out is not None:
        text = "\n".join([*heading(options, report.details), *markdown(report.rows)])
        Path(options.out).with_suffix(".md").write_text(f"{text}\n")


async def turn(
    cell: Cell, names: Sequence[str], threads: int, index: int, runs: Runs
) -> None:
    """All systems *names* on one cell; who is first rotates."""
    first = index % len(names)
    for name in [*names[first:], *names[:first]]:
        if name == OURS:
            phases = await ours(cell, threads, index)
        else:
            phases = await anyio.to_thread.run_sync(theirs, cell, threads, name)
        runs.setdefault(name, []).append(phases)


async def ours(cell: Cell, threads: int, seed: int) -> Phases:
    """Our engine, open only for this."""
    n_tokens = cell.n_streams * N_PROMPT
    config = EngineConfig(
        speculation=NO_DRAFTS,
        context=ContextConfig(
            n_ctx=n_cells(cell.n_streams),
            n_batch=max(n_tokens, N_BATCH),
            n_threads=threads,
        ),
        # As the peers: all prompts are one batch.
        scheduler=SchedulerConfig(
            n_slots=cell.n_streams, token_budget=n_tokens, prefill_quantum=N_PROMPT
        ),
        cache=CacheConfig(mode="off"),
    )
    steps, total = Steps(), Phases()
    async with AsyncEngine.open(cell.path, config) as engine:
        await engine.complete([1] * 16, fixed_length(2))
        await anyio.to_thread.run_sync(engine.watch(steps).result)
        for prompts in batches(cell.n_streams, seed):
            started = perf_counter()
            # The first token is of the prompt; behind it come as many steps as the peers'.
            await engine.complete_many(prompts, fixed_length(N_OUTPUT + 1))
            wall_s = perf_counter() - started
            prefill_s = steps.prefill_s()
            n_output = cell.n_streams * N_OUTPUT
            total += Phases(n_tokens, prefill_s, n_output, wall_s - prefill_s)
    return total


def batches(n_streams: int, seed: int) -> Iterator[list[list[int]]]:
    """Prompts of random tokens, which any vocabulary has, new ones for each stream."""
    rng = generator(seed)
    for _ in range(n_repeats(n_streams)):
        yield [rng.choices(range(256), k=N_PROMPT) for _ in range(n_streams)]


def n_repeats(n_streams: int) -> int:
    """Batches of a measurement."""
    return max(N_REQUESTS // n_streams, 1)


def n_cells(n_streams: int) -> int:
    """Of all streams; nobody computes those that are not in use."""
    return max(n_streams * CELLS, N_BATCH)


def theirs(cell: Cell, threads: int, setting: str) -> Phases:
    """A peer in one setting."""
    sizes = {
        "n_prompt": N_PROMPT,
        "n_output": N_OUTPUT,
        "n_slots": cell.n_streams,
        "repeats": n_repeats(cell.n_streams),
        "threads": threads,
    }
    how = SETTINGS[setting]
    if how.program == OPENVINO:
        level = build_lib.cpu_of_library()
        return openvino_bench(cell.path, **sizes, cpu_level=level, properties=how.flags)
    n_ctx = n_cells(cell.n_streams)
    return batched_bench(cell.path, **sizes, n_ctx=n_ctx, setting=how)


def peak_of(threads: int, level: str) -> Limits | None:
    """What the CPU can do with instructions of *level*; without a compiler nobody knows."""
    try:
        return limits(threads, level)
    except (OSError, CalledProcessError) as error:
        say(f"no shares: {error}")
        return None


def settings_of(options: Namespace) -> list[str]:
    """Settings of the peers that are there."""
    names = [] if options.no_peers else options.settings
    missing = {SETTINGS[name].program for name in names}
    missing -= {program for program in missing if is_there(program)}
    for program in sorted(missing):
        say(f"no {program}: benchmarks/peers/setup --help says how to build it")
    return [name for name in names if SETTINGS[name].program not in missing]


def knows(name: str, cell: Cell) -> bool:
    """Whether a system runs the type of *cell*; libraries of ggml's kinds run all."""
    is_openvino = name != OURS and SETTINGS[name].program == OPENVINO
    return not is_openvino or cell.weights.startswith(OPENVINO_TYPES)


def cells_of(options: Namespace) -> Iterator[Cell]:
    """Of each shape all types and numbers of streams; models that are missing are made."""
    folder = cache_dir() / "large-models"
    for model in options.models:
        if model == DEFAULT:
            path = Path(options.model)
            files = [(Weights.of(path).type_name, path)]
        else:
            say(f"{model}: files of all types are in {folder}, or made now")
            files = [
                (name, typed_model(SHAPES[model], name.lower(), folder))
                for name in options.types
            ]
        for (weights, path), n_streams in product(files, options.streams):
            yield Cell(model, weights, n_streams, path)


# What is made of it.


def peer_of(setting: str) -> str:
    """Whose setting it is."""
    return PEER_OF[SETTINGS[setting].program]


def speed(runs: Sequence[Phases], figure: str) -> float:
    """Tokens a second, the median of the rounds."""
    return median(map(SPEEDS[figure], runs))


def best_setting(runs: Runs, peer: str, figure: str) -> str | None:
    """The one of *peer* that is the fastest in *figure*; None if it did not run."""
    names = [name for name in runs if name != OURS and peer_of(name) == peer]
    return max(names, key=lambda name: speed(runs[name], figure), default=None)


def winners(trials: Runs) -> list[str]:
    """Ours, and the settings that are the best of their peer in one figure."""
    best = {best_setting(trials, *pair) for pair in product(PEERS, SPEEDS)}
    return [name for name in trials if name == OURS or name in best]


def conclude(report: Report, cell: Cell, runs: Runs, peak: Limits | None) -> None:
    """Rows of one cell; a ratio is ours to the system of the row."""
    weights = Weights.of(cell.path)
    for figure, value in SPEEDS.items():
        best = {peer: best_setting(runs, peer, figure) for peer in PEERS}
        for system, name in {OURS: OURS, **best}.items():
            if name is None:
                continue
            row: dict[str, Any] = {
                "model": cell.model,
                "weights": cell.weights,
                "streams": cell.n_streams,
                "figure": figure,
                "system": system,
                "setting": "" if name == OURS else name,
                "tok_per_s": speed(runs[name], figure),
            }
            if name != OURS:
                pairs = zip(runs[OURS], runs[name], strict=True)
                ratios = [value(mine) / value(other) for mine, other in pairs]
                row["ours_to_it"] = median(ratios)
                row |= {"smallest": min(ratios), "largest": max(ratios)}
                claim = f"{cell}, {figure}, to {system}"
                report.claim(claim, median(ratios), ">=", 1)
            report.add(**row, **shares(cell, runs[name], figure, weights, peak))


def shares(
    cell: Cell,
    runs: Sequence[Phases],
    figure: str,
    weights: Weights,
    peak: Limits | None,
) -> dict[str, float]:
    """Parts of the CPU's limits that a system used in *figure*, by the median of its rounds."""
    parts: dict[str, float] = {}
    if peak is None or figure == "all":
        return parts
    tok_per_s = speed(runs, figure)
    if peak.int8_gops:
        # Each token of an output has a row of logits, and of a prompt the last one.
        n_rows = N_PROMPT if figure == "decode" else 1
        gops = weights.gops(N_PROMPT, n_rows) / N_PROMPT
        parts["of_int8"] = gops * tok_per_s / peak.int8_gops
    if figure == "decode":
        n_steps = tok_per_s / cell.n_streams
        parts["of_read"] = 1e-9 * weights.n_bytes * n_steps / peak.read_gb_per_s
    return parts


def details(cell: Cell, trials: Runs, rounds: Runs) -> dict[str, Any]:
    """Every run of a cell, and whose kernels compute ours."""
    with Model.load(cell.path) as model:
        kernels = kernels_used(model, EngineConfig())
    parts = {"trials": trials, "rounds": rounds}
    return {"kernels": kernels} | {
        part: {name: [asdict(run) for run in phases] for name, phases in runs.items()}
        for part, runs in parts.items()
    }


def heading(options: Namespace, facts: Mapping[str, Any]) -> Iterator[str]:
    """Where and how the figures were taken."""
    here, peak, ik = machine(), facts["limits"], facts.get("ik_commit")
    yield (
        f"{here['cpu']}, built for {facts['cpu_level']}, {options.threads} threads; "
        f"{options.rounds} rounds; commit {here['commit']}, llama.cpp "
        f"{here['llama_cpp']}{f', ik_llama.cpp {ik}' if ik else ''}; {here['date']}."
    )
    if peak is not None:
        yield (
            f"Limits: {peak['int8_gops']:.0f} G operations/s of bytes "
            f"({peak['instructions'] or 'unknown'}), {peak['read_gb_per_s']:.1f} GB/s read."
        )
    yield ""


def markdown(rows: Sequence[Any]) -> list[str]:
    """A table with a line for each cell and figure."""
    heads = ["model", "weights", "streams", "figure", "ours, tokens/s", "of limits"]
    peers = [peer for peer in PEERS if any(row["system"] == peer for row in rows)]
    for peer in peers:
        heads += [peer, "set as", "of limits", "ours to it"]
    lines: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = tuple(str(row[name]) for name in heads[:4])
        lines.setdefault(key, {})[row["system"]] = row
    table = [heads, ["---"] * len(heads)]
    for key, systems in lines.items():
        row = systems[OURS]
        cells = [*key, digits(row["tok_per_s"]), limits_text(row)]
        for peer in peers:
            row = systems.get(peer)
            cells += [""] * 4 if row is None else peer_cells(row)
        table.append(cells)
    return [f"| {' | '.join(cells)} |" for cells in table]


def peer_cells(row: Any) -> list[str]:
    """What the table tells of one peer."""
    ratio, low, high = (
        f"{row[name]:.2f}" for name in ("ours_to_it", "smallest", "largest")
    )
    span = f"**{ratio}** [{low}, {high}]"
    return [digits(row["tok_per_s"]), row["setting"], limits_text(row), span]


def limits_text(row: Any) -> str:
    """Shares of products of bytes and of reading."""
    parts = {"int8": row.get("of_int8"), "read": row.get("of_read")}
    return ", ".join(f"{name} {part:.0%}" for name, part in parts.items() if part)


def main() -> int:
    """Run the script."""
    parser = arguments(__doc__)
    parser.set_defaults(rounds=10)
    add = parser.add_argument
    add("--types", nargs="+", choices=TYPES, default=TYPES, help="of weights (all)")
    add("--streams", nargs="+", type=int, default=[1, 8, 32])
    names = [*SHAPES, DEFAULT]
    add("--models", nargs="+", choices=names, default=["230m"], help="shapes (230m)")
    add("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    add("--trials", type=int, default=1, help="rounds that choose settings (1)")
    return run_script("by_type", measure, parser)


if __name__ == "__main__":
    sys.exit(main())
