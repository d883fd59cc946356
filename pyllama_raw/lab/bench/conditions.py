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
    found: dict[str, object] = {}
    for key in CONDITIONS:
        value = result.get(key)
        if isinstance(value, dict):
            found |= {f"{key}.{name}": value[name] for name in sorted(value)}
        elif value is not None:
            found[key] = value
    return found


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
    seen = {f"options.{name}" for name in SEEN} | {MOMENT}
    known = [conditions_of(result) for result in results]
    names = dict.fromkeys(name for each in known for name in each if name not in seen)
    own = [name for name in names if len({_text(each, name) for each in known}) > 1]
    return [
        ", ".join(f"{name.rpartition('.')[2]} {_text(each, name)}" for name in own)
        for each in known
    ]


def _text(conditions: dict[str, object], name: str) -> str:
    value = conditions.get(name)
    return "default" if value is None else str(value)


def _named(target: str, label: str) -> str:
    if not label:
        return target
    return f"{target}, {label}" if "=" in target else f"{target}={label}"
