"""
What our own kernels save, and that products keep the bits of libllama's.

Two contexts of the model, one with our kernels and one with libllama's, do the same work
in turn: prompts of 256 tokens for 8 slots, then 64 steps of all slots; then the same for
one slot with cells in use all around it. Logits are compared without flash attention,
which alone may differ.

With --products, instead: G operations/s of one thread, by type of weights, columns and level of
instructions that this CPU has, of woven products and of libllama's plain and repacked ones, as
shares of what the instructions reach in registers (`of_peak`; of libllama's, the best level's)
and of what reading alone reaches (`of_bandwidth`). It needs no model. Weights should not fit in
the caches of the CPU: see --mb. PYLLAMA_RAW_WOVEN makes an engine take a level.
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
from load.measure import Report, arguments, median_ratio, run_script, say
from load.products import compiled, lines_of

from pyllama_raw.native.batch import Batch
from pyllama_raw.native.context import Context
from pyllama_raw.native.model import Model

N_SLOTS, N_CTX, N_PROMPT, N_STEPS = 8, 8192, 256, 64
N_AROUND = 800  # tokens of each of the other slots
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


def work(context: Context) -> Speeds:
    """One round."""
    context.clear()
    started = perf_counter()
    for slot in range(N_SLOTS):
        prefill(context, slot, N_PROMPT)
    speeds = {"prefill": N_SLOTS * N_PROMPT / (perf_counter() - started)}
    speeds["8 streams"] = steps(context, list(range(N_SLOTS)), N_PROMPT)
    context.clear()
    for slot in range(1, N_SLOTS):
        prefill(context, slot, N_AROUND)
    started = perf_counter()
    prefill(context, 0, N_PROMPT)
    speeds["prefill among others"] = N_PROMPT / (perf_counter() - started)
    speeds["1 stream among others"] = steps(context, [0], N_PROMPT)
    return speeds


def n_differing(model: Model, n_threads: int) -> int:
    """Logits of a prompt that differ in a bit."""
    rows = []
    for fast in (True, False):
        fields = {"flash_attn": "off", "n_threads": n_threads, "fast_kernels": fast}
        with Context(model, n_seq_max=1, n_ctx=512, **fields) as context:
            prefill(context, 0, N_PROMPT)
            rows.append(np.asarray(context.logits(N_PROMPT - 1)).view(np.int32))
    return int(np.count_nonzero(rows[0] != rows[1]))


def measure_products(n_mb: int, report: Report) -> None:
    """A row of each product; the limits of this CPU are details."""
    with tempfile.TemporaryDirectory() as folder:
        say("compiling benchmarks/products.cpp")
        program = compiled(Path(folder) / "products")
        for line in lines_of(program, "speed", str(n_mb)):
            row = json.loads(line)
            if "type" in row:
                report.add(**row)
            else:
                say(line)
                report.details.update(row)


def measure(options: Namespace, report: Report) -> None:
    """Interleaved rounds; the first does not count."""
    if options.products:
        measure_products(options.mb, report)
        return
    fields = {"n_ctx": N_CTX, "n_threads": options.threads}
    runs: dict[bool, list[Speeds]] = {True: [], False: []}
    with Model.load(options.model) as model:
        report.claim("logits that differ", n_differing(model, options.threads), "<=", 0)
        for index in range(options.rounds + 1):
            say(f"round {index} of {options.rounds}")
            for fast, found in runs.items():
                with Context(
                    model, n_seq_max=N_SLOTS, fast_kernels=fast, **fields
                ) as context:
                    found.append(work(context))
    for kind in runs[True][0]:
        ours, theirs = ([r[kind] for r in runs[fast][1:]] for fast in (True, False))
        report.add(
            work=kind,
            ours_tok_per_s=median(ours),
            libllama_tok_per_s=median(theirs),
            ratio=median_ratio(ours, theirs),
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
