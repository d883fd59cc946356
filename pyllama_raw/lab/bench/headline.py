"""The lines above a table: what was measured, with what, where, by which command."""

from __future__ import annotations

from collections.abc import Sequence

from pyllama_raw.lab.bench.result import Result
from pyllama_raw.lab.bench.table import point_of, short_names

CAPTION = "medians over rounds; tok/s of output, and its ratio to the first target; latencies in ms"


def headline(results: Sequence[Result]) -> list[str]:
    """Workload and model, versions, machine, command; what is not known is left out."""
    first = results[0]
    facts = first.get("machine", {})
    n_rounds = len({result["round"] for result in results})
    points = list(dict.fromkeys(map(point_of, results)))
    measured = [
        str(first.get("workload", "benchmark")),
        str(first.get("model_id", "")),
        f"{n_rounds} round{'s' * (n_rounds != 1)}",
        points[0] if len(points) == 1 else "",
    ]
    commit = f" ({facts['commit']})" if facts.get("commit") else ""
    versions = [
        f"pyllama_raw {facts['pyllama_raw']}{commit}" if "pyllama_raw" in facts else "",
        f"llama.cpp {facts['llama_cpp']}" if facts.get("llama_cpp") else "",
        f"Python {facts['python']}" if "python" in facts else "",
    ]
    where = [
        str(facts.get("cpu", "")),
        f"{facts['n_cpus']} CPUs" if "n_cpus" in facts else "",
        *facts.get("devices", ()),
        str(facts.get("platform", "")),
        str(first.get("date", "")),
    ]
    names = short_names(result["target"] for result in results)
    lines = [", ".join(filter(None, part)) for part in (measured, versions, where)]
    lines.append(first.get("command", ""))
    for target, short in names.items():
        if short != target:
            lines.append(f"{short}: {target.partition('=')[2] or target}")
    return [line for line in lines if line]
