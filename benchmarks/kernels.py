"""
What our own kernels save.

Two contexts, one with our kernels and one with libllama's in the order of weights that it
chooses, do the same work in turn: prompts of 256 tokens for 8 slots, then 64 steps of all slots;
then the same for one slot with cells in use all around it; then steps of all slots behind one prompt
of 1,024 tokens.

With --products, instead: G operations/s of one thread, by type of weights, columns and level of
instructions that this CPU has, of woven products and of libllama's plain and repacked ones, with
shares of the limits of one thread (load/limits.cpp): of products of bytes by these instructions
(`of_peak`; of libllama's, by the best ones) and of reading (`of_bandwidth`). It needs no model.
Weights should not fit in the caches of the CPU: see --mb. PYLLAMA_RAW_WOVEN makes an engine take
a level.
"""

from __future__ import annotations

import json
import sys
import tempfile
from argparse import Namespace
from array import array
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
from load.limits import limits
from load.measure import Report, arguments, median_ratio, run_script, say
from load.products import compiled, lines_of

from pyllama_raw.native.batch import Batch
from pyllama_raw.native.context import Context
from pyllama_raw.native.kernels import woven_levels
from pyllama_raw.native.libllama import new_bytes
from pyllama_raw.native.model import Model

N_SLOTS, N_CTX, N_PROMPT, N_STEPS = 8, 8192, 256, 64
N_AROUND = 800  # tokens of each of the other slots
N_PREFIX = 1024  # tokens that all slots begin with
Speeds = dict[str, float]  # tokens a second by kind of work


def prompt(n_tokens: int, seed: int) -> array[int]:
    """Random tokens."""
    tokens = np.random.default_rng(seed).integers(100, 40_000, n_tokens, np.int32)
    return array("i", tokens.tolist())


def prefill(context: Context, slot: int, n_tokens: int) -> None:
    """Compute a prompt; its last token has an output row."""
    batch = Batch(context.n_batch)
    batch.add(prompt(n_tokens, slot), 0, slot, True)
    context.decode(batch)


def steps(context: Context, slots: list[int], pos: int) -> float:
    """Tokens a second of N_STEPS steps of *slots*."""
    batch = Batch(context.n_batch)
    started = perf_counter()
    for i in range(N_STEPS):
        batch.clear()
        batch.add_rows([100] * len(slots), [pos + i] * len(slots), slots)
        context.decode(batch)
    return N_STEPS * len(slots) / (perf_counter() - started)


def surround(context: Context) -> None:
    """The same tokens in the cells of all slots but the first, computed once."""
    prefill(context, 1, N_AROUND)
    state = new_bytes(context.state_bytes(1))
    context.capture(1, state)
    for slot in range(2, N_SLOTS):
        context.restore(slot, state)


def work(context: Context) -> Speeds:
    """One round."""
    context.clear()
    started = perf_counter()
    for slot in range(N_SLOTS):
        prefill(context, slot, N_PROMPT)
    speeds = {"prefill": N_SLOTS * N_PROMPT / (perf_counter() - started)}
    speeds["8 streams"] = steps(context, list(range(N_SLOTS)), N_PROMPT)
    context.clear()
    surround(context)
    started = perf_counter()
    prefill(context, 0, N_PROMPT)
    speeds["prefill among others"] = N_PROMPT / (perf_counter() - started)
    speeds["1 stream among others"] = steps(context, [0], N_PROMPT)
    context.clear()
    prefill(context, 0, N_PREFIX)
    for slot in range(1, N_SLOTS):
        context.seq_cp(0, slot, 0, N_PREFIX)
    speeds["8 streams of one prefix"] = steps(context, list(range(N_SLOTS)), N_PREFIX)
    return speeds


def measure_products(n_mb: int, report: Report) -> None:
    """A row of each product; the limits of one thread are details."""
    say("measuring the limits of this CPU")
    peaks = {level: limits(1, level) for level in woven_levels()[1:]}
    best = limits(1)
    report.details["limits"] = {"all": best._asdict()} | {
        level: peak._asdict() for level, peak in peaks.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        say("compiling benchmarks/products.cpp")
        program = compiled(Path(folder) / "products")
        for line in lines_of(program, "speed", str(n_mb)):
            row = json.loads(line)
            peak = peaks.get(row["by"], best)
            row["of_peak"] = row["gop_per_s"] / peak.int8_gops
            row["of_bandwidth"] = row.pop("gb_per_s") / best.read_gb_per_s
            report.add(**row)


def measure(options: Namespace, report: Report) -> None:
    """Interleaved rounds; the first does not count."""
    if options.products:
        measure_products(options.mb, report)
        return
    fields = {"n_ctx": N_CTX, "n_threads": options.threads}
    ours: list[Speeds] = []
    libllama: list[Speeds] = []
    # Both stay open, because the first product with a weight weaves it.
    with (
        Model.load(options.model) as model,
        Model.load(options.model, use_extra_bufts=True) as packed,
        Context(model, n_seq_max=N_SLOTS, **fields) as fast,
        Context(packed, n_seq_max=N_SLOTS, fast_kernels=False, **fields) as slow,
    ):
        for index in range(options.rounds + 1):
            say(f"round {index} of {options.rounds}")
            ours.append(work(fast))
            libllama.append(work(slow))
    for kind in ours[0]:
        mine, others = ([r[kind] for r in runs[1:]] for runs in (ours, libllama))
        report.add(
            work=kind,
            ours_tok_per_s=median(mine),
            libllama_tok_per_s=median(others),
            ratio=median_ratio(mine, others),
        )


def main() -> int:
    """Run the script."""
    parser = arguments(__doc__)
    parser.add_argument("--products", action="store_true", help="of each level of CPUs")
    parser.add_argument(
        "--mb", type=int, default=64, help="of weights of --products (64)"
    )
    return run_script("kernels", measure, parser)


if __name__ == "__main__":
    sys.exit(main())
