"""`pyllama-raw serve`: models over HTTP."""

from __future__ import annotations

from argparse import Namespace

from pyllama_raw.cli.parser import Parser
from pyllama_raw.errors import ConfigError


def add_serve(parser: Parser) -> None:
    """Add the flags."""
    parser.add_argument("model", nargs="*", help="GGUF files; default: a small model")
    parser.add_argument("--alias", action="append", help="the name of a model, in turn")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)


def serve(parsed: Namespace) -> int:
    """Answer until a signal comes."""
    import anyio

    try:
        from pyllama_raw.serve import run
    except ImportError as error:
        missing = "pip install fastapi uvicorn"
        raise ConfigError(f"{error}: run `{missing}`, the extra `serve`") from error
    files = parsed.model or [None]
    names = parsed.alias or [str(file or "default") for file in files]
    models = dict(zip(names, files, strict=True))

    async def answer() -> None:
        await run.serve(models, host=parsed.host, port=parsed.port)

    anyio.run(answer)
    return 0
