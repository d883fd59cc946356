"""A pool of two engines as one runner: what one fails at before its first token, another does."""

import asyncio
import sys

from pyllama_raw import SamplingParams
from pyllama_raw.runners import LocalRunner, ModelRunner, Pool


async def main(model: str | None = None) -> None:
    runners: dict[str, ModelRunner] = {
        "one": LocalRunner(model),
        "two": LocalRunner(model),  # or RemoteRunner("http://127.0.0.1:8000/v1", "a")
    }
    async with Pool(runners) as pool:
        params = SamplingParams(max_tokens=24)
        async with pool.generate("The sky is", params, client="me") as run:
            async for delta in run:
                print(delta.text, end="", flush=True)
        print("\n", run.result.usage)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:2]))
