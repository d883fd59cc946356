"""
The table of figures in README.md, from files in results/.

`--run` measures first, for about two hours on a machine that does nothing else. The table has
one machine and one commit: those of the newest file. Files of others, and files of runs
that prove nothing, are left out.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
RESULTS, README = HERE / "results", HERE.parent / "README.md"
BEGIN, END = "<!-- figures: python benchmarks/figures.py -->\n", "<!-- end -->\n"
PEERS = "--peers llama-server xllamacpp"

Found = dict[str, Any]  # what a script wrote
Named = dict[str, Found]  # its rows, by the value of their first column
Cells = tuple[str, str, str]  # what, here, others


class Script(NamedTuple):
    """What fills lines of the table."""

    command: str
    lines: Callable[[Named], Iterator[Cells]]


def number(value: float) -> str:
    """Three digits, or all of those before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def offline(n_slots: int) -> Script:
    """Full slots."""

    def lines(rows: Named) -> Iterator[Cells]:
        ours = rows.pop("ours")["tok_per_s"]
        peers = [f"{name} {number(row['tok_per_s'])}" for name, row in rows.items()]
        n_calls = max(2 * n_slots, 8)
        slots = "1 slot" if n_slots == 1 else f"{n_slots} slots"
        title = f"{n_calls} requests over {slots}, tokens/s"
        yield title, number(ours), ", ".join(peers)

    return Script(f"offline.py --slots {n_slots} --rounds 3 {PEERS}", lines)


def kernels(rows: Named) -> Iterator[Cells]:
    """With our kernels and without."""
    for work in ("prefill", "8 streams"):
        row = rows[work]
        ours, theirs = row["ours_tok_per_s"], row["libllama_tok_per_s"]
        title = f"{work}, tokens/s, our kernels and libllama's"
        yield title, number(ours), number(theirs)


def start_up(rows: Named) -> Iterator[Cells]:
    """From the start of a process."""
    ours, theirs = (
        rows[name]["until_first_token_s"] for name in ("ours", "llama-server")
    )
    title = "start of a process to its first token, 8 slots of 2,048"
    yield title, f"{ours:.2f} s", f"llama-server {theirs:.2f} s"


def over_http(rows: Named) -> Iterator[Cells]:
    """Behind our server."""
    for work, row in rows.items():
        unit = row["unit"]
        if unit == "texts/s":  # only with --embedder
            continue
        title = f"{work} from `pyllama-raw serve`, {unit}"
        yield title, number(row["HTTP"]), f"in process {number(row['in process'])}"


def served(rows: Named) -> Iterator[Cells]:
    """Our server and another."""
    loads = {
        "short requests": ("output_throughput", "output tokens/s"),
        "shared prefix": ("output_throughput", "output tokens/s"),
        "long prompts": ("max_itl_ms", "longest gap in a stream, ms"),
    }
    for load, (key, unit) in loads.items():
        ours, theirs = (
            rows[f"{load}, {system}"][key] for system in ("ours", "llama-server")
        )
        title = f"{load} over HTTP, {unit}"
        yield title, number(ours), f"llama-server {number(theirs)}"


def shared_prefix(rows: Named) -> Iterator[Cells]:
    """Prompts with one beginning."""
    ours, theirs = rows["ours"], rows["llama_server"]
    speeds = [row["output_tok_per_s"] for row in (ours, theirs)]
    waits = [row["ttft_p99_s"] for row in (ours, theirs)]
    title = "32 prompts that share 512 words, output tokens/s"
    yield title, f"{speeds[0]:.3g}", f"llama-server {speeds[1]:.3g}"
    title = "their time to first token, p99"
    yield title, f"{waits[0]:.3g} s", f"llama-server {waits[1]:.3g} s"


def equal_arrivals(rows: Named) -> Iterator[Cells]:
    """Long prompts among short ones."""
    ours, theirs = (rows[name]["itl_max_s"] for name in ("ours", "llama-server"))
    title = "longest gap in a stream of short calls among long ones"
    yield title, f"{ours:.3g} s", f"llama-server {theirs:.3g} s"


SCRIPTS = {
    "offline_1": offline(1),
    "offline_8": offline(8),
    "offline_32": offline(32),
    "kernels": Script("kernels.py --rounds 3", kernels),
    "shared_prefix": Script("shared_prefix.py --rounds 5", shared_prefix),
    "equal_arrivals": Script("equal_arrivals.py --rounds 2", equal_arrivals),
    "start_up": Script("start_up.py --rounds 9", start_up),
    "served": Script("served.py --rounds 3", served),
    "over_http": Script("over_http.py --rounds 5", over_http),
}


def run() -> int:
    """Measure all; the files take their places together, so that the commit is clean."""
    status = 0
    with TemporaryDirectory() as folder:
        for name, script in SCRIPTS.items():
            out = Path(folder) / f"{name}.json"
            file, *flags = shlex.split(script.command)
            command = [sys.executable, str(HERE / file), *flags, "--out", str(out)]
            sys.stderr.write(f"{script.command}\n")
            status = max(status, subprocess.run(command, check=False).returncode)
        for out in Path(folder).iterdir():
            (RESULTS / out.name).write_bytes(out.read_bytes())
    return status


def usable() -> dict[str, Found]:
    """By name: the files of the newest one's machine and commit."""
    reports = {
        name: json.loads((RESULTS / f"{name}.json").read_text())
        for name in SCRIPTS
        if (RESULTS / f"{name}.json").is_file()
    }
    proofs = {
        name: report for name, report in reports.items() if not report["disturbed"]
    }
    newest = max(
        (report["machine"] for report in proofs.values()), key=lambda m: m["date"]
    )
    return {
        name: report
        for name, report in proofs.items()
        if all(report["machine"][key] == newest[key] for key in ("cpu", "commit"))
    }


def table() -> str:
    """The lines between BEGIN and END."""
    files = usable()
    first, *_ = files.values()
    facts, options = first["machine"], first["options"]
    devices = ", ".join(facts["devices"]) or "no GPU"
    library = f"llama.cpp {facts['llama_cpp']}, " if "llama_cpp" in facts else ""
    dates = sorted({report["machine"]["date"][:10] for report in files.values()})
    lines = [
        f"{facts['cpu']}, {facts['n_cpus']} CPUs, {devices}; {options['model']}, "
        f"{options['threads']} threads everywhere;",
        f"{library}commit {facts['commit']}, {' to '.join(dates)}; medians of the rounds.",
        "",
        "| what | here | others | command in `benchmarks/` |",
        "| --- | --- | --- | --- |",
    ]
    for name, report in files.items():
        script, rows = SCRIPTS[name], report["rows"]
        key = "work" if "work" in rows[0] else "system"
        texts = script.lines({row[key]: row for row in rows})
        lines += [f"| {' | '.join(cells)} | `{script.command}` |" for cells in texts]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the script."""
    parser = ArgumentParser(description=(__doc__ or "").strip().split("\n")[0])
    parser.add_argument("--run", action="store_true", help="measure first")
    status = run() if parser.parse_args().run else 0
    before, _, tail = README.read_text().partition(BEGIN)
    after = tail.partition(END)[2]
    README.write_text(f"{before}{BEGIN}{table()}{END}{after}")
    return status


if __name__ == "__main__":
    sys.exit(main())
