"""Flags of the commands; without a flag the default of config.py holds."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

from pyllama_raw.cli.adapters import add_adapters
from pyllama_raw.cli.engine_options import add_engine
from pyllama_raw.cli.fields import add_fields
from pyllama_raw.cli.flags import add, count
from pyllama_raw.cli.sampling_options import SAMPLING, add_requests, add_sampling
from pyllama_raw.options.config import EmbeddingConfig, MediaConfig
from pyllama_raw.options.requests import RequestOptions

CHAT_CTX = 8192  # cells; a model that knows less uses less
CHAT_TOKENS = 1024  # of an answer
MODEL_HELP = (
    "a GGUF file, or hf:OWNER/REPO/FILE; without it a small model is fetched once"
)


def add_generate(parser: ArgumentParser) -> None:
    """Flags of `generate`."""
    parser.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="text to go on from"
    )
    parser.add_argument(
        "--input",
        metavar="FILE",
        help="JSON lines with prompt (text or token ids) or messages, and for each line "
        "any of: "
        + ", ".join((*SAMPLING, *RequestOptions.__annotations__))
        + "; - is stdin",
    )
    parser.add_argument(
        "--chat", action="store_true", help="a PROMPT is a message to the model"
    )
    add(parser, "--system", str, "TEXT", "with --chat: how the model should behave")
    parser.add_argument(
        "--image",
        dest="images",
        action="append",
        type=Path,
        metavar="FILE",
        help="an image before each PROMPT; repeatable",
    )
    parser.add_argument(
        "--audio",
        dest="sounds",
        action="append",
        type=Path,
        metavar="FILE",
        help="a sound before each PROMPT, behind the images; repeatable",
    )
    add_fields(parser, MediaConfig, ("mmproj",))
    parser.add_argument(
        "--jsonl", action="store_true", help="one JSON object a request on stdout"
    )
    add(parser, "--summary", Path, "FILE", "write totals and latencies as JSON")
    add(parser, "--model", str, "MODEL", MODEL_HELP)
    add_adapters(parser)
    add_requests(parser)
    add_sampling(parser)
    add_engine(parser)


def add_embed(parser: ArgumentParser) -> None:
    """Flags of `embed`."""
    _add_texts(parser, "TEXT", "to make a vector of")
    add(parser, "--dimensions", count, "N", "only the first of each vector")
    parser.add_argument(
        "--raw", action="store_true", help="vectors as they are, not of length 1"
    )
    parser.add_argument(
        "--pooling",
        choices=("mean", "cls", "last"),
        help="how the vectors of tokens become one (as the model says)",
    )
    parser.add_argument(
        "--tokens", action="store_true", help="a vector for each token, not one a text"
    )
    add(
        parser,
        "--npy",
        Path,
        "FILE",
        "write all vectors as one array, not as JSON lines",
    )
    add_engine(parser)


def add_rank(parser: ArgumentParser) -> None:
    """Flags of `rank`."""
    parser.add_argument("query", metavar="QUERY", help="what documents are to answer")
    _add_texts(parser, "DOCUMENT", "to rank")
    add_engine(parser)


def _add_texts(parser: ArgumentParser, metavar: str, text: str) -> None:
    parser.add_argument("texts", nargs="*", metavar=metavar, help=text)
    parser.add_argument(
        "--input",
        metavar="FILE",
        help='JSON lines, each a string or an object with "text"; - is stdin',
    )
    add(parser, "--model", str, "MODEL", "a GGUF file, or hf:OWNER/REPO/FILE")
    group = parser.add_argument_group("steps of texts")
    add_fields(group, EmbeddingConfig, tuple(EmbeddingConfig.model_fields))


def add_chat(parser: ArgumentParser) -> None:
    """Flags of `chat`."""
    add(parser, "--system", str, "TEXT", "how the model should behave")
    add(parser, "--model", str, "MODEL", MODEL_HELP)
    add_adapters(parser)
    add_sampling(parser, max_tokens=CHAT_TOKENS)
    add_engine(parser, n_slots=1, n_ctx=CHAT_CTX)


def add_info(parser: ArgumentParser) -> None:
    """Flags of `info`."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    add_fields(parser, MediaConfig, ("mmproj",))
    add_engine(parser)
