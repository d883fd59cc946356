import anyio

from pyllama_raw import AsyncEngine, SamplingParams


async def main() -> None:
    async with AsyncEngine.open() as engine:  # the default model, fetched once
        params = SamplingParams(max_tokens=16, temperature=0)
        async with engine.generate("The capital of France is", params) as generation:
            async for delta in generation:
                print(delta.text, end="", flush=True)
        print(f"\n{generation.result.usage}")


anyio.run(main)
