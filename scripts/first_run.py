"""
The first run: scripts/demo in a clone of the last commit with empty caches.

    python -m scripts.first_run
    python -m scripts.first_run --cache ~/first-run     the caches of an earlier run, or new ones

Each line of the demo has the seconds since the start, and the CPU-seconds (user and system) of all
its processes so far. On a busy machine only the latter mean anything. The last line is the time to
the first token: the demo prints a reply once it is whole.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TICKS = os.sysconf("SC_CLK_TCK")
OF_PROCESS = slice(11, 13)  # utime and stime in /proc/PID/stat, behind the name
OF_ENDED_CHILDREN = slice(13, 15)
CACHE_VARIABLES = ("PYLLAMA_RAW_CACHE", "PIP_CACHE_DIR")


def cpu_s(pid: int) -> float:
    """CPU-seconds of *pid* and of all that it started, but for what has lost its parent."""
    fields, children = {}, defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:  # it has ended meanwhile
            continue
        fields[int(path.parent.name)] = text.rpartition(")")[2].split()
    for child, values in fields.items():
        children[int(values[1])].append(child)
    ticks, left = 0, [pid]
    while left:
        process = left.pop()
        left += children[process]
        values = fields.get(process, [])
        ticks += sum(map(int, values[OF_PROCESS])) + sum(
            map(int, values[OF_ENDED_CHILDREN])
        )
    return ticks / TICKS


def first_run(clone: Path, cache: Path) -> float:
    """Run the demo of *clone*; returns the seconds to its first reply."""
    environment = {k: v for k, v in os.environ.items() if k not in CACHE_VARIABLES}
    environment["XDG_CACHE_HOME"] = str(cache)
    started, first = time.monotonic(), 0.0
    with subprocess.Popen(
        [clone / "scripts" / "demo"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            seconds = time.monotonic() - started
            if line.startswith("[0] "):
                first = first or seconds
            print(f"{seconds:7.1f} {cpu_s(demo.pid):7.1f}  {line.rstrip()}", flush=True)
    if demo.returncode or not first:
        raise SystemExit(f"scripts/demo ended with {demo.returncode}")
    return first


def main() -> None:
    """Clone, run and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cache", type=Path, help="instead of an empty folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="first-run-") as folder:
        clone = Path(folder) / "clone"
        subprocess.run(
            ["git", "clone", "--quiet", str(ROOT), str(clone)],  # noqa: S607 - the git of whoever runs it
            check=True,
        )
        cache = options.cache or Path(folder) / "cache"
        cache.mkdir(parents=True, exist_ok=True)
        print("seconds, CPU-seconds", flush=True)
        seconds = first_run(clone, cache.resolve())
    sys.stdout.write(f"first reply after {seconds:.0f} s\n")


if __name__ == "__main__":
    main()
