"""Semantic search: sentences by how close their vectors are to that of a question."""

import anyio
import numpy as np

from pyllama_raw import AsyncEngine

SENTENCES = [
    "The cat sleeps on the sofa.",
    "Paris is the capital of France.",
    "Bread is made of flour and water.",
]
QUESTION = "Which city is the capital of France?"


async def main() -> None:
    # The default model is made for text. A model for vectors, as MiniLM, is better at this
    # and says by itself how it is pooled.
    async with AsyncEngine.open() as engine:
        vectors = await engine.embed(SENTENCES, pooling="mean")
        (question,) = await engine.embed([QUESTION], pooling="mean")

        closeness = vectors @ question  # vectors have the length 1: these are cosines
        for index in np.argsort(-closeness):
            print(f"{closeness[index]:.3f}  {SENTENCES[index]}")


anyio.run(main)
