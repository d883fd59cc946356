"""
Recorded arrivals as calls.

Where a trace has only lengths, prompts are seeded text that nothing repeats; equal
hash_ids of one seed are equal blocks. Requests without output (failed when they were
recorded) are left out, and those that warmed an engine up. Times count from the first
request. A request log has requests in the order in which they ended; they are sorted by the
time they came.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from pyllama_raw.engine.request_log import RequestRecord, warms_up
from pyllama_raw.errors import ConfigError
from pyllama_raw.lab.bench.call import Call, Prompt
from pyllama_raw.lab.bench.trace_formats import Arrival, Row, logged, parser_for
from pyllama_raw.lab.bench.writer import Writer, generator
from pyllama_raw.options.arguments import checked_options


def read(path: Path, limit: int | None = None) -> list[Arrival]:
    """
    The first *limit* requests of a trace file.

    Raises:
        ConfigError: names the line that is not understood.
    """
    arrivals: list[Arrival] = []
    parse = None
    for number, row in _rows(path):
        if len(arrivals) == limit and parse is not logged:
            break
        try:
            values = json.loads(row) if isinstance(row, str) else row
            parse = parse or parser_for(values)
            arrival = parse(values)
            _check_turn(arrival, len(arrivals))
            checked_options(arrival.asked)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}, line {number}: {error!r}") from error
        if _counts(arrival):
            arrivals.append(arrival)
    if not arrivals:
        raise ConfigError(f"{path}: no requests in it")
    if parse is logged:
        arrivals.sort(key=_when)
    return _from_first(arrivals[:limit])


def of_log(log: Iterable[RequestRecord]) -> list[Arrival]:
    """The requests of a request log, as read() has them."""
    arrivals = [logged(record._asdict()) for record in log]
    return _from_first(sorted(filter(_counts, arrivals), key=_when))


def _counts(arrival: Arrival) -> bool:
    """Whether it had output, and did not only warm an engine up."""
    return arrival.n_output >= 1 and not warms_up(
        arrival.fields_of_call.get("policy_data")
    )


def _when(arrival: Arrival) -> float:
    return arrival.at_s


def _from_first(arrivals: list[Arrival]) -> list[Arrival]:
    start = arrivals[0].at_s if arrivals else 0.0
    return [
        replace(arrival, at_s=max(arrival.at_s - start, 0.0)) for arrival in arrivals
    ]


def calls_of(
    arrivals: Iterable[Arrival],
    writer: Writer,
    *seed: object,
    speed: float = 1.0,
    length_scale: float = 1.0,
) -> list[Call]:
    """
    Calls for *arrivals*.

    Args:
        speed: 2 replays in half the time.
        length_scale: prompts, blocks and outputs become so many times as long.
    """
    calls = []
    for index, arrival in enumerate(arrivals):
        prompt = _prompt(arrival, writer, length_scale, seed, index)
        n_output = _scaled(arrival.n_output, length_scale)
        calls.append(
            Call(prompt, n_output, arrival.at_s / speed, **arrival.fields_of_call)
        )
    return calls


def _check_turn(arrival: Arrival, n_before: int) -> None:
    after = arrival.fields_of_call.get("after")
    if after is not None and not 0 <= after < n_before:
        raise ValueError(f"after={after}: {n_before} requests came before")


def _prompt(
    arrival: Arrival, writer: Writer, scale: float, seed: object, index: int
) -> Prompt:
    if arrival.prompt is not None:
        return arrival.prompt
    n_left = _scaled(arrival.n_prompt, scale)
    if not arrival.blocks:
        return writer.prompt(generator(seed, "call", index), n_left)
    parts = []
    for block in arrival.blocks:
        n_block = min(_scaled(arrival.block, scale), n_left)
        parts.append(writer.tokens(generator(seed, "block", block), n_block))
        n_left -= n_block
    parts.append(writer.tokens(generator(seed, "call", index), n_left))
    return writer.joined(parts)


def _scaled(count: int, scale: float) -> int:
    return max(round(count * scale), 1)


def _rows(path: Path) -> Iterable[tuple[int, str | Row]]:
    """Rows of a table, or lines of JSON, with their number in the file."""
    with path.open(encoding="utf-8", newline="") as lines:
        if path.suffix == ".csv":
            yield from enumerate(csv.DictReader(lines), 2)
        else:
            yield from ((n, line) for n, line in enumerate(lines, 1) if line.strip())
