"""`simulate`: the same requests under several policies, on a machine that is a formula."""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pyllama_raw.cli.options import given
from pyllama_raw.engine.logs import RequestLog, StepLog, read_records, write_records
from pyllama_raw.engine.watcher import StepRecord
from pyllama_raw.errors import ConfigError, PyllamaError
from pyllama_raw.lab.arguments import OF_SCHEDULER
from pyllama_raw.lab.arrivals import Requests
from pyllama_raw.lab.sim import (
    CostModel,
    Figures,
    Guessed,
    Machine,
    Trace,
    Workload,
    fit,
    table,
    until_next,
)
from pyllama_raw.lab.sim import simulate as run
from pyllama_raw.options.profile import check_writable
from pyllama_raw.policy import make_policy

FIGURE = Path("compared.svg")  # of several policies, unless another is asked for


def simulate(options: Namespace) -> int:
    """Run the command; return its exit status."""
    if options.fit is not None:
        return _fit(options)
    for path in (options.steps, options.figure):
        if path is not None:
            check_writable(path)
    machine, workload = _machine(options), _workload(options)
    for name in options.compare:
        make_policy(name)  # a mistake shows before the first run
    total = len(options.compare) * workload.n_requests
    with tqdm(total=total, unit=" requests", unit_scale=True, disable=None) as bar:
        results, failures = [], []
        for index, name in enumerate(options.compare, 1):
            try:
                mine = replace(machine, policy=name)
                results.append(_run_one(options, workload, mine, bar))
            except PyllamaError as error:  # the table of the others is worth as much
                failures.append(f"error: {error}")
            if bar.disable:  # no terminal: a line for who reads a log
                sys.stderr.write(f"{index}/{len(options.compare)} simulated: {name}\n")
    if results:
        sys.stdout.write("\n".join(table(results)) + "\n")
    if options.figure is not None or len(results) > 1:
        sys.stdout.write(_figure(results, options.figure) + "\n")
    sys.stdout.flush()
    sys.stderr.write("".join(f"{line}\n" for line in failures))
    return 1 if failures or any(result.n_faults for result in results) else 0


def _run_one(
    options: Namespace, workload: Requests, machine: Machine, bar: tqdm[Any]
) -> Figures:
    """Simulate one policy, and write what is asked for."""
    name, folder = machine.policy, options.request_logs
    bar.set_description(name)
    steps, requests = StepLog(), RequestLog(workload.n_requests)
    figures = run(
        workload,
        machine,
        n_replicas=options.replicas,
        router=options.router,
        log=None if options.steps is None else steps,
        watchers=() if folder is None else [requests],
        on_end=lambda *_: bar.update(),
        keep_going=options.keep_going,
    )
    if options.steps is not None:
        write_records(options.steps, steps)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write_records(folder / f"{name}.jsonl", requests)
    return figures


def _figure(results: list[Figures], file: Path | None) -> str:
    """Draw *results*, and say where; a file that nobody asked for may be missing."""
    path = file or FIGURE
    try:
        check_writable(path)
        draw(results, path)
    except (ConfigError, OSError) as error:
        if file is not None:
            raise
        return f"no figure: {error}"
    return f"figure: {path}"


def draw(results: list[Figures], path: Path) -> None:
    """The latencies of *results*, in a file."""
    try:
        from pyllama_raw.lab.plot import compared
    except ImportError as error:
        raise ConfigError(f"{error}: run `pip install matplotlib`") from error
    (figure,) = compared(results).values()
    figure.savefig(path, dpi=150)


def _fit(options: Namespace) -> int:
    steps, out = options.fit
    check_writable(out)
    try:
        records = read_records(steps, StepRecord)
    except ValueError as error:
        raise ConfigError(f"{steps} is no step log: {error}") from error
    result = fit(until_next(records))
    result.cost.save(out)
    sys.stdout.write(
        f"{result.n_steps} steps, R2 {result.r2:.3f}; of steps held out: median error "
        f"{result.error:.1%}, error of their total {result.total_error:.1%}\n"
    )
    return 0


def _machine(options: Namespace) -> Machine:
    options_of_scheduler = given(
        options, (*OF_SCHEDULER, "budget_mode", "prefill_order")
    )
    cost = CostModel() if options.cost is None else CostModel.load(options.cost)
    return Machine(
        n_cells=options.cells,
        cached_tokens=options.cached_tokens,
        speculation=options.speculation,
        repetition=options.repetition,
        cost=cost,
        **options_of_scheduler,
    )


def _workload(options: Namespace) -> Requests:
    """The requests; policies know the true outputs unless flags say something else."""
    source, sigma, max_tokens = _source(options), options.guess, options.max_tokens
    if sigma is None and max_tokens is None:
        return source
    return Guessed(source, sigma, max_tokens, options.seed)


def _source(options: Namespace) -> Workload | Trace:
    if options.trace is not None:
        return Trace.read(options.trace, options.requests, options.speed)
    return Workload(
        n_requests=options.requests or 1000,
        rate=options.rate,
        burstiness=options.burstiness,
        prompt=options.prompt,
        output=options.output,
        n_groups=options.groups,
        prefix_tokens=options.prefix_tokens,
        n_clients=options.clients,
        heavy=options.heavy,
        deadline_s=options.deadline,
        seed=options.seed,
    )
