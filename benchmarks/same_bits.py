"""
Answers of a deterministic configuration have the same bits alone and beside others.

Some requests run alone first, one after the other. Then callers, twice as many as slots, draw
from them at random until --requests are answered, so who is beside whom changes all the time.
Tokens of each answer, and their log-probabilities, are compared with those of the same
request alone. Prompts are seeded words of 1 to --prompt tokens; a half is greedy, a half drawn.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from itertools import count

import anyio
from load.measure import Report, arguments, run_script, say
from load.workloads import generator, token_prompts

from pyllama_raw import AsyncEngine, EngineConfig, Result, SamplingParams

N_CELLS = 128  # of a slot
Request = tuple[list[int], SamplingParams]
Bits = list[tuple[int, float]]


def requests(options: Namespace) -> list[Request]:
    """Those that run alone, and again and again beside each other."""
    rng = generator("same_bits")
    lengths = [rng.randint(1, options.prompt) for _ in range(options.alone)]
    return [
        (
            prompt,
            SamplingParams(
                max_tokens=options.output,
                temperature=0.8 * (index % 2),
                seed=index,
                ignore_eos=True,
                logprobs=0,
            ),
        )
        for index, prompt in enumerate(token_prompts(options.model, 1, lengths))
    ]


def bits(answer: Result) -> Bits:
    """Tokens of *answer*, each with its log-probability."""
    return [(entry.token_id, entry.logprob) for entry in answer.logprobs]


async def compare(options: Namespace, report: Report) -> None:
    """Count the answers that are not as alone."""
    config = EngineConfig(
        deterministic="fast" if options.fast else True,
        context={"n_ctx": options.slots * N_CELLS, "n_threads": options.threads},
        scheduler={"n_slots": options.slots},
    )
    todo, rng, numbers = requests(options), generator("order"), count(1)
    differ: list[int] = []
    async with AsyncEngine.open(options.model, config) as engine:
        alone = [bits(await engine.complete(*request)) for request in todo]

        async def caller() -> None:
            while (number := next(numbers)) <= options.requests:
                if number % 1000 == 0:
                    say(f"{number} requests, {len(differ)} differ")
                index = rng.randrange(len(todo))
                if bits(await engine.complete(*todo[index])) != alone[index]:
                    differ.append(index)

        async with anyio.create_task_group() as callers:
            for _ in range(2 * options.slots):
                callers.start_soon(caller)
        report.details |= {"products": engine.stats().products}
    report.add(
        mode="fast" if options.fast else "plain",
        slots=options.slots,
        requests=options.requests,
        differ=len(differ),
    )
    report.claim("differ", len(differ), "<=", 0)
    report.details |= {"of": sorted(set(differ))}


def main() -> int:
    """Run the script."""
    parser = arguments(__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--alone", type=int, default=200, help="requests to draw from")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=48, help="most tokens (48)")
    parser.add_argument("--output", type=int, default=8, help="tokens of an answer (8)")
    parser.add_argument("--fast", action="store_true", help='deterministic="fast"')
    return run_script("same_bits", compare, parser, timed=False)


if __name__ == "__main__":
    sys.exit(main())
