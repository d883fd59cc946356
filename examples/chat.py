"""A conversation: messages in, the next message out, by the model's own template."""

import anyio

from pyllama_raw import AsyncEngine, Message, SamplingParams

QUESTIONS = ["Name one colour.", "And another one?"]


async def main() -> None:
    params = SamplingParams(max_tokens=16, temperature=0)
    messages: list[Message] = [
        {"role": "system", "content": "You answer in one short sentence."}
    ]
    async with AsyncEngine.open() as engine:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            answer = await engine.complete(messages, params)
            messages.append({"role": "assistant", "content": answer.text})
            print(f"> {question}\n{answer.text}")


anyio.run(main)
