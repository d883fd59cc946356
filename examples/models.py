"""Two models over memory for one: each is loaded when it is asked for, and gives way when it is idle."""

import asyncio
import sys
from collections.abc import Callable

from pyllama_raw import ContextConfig, EngineConfig, SamplingParams, estimate_memory
from pyllama_raw.runners import CachedModel, LocalRunner, ModelCache

CONFIG = EngineConfig(context=ContextConfig(n_ctx=1024))


def cached(file: str | None) -> CachedModel:
    def make(progress: Callable[[float], object]) -> LocalRunner:
        return LocalRunner(file, CONFIG, progress=progress)

    return CachedModel(make, sleep_s=60, unload_s=600)


async def main(first: str | None = None, second: str | None = None) -> None:
    models = {"first": cached(first), "second": cached(second)}
    n_bytes = estimate_memory(first, CONFIG).total_bytes
    params = SamplingParams(max_tokens=8, temperature=0)
    async with ModelCache(models, budget={"CPU": int(1.5 * n_bytes)}) as cache:
        for name in ("first", "second", "second", "first"):
            result = await cache.runner(name).generate("The sky is", params).collect()
            states = {model: str(cache.status(model).state) for model in cache}
            print(f"{result.served_by}:{result.text!r} {states}")
        cache.unload("first")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))
