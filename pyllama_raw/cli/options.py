"""Flags of the commands; a flag that is not given leaves the default of config.py."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

from pyllama_raw.cli.engine_options import add_engine
from pyllama_raw.cli.flag_help import help_of
from pyllama_raw.cli.flags import field, positive, whole
from pyllama_raw.cli.sampling_options import SAMPLING, add_requests, add_sampling
from pyllama_raw.config import SchedulerConfig

CHAT_CTX = 8192  # cells; a model that knows less uses less
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
        "any of: " + ", ".join((*SAMPLING, "priority", "deadline_s")) + "; - is stdin",
    )
    parser.add_argument(
        "--chat", action="store_true", help="a PROMPT is a message to the model"
    )
    _add_system(parser, "with --chat: ")
    parser.add_argument(
        "--jsonl", action="store_true", help="one JSON object a request on stdout"
    )
    parser.add_argument(
        "--summary",
        type=Path,
        metavar="FILE",
        help="write totals and latencies as JSON",
    )
    parser.add_argument("--model", metavar="MODEL", help=MODEL_HELP)
    add_requests(parser)
    add_sampling(parser)
    add_engine(parser)


def add_chat(parser: ArgumentParser) -> None:
    """Flags of `chat`."""
    _add_system(parser)
    parser.add_argument("--model", metavar="MODEL", help=MODEL_HELP)
    add_sampling(parser, max_tokens=1024)
    add_engine(parser, n_slots=1, n_ctx=CHAT_CTX)


def _add_system(parser: ArgumentParser, when: str = "") -> None:
    parser.add_argument(
        "--system", metavar="TEXT", help=f"{when}how the model should behave"
    )


def add_info(parser: ArgumentParser) -> None:
    """Flags of `info`."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    add_engine(parser)


FILE_TYPES = (
    "q4_0",
    "q4_1",
    "q5_0",
    "q5_1",
    "q8_0",
    "q4_k_m",
    "q5_k_m",
    "q6_k",
    "f16",
    "bf16",
)


def add_tune(parser: ArgumentParser) -> None:
    """Flags of `tune`."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--out", metavar="FILE", help="the profile (MODEL's name with .profile.json)"
    )
    parser.add_argument(
        "--requantize",
        type=Path,
        metavar="FILE",
        help="keep the requantised model as FILE, which must not exist, and use it in "
        "the profile if it is faster (measured, reported and thrown away)",
    )
    parser.add_argument(
        "--file-type",
        dest="file_types",
        action="append",
        choices=FILE_TYPES,
        help="what to requantise to; repeatable (q4_0)",
    )
    parser.add_argument(
        "--slots",
        dest="n_slots",
        type=field(SchedulerConfig, "n_slots"),
        default=8,
        metavar="N",
        help=help_of(SchedulerConfig, "n_slots"),
    )
    parser.add_argument(
        "--prompt-tokens",
        type=whole(1),
        default=128,
        metavar="N",
        help="of each request (128)",
    )
    parser.add_argument(
        "--output-tokens",
        type=whole(1),
        default=16,
        metavar="N",
        help="of each request (16)",
    )
    parser.add_argument(
        "--max-step-s",
        type=positive,
        default=0.3,
        metavar="S",
        help="how long a step of a fixed token budget may stall running streams (0.3)",
    )
