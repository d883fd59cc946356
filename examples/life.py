"""One engine sleeps, wakes and gets another model, while its chats go on."""

import anyio

from pyllama_raw import AsyncEngine, SamplingParams

PARAMS = SamplingParams(max_tokens=4, temperature=0)
PROMPT = "The capital of France is"


async def main() -> None:
    async with AsyncEngine.open() as engine:
        await engine.warmup()
        first = await engine.complete(PROMPT, PARAMS)
        for level in (1, 2):
            await engine.sleep(level)
            print(f"level {level}: {engine.state}")
            await engine.wake()
        again = await engine.complete(PROMPT + first.text, PARAMS)
        print(f"{again.usage.cached_tokens} tokens are cached after that")

        await engine.reload()  # another file, or other options; no request fails
        last = await engine.complete(PROMPT, PARAMS)
        print(f"equal: {last.text == first.text}; the engine is {engine.state}")


anyio.run(main)
