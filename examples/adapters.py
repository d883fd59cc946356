"""Two adapters at once: each request names those that its output is computed with."""

import anyio

from pyllama_raw import AsyncEngine, SamplingParams

# LoRAs of the model, as convert_lora_to_gguf.py of llama.cpp writes them.
FILES = {"legal": "legal.gguf", "brief": "brief.gguf"}
SETS: list[dict[str, float]] = [{}, {"legal": 1.0}, {"legal": 1.0, "brief": 0.5}]


async def main() -> None:
    params = SamplingParams(max_tokens=16, temperature=0)
    async with AsyncEngine.open("model.gguf") as engine:
        for name, file in FILES.items():
            await engine.load_adapter(name, file)

        async def show(adapters: dict[str, float]) -> None:
            result = await engine.complete("The tenant", params, adapters=adapters)
            print(f"{adapters}: {result.text!r}")

        async with anyio.create_task_group() as tasks:
            for adapters in SETS:
                tasks.start_soon(show, adapters)


anyio.run(main)
