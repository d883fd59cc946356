"""Flags of the commands; without a flag the default of config.py holds."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

from pyllama_raw.cli.engine_options import add_engine
from pyllama_raw.cli.fields import add_fields
from pyllama_raw.cli.flags import adapter, add, add_switch, count, positive
from pyllama_raw.options.config import EmbeddingConfig, MediaConfig
from pyllama_raw.options.frozen import descriptions
from pyllama_raw.options.requests import RequestOptions, TextOptions
from pyllama_raw.options.sampling import CONSTRAINTS, SamplingParams

CHAT_CTX = 8192  # cells; a model that knows less uses less
CHAT_TOKENS = 1024  # of an answer
FILE_HELP = "a GGUF file, or hf:OWNER/REPO/FILE"
MODEL_HELP = f"{FILE_HELP}; without it a small model is fetched once"

SAMPLING = tuple(SamplingParams.model_fields)
OF_LINE = ", ".join((*SAMPLING, *RequestOptions.__annotations__))
GROUPS = {
    "sampling, where a line does not say otherwise": (
        *("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed"),
        *("from_model", "stop", "ignore_eos"),
    ),
    "forms that outputs keep; one of": CONSTRAINTS,
    "more samplers": (
        *("stages", "min_tokens", "typical_p", "top_n_sigma"),
        *("xtc_probability", "xtc_threshold", "dynatemp_range", "dynatemp_exponent"),
        *("repeat_penalty", "frequency_penalty", "presence_penalty", "penalty_last_n"),
        *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_last_n"),
        *("mirostat", "mirostat_tau", "mirostat_eta"),
    ),
}


def add_generate(parser: ArgumentParser) -> None:
    """Flags of `generate`."""
    text = "text to go on from; a first one that ends in .gguf names the model"
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help=text)
    text = "JSON lines with prompt (text or token ids) or messages, and for each line any of"
    add(parser, "--input", str, "FILE", f"{text}: {OF_LINE}; - is stdin")
    add_switch(parser, "--chat", "a PROMPT is a message to the model")
    add(parser, "--system", str, "TEXT", "with --chat: how the model should behave")
    text = "an image before each PROMPT; repeatable"
    add(parser, "--image", Path, "FILE", text, dest="images", action="append")
    text = "a sound before each PROMPT, behind the images; repeatable"
    add(parser, "--audio", Path, "FILE", text, dest="sounds", action="append")
    add_fields(parser, MediaConfig, ("mmproj",))
    add_switch(parser, "--jsonl", "one JSON object a request on stdout")
    add(parser, "--summary", Path, "FILE", "write totals and latencies as JSON")
    _add_model(parser)
    group = parser.add_argument_group("requests")
    text = descriptions(TextOptions)["deadline_s"]
    add(group, "--deadline-s", positive, "S", text)
    add_fields(group, SamplingParams, ("n", "logprobs", "prompt_logprobs"))
    _add_sampling(parser)
    add_engine(parser)


def add_chat(parser: ArgumentParser) -> None:
    """Flags of `chat`."""
    add_model_argument(parser)
    add(parser, "--system", str, "TEXT", "how the model should behave")
    _add_model(parser)
    _add_sampling(parser, max_tokens=CHAT_TOKENS)
    add_engine(parser, n_slots=1, n_ctx=CHAT_CTX)


def add_model_argument(parser: ArgumentParser) -> None:
    """The model as an argument, as other commands have it; --model names it, too."""
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help=MODEL_HELP)


def _add_model(parser: ArgumentParser) -> None:
    add(parser, "--model", str, "MODEL", MODEL_HELP)
    parser.add_argument(
        "--adapter",
        dest="adapters",
        action="append",
        type=adapter,
        default=[],
        metavar="NAME=FILE[:SCALE]",
        help="a LoRA or control vector, and the scale of its effect (1); repeatable",
    )


def _add_sampling(parser: ArgumentParser, **defaults: int) -> None:
    """Flags of everything that generates text; a command may have other defaults."""
    for title, names in GROUPS.items():
        group = parser.add_argument_group(title)
        add_fields(group, SamplingParams, names, **defaults)


def add_embed(parser: ArgumentParser) -> None:
    """Flags of `embed`."""
    _add_texts(parser, "TEXT", "to make a vector of")
    add(parser, "--dimensions", count, "N", "only the first of each vector")
    add_switch(parser, "--raw", "vectors as they are, not of length 1")
    add_switch(parser, "--truncate", "cut the end off texts that are too long")
    parser.add_argument(
        "--pooling",
        choices=("mean", "cls", "last"),
        help="how the vectors of tokens become one (as the model says)",
    )
    add_switch(parser, "--tokens", "a vector for each token, not one a text")
    text = "write all vectors as one array, not as JSON lines"
    add(parser, "--npy", Path, "FILE", text)
    add_engine(parser)


def add_rank(parser: ArgumentParser) -> None:
    """Flags of `rank`."""
    parser.add_argument("query", metavar="QUERY", help="what documents are to answer")
    _add_texts(parser, "DOCUMENT", "to rank")
    add_engine(parser)


def _add_texts(parser: ArgumentParser, metavar: str, text: str) -> None:
    parser.add_argument("texts", nargs="*", metavar=metavar, help=text)
    text = 'lines: text, a JSON string, or an object with "text"; - is stdin'
    add(parser, "--input", str, "FILE", text)
    add(parser, "--model", str, "MODEL", FILE_HELP)
    group = parser.add_argument_group("steps of texts")
    add_fields(group, EmbeddingConfig, tuple(EmbeddingConfig.model_fields))


def add_info(parser: ArgumentParser) -> None:
    """Flags of `info`."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    add_switch(parser, "--json", "as one JSON object")
    add_fields(parser, MediaConfig, ("mmproj",))
    add_engine(parser)
