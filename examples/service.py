"""
A service of your own: all that `pyllama-raw serve` answers, and a route beside it.

    pip install 'pyllama_raw[serve]'
    python examples/service.py --model model.gguf --port 8000
    curl -d '{"messages": [{"role": "user", "content": "Hello!"}]}' \\
        localhost:8000/v1/chat/completions
"""

from argparse import ArgumentParser

import anyio

from pyllama_raw import AsyncEngine
from pyllama_raw.serve import ListenConfig, ServeConfig, make_app, serve


async def run(model: str | None, port: int) -> None:
    """Answer until SIGTERM or SIGINT comes, and what runs has ended."""
    async with AsyncEngine.open(model) as engine:
        app = make_app({"assistant": engine}, ServeConfig(drain_s=20))

        @app.get("/tokens/{text}")
        async def tokens(text: str) -> list[int]:
            """Token ids of a text."""
            return await engine.tokenize(text)

        await serve(app, ListenConfig(port=port), say)


def say(line: str) -> None:
    """Tell where the service listens, at once."""
    print(line, flush=True)


def main() -> None:
    """Run the script."""
    parser = ArgumentParser(description="A service.")
    parser.add_argument("--model", help="a GGUF file; default: a small model")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    anyio.run(run, options.model, options.port)


if __name__ == "__main__":
    main()
