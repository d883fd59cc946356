"""llama-batched-bench: the C++ ceiling, a loop around llama_decode without sampling."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from . import find


@dataclass(frozen=True, slots=True)
class BatchedBench:
    """Tokens computed, prompt and output, and the time they took."""

    n_tokens: int
    wall_s: float

    @property
    def tok_per_s(self) -> float:
        return self.n_tokens / self.wall_s


def batched_bench(
    model: Path,
    *,
    n_prompt: int,
    n_output: int,
    n_slots: int,
    repeats: int,
    n_ctx: int,
    threads: int,
) -> BatchedBench:
    """Run *repeats* batches of *n_slots* requests; loading is not in the time."""
    command = [
        find("llama-batched-bench"),
        *("--model", str(model), "--ctx-size", str(n_ctx), "--kv-unified"),
        *("--threads", str(threads)),
        *("-npp", ",".join([str(n_prompt)] * repeats)),
        *("-ntg", str(n_output), "-npl", str(n_slots)),
        *("--output-format", "jsonl", "--offline"),
    ]
    answer = subprocess.run(command, check=True, capture_output=True, text=True)
    lines = [json.loads(s) for s in answer.stdout.splitlines() if s.startswith("{")]
    if len(lines) != repeats:
        raise RuntimeError(f"{len(lines)} results, not {repeats}: {answer.stderr}")
    n_tokens = repeats * n_slots * (n_prompt + n_output)
    return BatchedBench(n_tokens, sum(line["t"] for line in lines))
