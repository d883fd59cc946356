"""A question about an image: the projector of the model makes rows of embeddings of it."""

import anyio
import numpy as np

from pyllama_raw import AsyncEngine, EngineConfig, Image, MediaConfig, SamplingParams

MODEL = "hf:ggml-org/SmolVLM-256M-Instruct-GGUF/SmolVLM-256M-Instruct-Q8_0.gguf"


async def main() -> None:
    red = np.zeros((64, 64, 3), np.uint8)
    red[..., 0] = 255
    config = EngineConfig(media=MediaConfig(mmproj="auto"))  # the file beside the model
    params = SamplingParams(max_tokens=8, temperature=0)
    async with AsyncEngine.open(MODEL, config) as engine:
        for question in ("What colour is this?", "Is this red?"):
            prompt: list[str | Image] = ["User: ", Image(red), f" {question}\nAnswer:"]
            result = await engine.complete(prompt, params)
            print(f"{question} {result.text!r}")
            print(f"{result.usage.media_tokens} rows of the image")
        print(f"{engine.stats().encodes} encode")  # the second question shares it


anyio.run(main)
