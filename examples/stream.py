"""Several streams at once: each is a task, all share the steps of one engine."""

import anyio

from pyllama_raw import AsyncEngine, SamplingParams

PROMPTS = ["The sky is blue because", "A lighthouse is", "To bake bread, one needs"]


async def show(engine: AsyncEngine, name: str, prompt: str) -> None:
    params = SamplingParams(max_tokens=16, temperature=0)
    async with engine.generate(prompt, params) as generation:
        async for delta in generation:
            print(f"{name}: {delta.text!r}")
    print(f"{name} ended with {generation.result.finish_reason}")


async def main() -> None:
    async with AsyncEngine.open() as engine, anyio.create_task_group() as tasks:
        for number, prompt in enumerate(PROMPTS):
            tasks.start_soon(show, engine, f"stream {number}", prompt)


anyio.run(main)
