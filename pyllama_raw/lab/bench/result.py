"""
The result of one run as a flat object, with the keys of `vllm bench serve`.

Rules:
1. Keys that vLLM has mean what they mean there; lists are in the order of the calls.
2. What a target does not tell is null, never 0. A failed call has null in every list.
3. TTFT, TPOT, ITL and E2EL are of completed calls. Output of calls that were left or
   failed counts in the throughput: it was computed.
4. A percentile is a value that occurred: the smallest one that so many per cent do not
   exceed.
5. Rounds of equal conditions are rounds of one thing. Results of other conditions are other
   targets: a table, a plot and a ratio never mix them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import nan
from statistics import fmean, median, pstdev
from typing import Any

from pyllama_raw.api.results import percentile
from pyllama_raw.errors import ConfigError
from pyllama_raw.lab.bench.calls import Record, Run

SUMMARY: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": fmean,
    "median": median,
    "std": pstdev,
    "p90": partial(percentile, percent=90),
    "p99": partial(percentile, percent=99),
    "max": max,
}

Result = dict[str, Any]
Limits = Mapping[str, float]  # ms, by name: what a request has to keep to count as good


def limits_of(words: Iterable[str]) -> Limits:
    """
    Args:
        words: as "ttft:200", in milliseconds.

    Raises:
        ConfigError: a word is none of these.
    """
    return dict(map(_limit, words))


def _limit(word: str) -> tuple[str, float]:
    name, _, value = word.partition(":")
    try:
        limit = float(value)
    except ValueError:
        limit = nan
    if name not in ("ttft", "tpot", "e2el") or not limit > 0:
        allowed = "ttft:MS, tpot:MS or e2el:MS, with milliseconds above 0"
        raise ConfigError(f"goodput={word!r}: give {allowed}")
    return name, limit


def _keeps(limits: Limits, record: Record) -> bool:
    """An output of one token has no TPOT, and keeps every limit of it."""
    if not record.completed or not record.times:
        return False
    latencies = {
        "ttft": record.ttft_s,
        "tpot": record.tpot_s or 0,
        "e2el": record.e2e_s,
    }
    return all(latencies[name] * 1e3 <= limit for name, limit in limits.items())


def result_of(run: Run, limits: Limits) -> Result:
    """Figures of *run*, and its calls as lists."""
    return {
        **_counts(run.records, run.wall_s, limits),
        **latencies(run.records),
        "max_start_lag_ms": run.lag_s * 1e3,
        "by_kind": _by_kind(run.records),
        **_lists(run),
    }


def _counts(records: Sequence[Record], wall_s: float, limits: Limits) -> Result:
    completed = [record for record in records if record.completed]
    n_input = _total(n_prompt(record) for record in completed)
    n_cached = _total(record.n_cached for record in completed)
    n_output = sum(record.n_output for record in records)
    n_good = sum(_keeps(limits, record) for record in records)
    return {
        "duration": wall_s,
        "completed": len(completed),
        "failed": sum(record.error is not None for record in records),
        "left": sum(record.left for record in records),
        "total_input_tokens": n_input,
        "total_output_tokens": n_output,
        "total_cached_tokens": n_cached,
        "cached_share": n_cached / n_input
        if n_cached is not None and n_input
        else None,
        "request_throughput": len(completed) / wall_s,
        "request_goodput": n_good / wall_s if limits else None,
        "output_throughput": n_output / wall_s,
        "total_token_throughput": (n_input + n_output) / wall_s
        if n_input is not None
        else None,
    }


def latencies(records: Iterable[Record]) -> Result:
    """Mean, median, std, p90, p99 and max of each latency; ITL is pooled over calls."""
    done = [record for record in records if record.completed and record.times]
    values = {
        "ttft": [record.ttft_s for record in done],
        "tpot": [t for record in done if (t := record.tpot_s) is not None],
        "itl": [gap for record in done for gap in record.itl_s],
        "e2el": [record.e2e_s for record in done],
        "queue": [record.queue_s for record in done if record.queue_s is not None],
    }
    paces = [1 / t for t in values["tpot"] if t > 0]
    return {
        "median_decode_tok_per_s": median(paces) if paces else None,
        **{
            f"{figure}_{name}_ms": summary(of_name) * 1e3 if of_name else None
            for name, of_name in values.items()
            for figure, summary in SUMMARY.items()
        },
    }


def _by_kind(records: Sequence[Record]) -> dict[str, Result]:
    """Latencies of the calls of each kind, where a workload has kinds."""
    kinds = dict.fromkeys(record.call.kind for record in records if record.call.kind)
    return {
        kind: latencies(record for record in records if record.call.kind == kind)
        for kind in kinds
    }


def _lists(run: Run) -> Mapping[str, list[Any]]:
    records = run.records
    came = [record if record.times else None for record in records]
    return {
        "input_lens": [n_prompt(record) for record in records],
        "output_lens": [record.n_output for record in records],
        "ttfts": [record and record.ttft_s for record in came],
        "itls": [record and record.itl_s for record in came],
        "latencies": [record and record.e2e_s for record in came],
        "start_times": [record.sent - run.started for record in records],
        "queue_s": [record.queue_s for record in records],
        "kinds": [record.call.kind for record in records],
        "generated_texts": [record.text for record in records],
        "errors": [record.error or "" for record in records],
    }


def n_prompt(record: Record) -> int | None:
    """Prompt tokens as the target counts them, or as they were sent."""
    if record.n_prompt is not None or isinstance(record.prompt, str):
        return record.n_prompt
    return len(record.prompt)


def _total(counts: Iterable[int | None]) -> int | None:
    """None if one is not known."""
    numbers = list(counts)
    return None if None in numbers else sum(count or 0 for count in numbers)


CONDITIONS = ("model_id", "workload", "num_prompts", "machine", "options")
# Options that each result has as its target or point, that say how often, or where to log.
KNOWN_FIELDS = {"targets", "peers", "clients", "rate", "burstiness", "rounds"}
KNOWN_FIELDS |= {"step_log", "request_log"}
MOMENT = "machine.date"


def conditions_of(result: Result) -> dict[str, object]:
    """By name, with a dot for what is inside of another one; what is not known is left out."""
    conditions: dict[str, object] = {}
    for key in CONDITIONS:
        value = result.get(key)
        if isinstance(value, dict):
            conditions |= {f"{key}.{name}": value[name] for name in sorted(value)}
        elif value is not None:
            conditions[key] = value
    return conditions


def told_apart(results: Sequence[Result]) -> list[Result]:
    """
    *results*, each with what is its own among them as `apart`, and in the name of its target.

    That is empty if all have the same conditions.
    """
    labels = labels_of(results)
    return [
        result | {"apart": label, "target": _named(result["target"], label)}
        for result, label in zip(results, labels, strict=True)
    ]


def labels_of(results: Sequence[Result]) -> list[str]:
    """The conditions of each that are not those of all, in words."""
    excluded = {f"options.{name}" for name in KNOWN_FIELDS} | {MOMENT}
    conditions = [conditions_of(result) for result in results]
    names = dict.fromkeys(
        name for values in conditions for name in values if name not in excluded
    )
    own = [
        name
        for name in names
        if len({_text(values, name) for values in conditions}) > 1
    ]
    return [
        ", ".join(f"{name.rpartition('.')[2]} {_text(values, name)}" for name in own)
        for values in conditions
    ]


def _text(conditions: dict[str, object], name: str) -> str:
    value = conditions.get(name)
    return "default" if value is None else str(value)


def _named(target: str, label: str) -> str:
    if not label:
        return target
    return f"{target}, {label}" if "=" in target else f"{target}={label}"
