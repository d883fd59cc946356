"""
Eight outputs of one prompt cost little more than one: the prompt is computed once.

500 prompt tokens, one token out, n = 1 and n = 8 in turn. Then the sampling of rows that
ask for log-probabilities against rows that do not, 8 streams of 16 tokens each.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from statistics import median
from time import perf_counter

from load.client import fixed_length, open_engine
from load.measure import Report, arguments, median_ratio, run_script
from load.workloads import token_prompts

from pyllama_raw import AsyncEngine, SamplingParams

N_PROMPT, N_OUTPUTS, N_STREAMED = 500, 8, 16


async def complete(
    engine: AsyncEngine, prompt: list[int], params: SamplingParams
) -> tuple[float, int, float]:
    """Seconds, tokens computed, and seconds of sampling."""
    before, started = engine.stats(), perf_counter()
    await engine.complete_n(prompt, params)
    wall_s, after = perf_counter() - started, engine.stats()
    n_computed = after.computed_tokens - before.computed_tokens
    return wall_s, n_computed, after.sample_s - before.sample_s


async def measure(options: Namespace, report: Report) -> None:
    """Every prompt is new; the first round warms up."""
    lengths = [N_PROMPT] * 4 * (options.rounds + 1)
    prompts = iter(token_prompts(options.model, 1, lengths))
    single = fixed_length(1)
    eight = single.model_copy(update={"n": N_OUTPUTS})
    plain = eight.model_copy(update={"max_tokens": N_STREAMED})
    asking = plain.model_copy(update={"logprobs": 5})
    runs: dict[str, list[tuple[float, int, float]]] = {}
    async with open_engine(options, n_slots=N_OUTPUTS, n_ctx=8192) as engine:
        for turn in range(options.rounds + 1):
            kinds = {"n=1": single, "n=8": eight, "plain": plain, "logprobs": asking}
            for name, params in kinds.items():
                run = await complete(engine, next(prompts), params)
                if turn:
                    runs.setdefault(name, []).append(run)
    for name, values in runs.items():
        wall_s, n_computed, sample_s = map(median, zip(*values, strict=True))
        report.add(run=name, wall_s=wall_s, computed=n_computed, sample_s=sample_s)
    n_rows = N_OUTPUTS * N_STREAMED
    extra_s = median(r[2] for r in runs["logprobs"]) - median(
        r[2] for r in runs["plain"]
    )
    report.add(run="logprobs, a row", sample_s=extra_s / n_rows)
    ratio = median_ratio([r[0] for r in runs["n=8"]], [r[0] for r in runs["n=1"]])
    report.claim("n8_to_n1", ratio, "<=", 1.1)
    n_most = max(r[1] for r in runs["n=8"])
    report.claim("computed_tokens_n8", n_most, "<=", N_PROMPT + 2 * N_OUTPUTS)


if __name__ == "__main__":
    sys.exit(run_script("choices", measure, arguments(__doc__)))
