"""
Recorded arrivals as calls.

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
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pyllama_raw.engine.warm_up import warms_up
from pyllama_raw.errors import ConfigError
from pyllama_raw.lab.bench.call import ASKED, Call, Prompt
from pyllama_raw.lab.bench.words import generator
from pyllama_raw.lab.bench.writer import Writer
from pyllama_raw.options.arguments import checked_options
from pyllama_raw.options.requests import PolicyData

MOONCAKE_BLOCK = 512  # tokens

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace."""

    at_s: float
    n_prompt: int
    n_output: int
    blocks: tuple[int, ...] = ()  # what each block of the prompt is
    prompt: Prompt | None = None  # the prompt itself, where the trace has it
    more: Mapping[str, Any] | None = None  # other fields of a Call
    block: int = MOONCAKE_BLOCK  # tokens of each of blocks but the last
    max_tokens: int | None = None  # that were allowed; None: n_output
    priority: int = 0
    deadline_s: float | None = None  # from its arrival
    client: str | None = None
    policy_data: PolicyData | None = None

    @property
    def counts(self) -> bool:
        """Whether it had output, and did not only warm an engine up."""
        return self.n_output >= 1 and not warms_up(self.policy_data)

    @property
    def asked(self) -> dict[str, Any]:
        """Options of the request."""
        return {name: getattr(self, name) for name in ASKED}


def read(path: Path, limit: int | None = None) -> list[Arrival]:
    """
    The first *limit* requests of a trace file.

    Raises:
        ConfigError: names the line that is not understood.
    """
    found: list[Arrival] = []
    parse = None
    for number, row in _rows(path):
        if len(found) == limit and parse is not logged:
            break
        try:
            values = json.loads(row) if isinstance(row, str) else row
            parse = parse or _parser_for(values)
            arrival = parse(values)
            _check_turn(arrival, len(found))
            checked_options(arrival.asked)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}, line {number}: {error!r}") from error
        if arrival.counts:
            found.append(arrival)
    if not found:
        raise ConfigError(f"{path}: no requests in it")
    if parse is logged:
        found = sorted(found, key=_when)[:limit]
    first = found[0].at_s
    return [replace(each, at_s=max(each.at_s - first, 0.0)) for each in found]


def _when(arrival: Arrival) -> float:
    return arrival.at_s


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
        call = Call(
            _prompt(arrival, writer, length_scale, seed, index),
            _scaled(arrival.n_output, length_scale),
            at_s=arrival.at_s / speed,
            **arrival.asked,
        )
        calls.append(replace(call, **(arrival.more or {})))
    return calls


def _check_turn(arrival: Arrival, n_before: int) -> None:
    after = (arrival.more or {}).get("after")
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


def _parser_for(row: Row) -> Callable[[Row], Arrival]:
    """By the keys of the first row."""
    for key, parse in PARSERS.items():
        if key in row:
            return parse
    known = ", ".join(PARSERS)
    raise ValueError(f"columns {sorted(row)}: no known format has them (of {known})")


def _ours(row: Row) -> Arrival:
    more = {key: row[key] for key in OWN_MORE if key in row}
    asked = {key: row[key] for key in ASKED if key in row}
    known = {"at_s", "prompt", "prompt_tokens", "max_tokens", *OWN_MORE, *ASKED}
    unknown = set(row) - known
    if unknown:
        raise ValueError(f"unknown keys {sorted(unknown)}")
    at_s, n_output = float(row.get("at_s", 0.0)), int(row["max_tokens"])
    if n_output < 1:
        raise ValueError(f"max_tokens={n_output}: give 1 or more")
    if "prompt" not in row:
        return Arrival(at_s, int(row["prompt_tokens"]), n_output, more=more, **asked)
    return Arrival(at_s, 0, n_output, prompt=row["prompt"], more=more, **asked)


OWN_MORE = {f.name for f in fields(Call)} - {"prompt", "max_tokens", "at_s", *ASKED}


def _mooncake(row: Row) -> Arrival:
    return Arrival(
        float(row["timestamp"]) / 1e3,
        int(row["input_length"]),
        int(row["output_length"]),
        tuple(row["hash_ids"]),
    )


def _azure(row: Row) -> Arrival:
    at = datetime.fromisoformat(row["TIMESTAMP"])
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    n_prompt, n_output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
    return Arrival(at.timestamp(), n_prompt, n_output)


def _burstgpt(row: Row) -> Arrival:
    n_prompt, n_output = int(row["Request tokens"]), int(row["Response tokens"])
    return Arrival(float(row["Timestamp"]), n_prompt, n_output)


def _vidur(row: Row) -> Arrival:
    n_prompt, n_output = float(row["num_prefill_tokens"]), row["num_decode_tokens"]
    return Arrival(float(row.get("arrived_at", 0)), int(n_prompt), int(float(n_output)))


def logged(row: Row) -> Arrival:
    """A record of a request log; its time is on the clock of the engine."""
    return Arrival(
        float(row["submitted_s"]),
        int(row["n_prompt"]),
        int(row["n_output"]),
        tuple(row["hash_ids"]),
        block=int(row["block"]),
        max_tokens=int(row["max_tokens"]),
        priority=int(row["priority"]),
        deadline_s=row["deadline_s"],
        client=row["client"],
        policy_data=row["policy_data"],
    )


PARSERS: dict[str, Callable[[Row], Arrival]] = {  # by a key that no one before has
    "submitted_s": logged,
    "num_prefill_tokens": _vidur,
    "max_tokens": _ours,
    "hash_ids": _mooncake,
    "ContextTokens": _azure,
    "Request tokens": _burstgpt,
}
