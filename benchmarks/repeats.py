"""
The same request twice gives the same tokens, wherever its prompt is taken from.

Prompts of random tokens, 2 to 1,500 of them, alone in an engine with default options. Each
is asked for greedily and with a seed at T = 0.8:

- cold: for the first time;
- live: at once again, while a slot holds it;
- snapshots: after all others, when its slot has been given away;
- disk: in a new engine that finds the files of the first one.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from load.measure import Report, arguments, run_script, say

from pyllama_raw import AsyncEngine, CacheConfig, EngineConfig, Result, SamplingParams

N_OUTPUT = 16
LENGTHS = [2, 3, 5, 17, 40, 63, 64, 65, 100, 200, 250, 257, 400, 513, 700, 1500]
TEMPERATURES = (0.0, 0.8)
Outputs = dict[int, tuple[int, ...]]  # by index of the prompt


def prompts(n_prompts: int) -> list[list[int]]:
    """Their lengths take turns."""
    rng = np.random.default_rng(7)
    lengths = [LENGTHS[i % len(LENGTHS)] for i in range(n_prompts)]
    return [rng.integers(100, 40_000, length).tolist() for length in lengths]


async def ask(engine: AsyncEngine, prompt: list[int], temperature: float) -> Result:
    """One request; the temperatures share no prefixes."""
    params = SamplingParams(
        max_tokens=N_OUTPUT, temperature=temperature, seed=1, ignore_eos=True
    )
    return await engine.complete(prompt, params, cache_salt=f"T={temperature}")


class Passes:
    """Asks for all prompts, and counts what differs from the first time."""

    def __init__(self, options: Namespace, report: Report, temperature: float) -> None:
        self._report = report
        self._temperature = temperature
        self._prompts = prompts(options.prompts)
        self._cold: Outputs = {}

    async def cold_and_live(self, engine: AsyncEngine) -> None:
        """Each twice in a row."""
        results = []
        for index, prompt in enumerate(self._prompts):
            first = await ask(engine, prompt, self._temperature)
            self._cold[index] = tuple(first.token_ids)
            results.append(await ask(engine, prompt, self._temperature))
        self._compare("live", results)

    async def again(self, engine: AsyncEngine, name: str) -> None:
        """All in their order."""
        results = [await ask(engine, p, self._temperature) for p in self._prompts]
        self._compare(name, results)

    def _compare(self, name: str, results: list[Result]) -> None:
        differing = [
            i for i, r in enumerate(results) if tuple(r.token_ids) != self._cold[i]
        ]
        tiers = Counter(str(r.usage.cache_tier) for r in results)
        self._report.add(
            T=self._temperature,
            taken_from=name,
            prompts=len(results),
            differ=len(differing),
            lengths=[len(self._prompts[i]) for i in differing],
            tiers=" ".join(f"{tier}:{n}" for tier, n in sorted(tiers.items())),
        )
        self._report.claim(
            f"differ, T = {self._temperature}, {name}", len(differing), "<=", 0
        )
        say(f"T = {self._temperature}, {name}: {len(differing)} of {len(results)}")


async def measure(options: Namespace, report: Report) -> None:
    """Two engines, one after the other, on one directory."""
    passes = [Passes(options, report, t) for t in TEMPERATURES]
    with TemporaryDirectory() as folder:
        config = EngineConfig(cache=CacheConfig(directory=Path(folder)))
        async with AsyncEngine.open(options.model, config) as engine:
            for repeat in passes:
                await repeat.cold_and_live(engine)
                await repeat.again(engine, "snapshots")
        async with AsyncEngine.open(options.model, config) as engine:
            for repeat in passes:
                await repeat.again(engine, "disk")


def main() -> int:
    """Run the script."""
    parser = arguments(__doc__)
    parser.add_argument("--prompts", type=int, default=100, help="how many (100)")
    return run_script("repeats", measure, parser, timed=False)


if __name__ == "__main__":
    sys.exit(main())
