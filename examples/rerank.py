"""Rerank: the documents that a search has found, by how well they answer the question."""

import anyio

from pyllama_raw import AsyncEngine

QUESTION = "what is a panda?"
FOUND = [
    "The Fiat Panda is a small car.",
    "The giant panda is a bear that lives in China.",
    "Paris is the capital of France.",
]


async def main() -> None:
    # A model file with a head for ranking, as of bge-reranker-v2-m3; others are refused.
    async with AsyncEngine.open("reranker.gguf", needs="rank") as engine:
        for ranked in await engine.rank(QUESTION, FOUND):
            print(f"{ranked.score:.3f}  {FOUND[ranked.index]}")


anyio.run(main)
