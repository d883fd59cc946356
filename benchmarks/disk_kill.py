"""
kill -9 while the disk tier writes: afterwards no file may be restored that is not whole.

    python -m benchmarks.disk_kill --model MODEL --n 200

Each round starts an engine that gives every prompt a file, and kills it at a random moment
after its first file; every fourth round two of them, on one directory. Then all files are
read back: each one must either verify, token by token the prompt it says, or not be found.
At the end an engine restores from what is left, and its output is compared with that of a
slot that computed the same prompt. Writes one JSON object.
"""

from __future__ import annotations

import argparse
import json
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from random import Random

from pyllama_raw import (
    CacheConfig,
    ContextConfig,
    Engine,
    EngineConfig,
    SamplingParams,
    SchedulerConfig,
)
from pyllama_raw.engine.disk_store import DiskStore
from pyllama_raw.engine.state_files import SpanKeys

N_TOKENS = 400
GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


def prompt(seed: int) -> list[int]:
    rng = Random(seed)  # noqa: S311
    return [seed % 200 + 3, *(rng.randrange(3, 250) for _ in range(N_TOKENS - 1))]


def config(directory: Path | None, max_disk_bytes: int) -> EngineConfig:
    """One slot: each prompt needs the place of the one before, which is written."""
    return EngineConfig(
        context=ContextConfig(n_ctx=1024, n_threads=1),
        scheduler=SchedulerConfig(n_slots=1),
        cache=CacheConfig(
            directory=directory, max_entries=0, max_disk_bytes=max_disk_bytes
        ),
    )


def write_for_ever(model: str, directory: Path, max_disk_bytes: int, seed: int) -> None:
    """The process that is killed."""
    prompts = [prompt(seed + i) for i in range(2000)]
    with Engine.open(model, config(directory, max_disk_bytes)) as engine:
        engine.complete_many(prompts, GREEDY)


def kill_one_round(arguments: argparse.Namespace, directory: Path, rng: Random) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.disk_kill",
        *("--model", arguments.model, "--write", str(directory)),
        *("--max-disk-bytes", str(arguments.max_disk_bytes)),
    ]
    n_writers = 2 if rng.random() < 0.25 else 1
    before = newest(directory)
    writers = [
        subprocess.Popen([*command, "--seed", str(rng.randrange(10**6))])
        for _ in range(n_writers)
    ]
    while newest(directory) == before:
        assert any(writer.poll() is None for writer in writers), "a writer has ended"
        time.sleep(0.002)
    for writer in writers:
        time.sleep(rng.random() * arguments.spread_s)
        writer.send_signal(signal.SIGKILL)
        writer.wait()


def newest(directory: Path) -> set[Path]:
    """Changes with each file that is begun."""
    return set(directory.glob("*.plrstate"))


def fingerprints(directory: Path) -> list[str]:
    """Of the models that the index knows."""
    with closing(sqlite3.connect(directory / "plrstates.sqlite")) as database:
        rows = database.execute("SELECT DISTINCT fingerprint FROM states").fetchall()
    return [name.decode() for (name,) in rows]


def look(directory: Path, max_disk_bytes: int) -> dict[str, int]:
    """What a round has left: every file must be whole, or not be found."""
    n_bytes = sum(path.stat().st_size for path in directory.iterdir())
    n_begun = len(newest(directory))
    n_found = n_whole = 0
    for name in fingerprints(directory):
        store = DiskStore(directory, name, max_disk_bytes)
        entries = store.scan(SpanKeys())
        n_found += len(entries)
        n_whole += sum(store.read(state.payload) is not None for state in entries)
        store.close()
    n_files = len(newest(directory))
    return {
        "nobodys": n_begun - n_files,
        "files": n_files,
        "found": n_found,
        "whole": n_whole,
        "over_limit": int(n_bytes > max_disk_bytes),
    }


def check_output(model: str, directory: Path, max_disk_bytes: int) -> dict[str, int]:
    """Restore what is left, and compare with slots that computed the same prompts."""
    (name,) = fingerprints(directory)
    entries = DiskStore(directory, name, max_disk_bytes).scan(SpanKeys())
    n_cached = n_wrong = 0
    for state in entries[-5:]:
        tokens = state.tokens.tolist()
        live = [tokens, tokens]
        with Engine.open(model, config(None, 0)) as engine:
            _, expected = engine.complete_many(live, GREEDY)
        options = config(directory, max_disk_bytes)
        with Engine.open(model, options) as engine:
            got = engine.complete(tokens, GREEDY)
        n_cached += got.usage.cached_tokens
        n_wrong += got.token_ids != expected.token_ids
    return {
        "restored": len(entries[-5:]),
        "restored_tokens": n_cached,
        "wrong_outputs": n_wrong,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--n", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--spread-s", type=float, default=0.15)
    parser.add_argument("--max-disk-bytes", type=int, default=30 * 2**20)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write is not None:
        write_for_ever(
            arguments.model, arguments.write, arguments.max_disk_bytes, arguments.seed
        )
        return
    rng = Random(arguments.seed)  # noqa: S311
    totals: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for _ in range(arguments.n):
            kill_one_round(arguments, directory, rng)
            for key, value in look(directory, arguments.max_disk_bytes).items():
                totals[key] = totals.get(key, 0) + value
        totals |= check_output(arguments.model, directory, arguments.max_disk_bytes)
    print(json.dumps({"kills": arguments.n, **totals}))


if __name__ == "__main__":
    main()
