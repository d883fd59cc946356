"""How likely a text is: token by token, and as perplexity."""

import anyio

from pyllama_raw import AsyncEngine, SamplingParams

TEXTS = [
    "The cat sat on the mat.",
    "The mat sat on the cat.",
    "Mat the on cat the sat.",
]


async def main() -> None:
    async with AsyncEngine.open() as engine:
        for text in TEXTS:
            score = await engine.score(text)
            print(f"{score.perplexity:8.1f}  {text}")

        params = SamplingParams(max_tokens=4, temperature=0, logprobs=2)
        result = await engine.complete("The capital of France is", params)
        for token in result.logprobs:
            print(token.token_id, round(token.logprob, 2), token.top)


anyio.run(main)
