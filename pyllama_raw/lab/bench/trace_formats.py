"""
Formats of recorded requests.

| format | file | prompt | keys or columns |
|---|---|---|---|
| ours | JSONL | text, ids, or so many tokens | at_s, prompt, max_tokens, client, ... |
| Mooncake | JSONL | by blocks of 512 tokens | timestamp (ms), *_length, hash_ids |
| Azure LLM | CSV | so many tokens | TIMESTAMP, ContextTokens, GeneratedTokens |
| BurstGPT | CSV | so many tokens | Timestamp (s), Request tokens, Response tokens |
| Vidur | CSV | so many tokens | arrived_at (s), num_prefill_tokens, num_decode_tokens |
| request log | JSONL | by blocks of `block` tokens | submitted_s, n_*, hash_ids, client, ... |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any

from pyllama_raw.lab.bench.call import ASKED, Call, Prompt

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
            for name in ASKED
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
        fields_of_call={name: row[name] for name in ASKED},
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
