"""
Four LoRAs and the base under Poisson load: how long the rarest waits, what switches cost.

    python -m benchmarks.adapters --rate 1.5 --seconds 220

The LoRAs are random, of rank 16, of all products of the layers. A request has 32 tokens in and
16 out, and belongs to a set by chance; the last set is the rarest. Its wait ends with its first
token. Fair share: with k sets each has a k-th of the machine, so a request that waits for s
seconds on an idle engine, its set being on, waits for k * s. Switches are counted by what one
costs as measured, against the time of all decodes.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

import anyio

from benchmarks.load.client import fixed_length, open_engine
from benchmarks.load.measure import Report, arguments, parse, percentile
from benchmarks.load.workloads import generator, token_prompts
from pyllama_raw import AsyncEngine, Result
from scripts.tiny_models.adapters import Lora, write

WEIGHTS = {"base": 8, "a": 6, "b": 4, "c": 3, "rare": 2}  # how often each set is chosen
N_PROMPT, N_OUTPUT, N_SLOTS, N_CTX = 32, 16, 16, 4096
N_ALONE = 20
PRODUCTS = ("blk.*attn_?.weight", "blk.*attn_output.weight", "blk.*ffn_*[pen].weight")


async def load(engine: AsyncEngine, model: Path, folder: Path) -> None:
    """All but the base are LoRAs of *model*."""
    for name in list(WEIGHTS)[1:]:
        path = folder / f"{name}.gguf"
        write(Lora(name, "", PRODUCTS, rank=16, gain=0.1), model, path)
        await engine.load_adapter(name, path)


async def ask(engine: AsyncEngine, name: str, prompt: list[int]) -> Result:
    """One request of the set *name*."""
    adapters = {} if name == "base" else {name: 1.0}
    return await engine.complete(prompt, fixed_length(N_OUTPUT), adapters=adapters)


def wait_s(result: Result) -> float:
    """Until its first token."""
    assert result.timings.ttft_s is not None
    return result.timings.ttft_s


async def arrive(
    engine: AsyncEngine, rate: float, prompts: list[list[int]]
) -> dict[str, list[Result]]:
    """Results of *prompts*, by set, which come at random, *rate* a second."""
    rng, results = generator("arrivals"), {name: list[Result]() for name in WEIGHTS}

    async def one(name: str, prompt: list[int]) -> None:
        results[name].append(await ask(engine, name, prompt))

    names = rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=len(prompts))
    due = perf_counter()
    async with anyio.create_task_group() as group:
        for name, prompt in zip(names, prompts, strict=True):
            due += rng.expovariate(rate)
            await anyio.sleep(max(due - perf_counter(), 0))
            group.start_soon(one, name, prompt)
    return results


async def measure(report: Report) -> None:
    options = report.options
    n_loaded, rarest = int(options.rate * options.seconds), list(WEIGHTS)[-1]
    lengths = [N_PROMPT] * (n_loaded + N_ALONE + 1)
    prompts = token_prompts(options.model, 1, lengths)
    with tempfile.TemporaryDirectory() as folder:
        async with open_engine(options, n_slots=N_SLOTS, n_ctx=N_CTX) as engine:
            await load(engine, options.model, Path(folder))
            alone = [
                wait_s(await ask(engine, rarest, prompts.pop()))
                for _ in range(N_ALONE + 1)
            ]
            fair_s = len(WEIGHTS) * median(alone[1:])
            before, started = engine._parts.executor.times, perf_counter()
            results_of_round = await arrive(engine, options.rate, prompts)
            wall_s, after = perf_counter() - started, engine._parts.executor.times
    for name, results in results_of_round.items():
        waits = [wait_s(result) for result in results]
        gaps = [gap for result in results for gap in result.timings.itl_s]
        report.add(
            set=name,
            requests=len(waits),
            wait_p50_s=percentile(waits, 50),
            wait_p99_s=percentile(waits, 99),
            fair_s=fair_s,
            itl_p50_s=percentile(gaps, 50),
            itl_p99_s=percentile(gaps, 99),
        )
    decode_s = after.decode_s - before.decode_s
    switch_s = after.adapter_switch_s - before.adapter_switch_s
    n_switches = after.adapter_switches - before.adapter_switches
    report.details |= {
        "decoding": decode_s / wall_s,
        "switches": n_switches,
        "switch_ms": 1000 * switch_s / n_switches,
    }
    print(report.details)
    worst = percentile([wait_s(result) for result in results_of_round[rarest]], 99)
    report.claim("p99 wait of the rarest to its fair share", worst / fair_s, "<=", 2)
    report.claim("switches, share of decodes", switch_s / decode_s, "<=", 0.05)


def main() -> int:
    """Run the script."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--rate", type=float, default=1.5, help="requests a second (1.5)"
    )
    parser.add_argument("--seconds", type=float, default=220.0, help="of load (220)")
    report = Report("adapters", parse(parser))
    anyio.run(measure, report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
