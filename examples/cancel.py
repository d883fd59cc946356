"""Three ways to end a request early: leave its block, a deadline, a cancel scope."""

import anyio

from pyllama_raw import AsyncEngine, SamplingParams

PARAMS = SamplingParams(max_tokens=500, ignore_eos=True)


async def main() -> None:
    async with AsyncEngine.open() as engine:
        async with engine.generate("Once upon a time", PARAMS) as generation:
            async for delta in generation:
                if delta.token_ids:
                    break  # leaving the block frees the slot within one step
        print("left:", generation.result.finish_reason)

        result = await engine.complete("Once upon a time", PARAMS, deadline_s=0.5)
        print("too late:", result.finish_reason, len(result.token_ids) < 500)

        with anyio.move_on_after(0.5) as scope:
            await engine.complete("Once upon a time", PARAMS)
        print("cancelled:", scope.cancelled_caught)


anyio.run(main)
