"""
Conditions of a measured result, and results of several runs beside each other.

Rounds of equal conditions are rounds of one thing. Results of other conditions are other
targets: a table, a plot and a ratio never mix them.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyllama_raw.lab.bench.result import Result

CONDITIONS = ("model_id", "workload", "num_prompts", "machine", "options")
# Options that each result has as its target or point, that say how often, or where to log.
SEEN = {"targets", "peers", "clients", "rate", "burstiness", "rounds"}
SEEN |= {"step_log", "request_log"}
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
    excluded = {f"options.{name}" for name in SEEN} | {MOMENT}
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
