"""
Recorded requests as calls.

| format | file | prompt | keys or columns |
|---|---|---|---|
| ours | JSONL | text, ids, or so many tokens | at_s, prompt, max_tokens, client, ... |
| Mooncake | JSONL | by blocks of 512 tokens | timestamp (ms), *_length, hash_ids |
| Azure LLM | CSV | so many tokens | TIMESTAMP, ContextTokens, GeneratedTokens |
| BurstGPT | CSV | so many tokens | Timestamp (s), Request tokens, Response tokens |
| Vidur | CSV | so many tokens | arrived_at (s), num_prefill_tokens, num_decode_tokens |
| request log | JSONL | by blocks of `block` tokens | submitted_s, n_*, hash_ids, client, ... |

Where a trace has only lengths, prompts are seeded text that nothing repeats; equal
hash_ids of one seed are equal blocks. Requests without output (failed when they were
recorded) are left out, and those that warmed an engine up. Times count from the first
request. A request log has requests in the order in which they ended; they are sorted by the
time they came.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pyllama_raw.engine.logs import RequestRecord, warms_up
from pyllama_raw.errors import ConfigError
from pyllama_raw.lab.bench.calls import OPTIONS, Call, Prompt
from pyllama_raw.lab.bench.workloads import Writer, generator
from pyllama_raw.options.arguments import checked_options

MOONCAKE_BLOCK = 512  # tokens
Row = Mapping[str, Any]


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


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace."""

    at_s: float
    n_prompt: int
    n_output: int
    blocks: tuple[int, ...] = ()  # what each block of the prompt is
    prompt: Prompt | None = None  # the prompt itself, where the trace has it
    fields_of_call: Mapping[str, Any] = field(
        default_factory=dict
    )  # other fields of a Call
    block: int = MOONCAKE_BLOCK  # tokens of each of blocks but the last
    max_tokens: int | None = None  # that were allowed; None: n_output

    @property
    def asked(self) -> dict[str, Any]:
        """Options of the request."""
        return {
            name: self.fields_of_call[name]
            for name in OPTIONS
            if name in self.fields_of_call
        }


def parser_for(row: Row) -> Callable[[Row], Arrival]:
    """By the keys of the first row."""
    for key, parse in PARSERS.items():
        if key in row:
            return parse
    keys = ", ".join(PARSERS)
    raise ValueError(f"columns {sorted(row)}: no known format has them (of {keys})")


MORE = {f.name for f in fields(Call)} - {"prompt", "max_tokens", "at_s"}
OURS = {"at_s", "prompt", "prompt_tokens", "max_tokens", *MORE}


def _ours(row: Row) -> Arrival:
    if unknown := set(row) - OURS:
        raise ValueError(f"unknown keys {sorted(unknown)}")
    values = {key: row[key] for key in MORE if key in row}
    at_s, n_output = float(row.get("at_s", 0.0)), int(row["max_tokens"])
    if n_output < 1:
        raise ValueError(f"max_tokens={n_output}: give 1 or more")
    n_prompt = 0 if "prompt" in row else int(row["prompt_tokens"])
    return Arrival(
        at_s, n_prompt, n_output, prompt=row.get("prompt"), fields_of_call=values
    )


def _mooncake(row: Row) -> Arrival:
    return Arrival(
        float(row["timestamp"]) / 1e3,
        int(row["input_length"]),
        int(row["output_length"]),
        tuple(row["hash_ids"]),
    )


def _columns(at: str, n_prompt: str, n_output: str) -> Callable[[Row], Arrival]:
    """Reads three columns: a moment, which may be missing, and two counts."""

    def parse(row: Row) -> Arrival:
        counts = int(float(row[n_prompt])), int(float(row[n_output]))
        return Arrival(_moment(row.get(at, "0")), *counts)

    return parse


def _moment(text: str) -> float:
    """Seconds, or a date and time."""
    try:
        return float(text)
    except ValueError:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def logged(row: Row) -> Arrival:
    """A record of a request log; its time is on the clock of the engine."""
    return Arrival(
        float(row["submitted_s"]),
        int(row["n_prompt"]),
        int(row["n_output"]),
        tuple(row["hash_ids"]),
        block=int(row["block"]),
        max_tokens=int(row["max_tokens"]),
        fields_of_call={name: row[name] for name in OPTIONS},
    )


PARSERS: dict[str, Callable[[Row], Arrival]] = {  # by a key that no one before has
    "submitted_s": logged,
    "num_prefill_tokens": _columns(
        "arrived_at", "num_prefill_tokens", "num_decode_tokens"
    ),
    "max_tokens": _ours,
    "hash_ids": _mooncake,
    "ContextTokens": _columns("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "Request tokens": _columns("Timestamp", "Request tokens", "Response tokens"),
}
