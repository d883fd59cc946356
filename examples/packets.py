"""Text in tensor packets, as services of tensors send it: JSON in, a packet a piece out."""

import asyncio
import json
import sys
from contextlib import aclosing

from pyllama_raw.runners import LocalRunner, TensorPacket, infer


async def main(model: str | None = None) -> None:
    text = TensorPacket.of("The capital of France is")
    assert text is not None
    body = json.dumps(
        text.told()
    )  # {"shape": [1, 24], "dtype": "uint8", "data": [84, ...]}
    metadata = {"max_new_tokens": 8, "temperature": 0, "timeout_ms": 60_000}

    async with LocalRunner(model) as runner:
        packet = TensorPacket.read(json.loads(body))  # InvalidRequest if it is none
        async with aclosing(infer(runner, packet, metadata)) as pieces:
            data = b"".join([piece.data async for piece in pieces])
    print(len(data), "bytes:", data.decode())


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:2]))
