"""Several outputs of one prompt: it is computed once, and the outputs run side by side."""

import anyio

from pyllama_raw import AsyncEngine, SamplingParams


async def main() -> None:
    params = SamplingParams(max_tokens=12, n=3, seed=7)  # seeds 7, 8 and 9
    async with AsyncEngine.open() as engine:
        results = await engine.complete_n("My favourite colour is", params)
        for result in results:
            print(f"{result.index} (seed {result.seed}):{result.text!r}")

        async with engine.generate("One, two,", params) as generation:
            async for delta in generation:  # outputs take turns
                print(f"{delta.index}: {delta.text!r}")
        print([str(result.finish_reason) for result in generation.results])


anyio.run(main)
