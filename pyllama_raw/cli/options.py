"""Flags of the commands; a flag that is not given leaves the default of config.py."""

from __future__ import annotations

import json
import re
from argparse import (
    ArgumentParser,
    ArgumentTypeError,
    BooleanOptionalAction,
    Namespace,
)
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

from pyllama_raw.config import (
    CacheConfig,
    ContextConfig,
    EngineConfig,
    KVType,
    ModelConfig,
    SchedulerConfig,
)
from pyllama_raw.profile import Profile
from pyllama_raw.sampling.params import SamplingParams

SAMPLING = tuple(SamplingParams.model_fields)


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
    _add_sampling(parser)
    add_engine(parser)


SIZES = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def byte_size(text: str) -> int:
    """Bytes of a size like 48M or 1.5GiB."""
    found = re.fullmatch(r"([0-9.]+) *([kmgt]?)(i?b)?", text.strip().lower())
    if found is None:
        raise ArgumentTypeError(f"{text!r} is no size: give bytes, or like 512M, 2G")
    try:
        return int(float(found[1]) * SIZES[found[2]])
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no size: give like 512M") from None


def text_file(name: str) -> str:
    """The text in a file."""
    try:
        return Path(name).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentTypeError(f"{name!r} cannot be read: {error}") from None


def json_file(name: str) -> Any:
    """The JSON value in a file."""
    try:
        return json.loads(text_file(name))
    except ValueError as error:
        raise ArgumentTypeError(f"{name!r} is no JSON: {error}") from None


MODEL_HELP = (
    "a GGUF file, or hf:OWNER/REPO/FILE; without it a small model is fetched once"
)


def _add_sampling(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("sampling, where a line does not say otherwise")
    group.add_argument("--max-tokens", type=int, help="most output tokens (128)")
    group.add_argument("--temperature", type=float, help="0 is greedy (0.8)")
    group.add_argument("--top-k", type=int, help="0 is off (40)")
    group.add_argument("--top-p", type=float, help="1 is off (0.95)")
    group.add_argument("--min-p", type=float, help="0 is off (0.05)")
    group.add_argument(
        "--model-sampling",
        dest="from_model",
        action="store_const",
        const=True,
        help="what the model file declares, where no flag or line says otherwise",
    )
    group.add_argument("--seed", type=int, help="of every request (random)")
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="ends the output; repeatable"
    )
    group.add_argument(
        "--ignore-eos", action="store_const", const=True, help="go on to --max-tokens"
    )
    group.add_argument(
        "--grammar-file",
        dest="grammar",
        type=text_file,
        metavar="FILE",
        help="GBNF that outputs follow",
    )
    group.add_argument(
        "--json-schema-file",
        dest="json_schema",
        type=json_file,
        metavar="FILE",
        help="JSON schema of the outputs (needs llguidance)",
    )
    group.add_argument("--deadline-s", type=float, metavar="S", help="of every request")
    group.add_argument(
        "--n", type=int, metavar="N", help="outputs of every request (1)"
    )
    for name, whose in (("--logprobs", "output"), ("--prompt-logprobs", "prompt")):
        text = f"with --jsonl: of {whose} tokens, and of the N most likely instead"
        group.add_argument(name, type=int, metavar="N", help=text)


def add_engine(parser: ArgumentParser) -> None:
    """Flags of everything that opens a model."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--profile",
        metavar="FILE",
        help="options, and the model if none is named, as `tune` wrote them; "
        "other flags win",
    )
    group.add_argument(
        "--slots", dest="n_slots", type=int, help="requests at a time (8)"
    )
    group.add_argument("--n-ctx", type=int, help="cells of all slots (2048 a slot)")
    group.add_argument("--token-budget", type=int, help="tokens a step (by time)")
    group.add_argument(
        "--deterministic",
        action="store_const",
        const=True,
        help="an output does not depend on what runs beside it",
    )
    group.add_argument(
        "--sampler-placement",
        choices=("auto", "backend", "host"),
        help="where tokens are chosen (auto)",
    )
    group.add_argument(
        "--context-full", choices=("stop", "shift"), help="when a slot is full (stop)"
    )
    group.add_argument("--threads", dest="n_threads", type=int)
    group.add_argument("--threads-batch", dest="n_threads_batch", type=int)
    group.add_argument("--gpu-layers", dest="n_gpu_layers", type=int)
    group.add_argument("--flash-attn", choices=("auto", "on", "off"))
    group.add_argument(
        "--kv-unified",
        action=BooleanOptionalAction,
        help="one pool of cells for all slots, or a part for each",
    )
    group.add_argument("--n-batch", type=int, help="most tokens a decode call (2048)")
    group.add_argument("--n-ubatch", type=int, help="most tokens a graph (512)")
    group.add_argument("--type-k", choices=get_args(KVType), metavar="TYPE")
    group.add_argument("--type-v", choices=get_args(KVType), metavar="TYPE")
    _add_cache(parser)


def _add_cache(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("prefix cache")
    group.add_argument(
        "--cache",
        dest="mode",
        choices=("off", "live", "snapshots"),
        help="reuse nothing, what slots hold, or host snapshots too (snapshots)",
    )
    group.add_argument(
        "--snapshot-interval",
        dest="snapshot_interval_tokens",
        type=int,
        metavar="N",
        help="tokens between snapshots where memory cannot be cut (256)",
    )
    group.add_argument(
        "--cache-bytes",
        dest="max_bytes",
        type=byte_size,
        metavar="SIZE",
        help="host memory for snapshots, like 512M (1G)",
    )
    group.add_argument(
        "--cache-entries", dest="max_entries", type=int, metavar="N", help="(65536)"
    )
    group.add_argument(
        "--cache-dir",
        dest="directory",
        type=Path,
        metavar="DIR",
        help="keep what slots held in files here, for later runs (no files)",
    )
    group.add_argument(
        "--cache-disk-bytes",
        dest="max_disk_bytes",
        type=byte_size,
        metavar="SIZE",
        help="of all files there, like 20G (10G)",
    )


def engine_config(options: Namespace) -> EngineConfig:
    """
    Raises:
        ConfigError: names the flag that is out of range.
    """
    return profile_of(options).engine_config(
        model=given(options, ModelConfig.model_fields),
        context=given(options, ContextConfig.model_fields),
        # The inputs are in memory already: only their number is limited.
        scheduler={"max_waiting_tokens": 2**40}
        | given(options, SchedulerConfig.model_fields),
        cache=given(options, CacheConfig.model_fields),
        engine=given(options, ("sampler_placement", "deterministic")),
    )


def profile_of(options: Namespace) -> Profile:
    """The one that was named, or one without any option."""
    return Profile() if options.profile is None else Profile.load(options.profile)


def model_spec(options: Namespace) -> str | Path | None:
    """The model that was named, or the profile's; None: the default one."""
    return options.model or profile_of(options).path


def given(options: Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Those of *names* that were given."""
    values = vars(options)
    return {name: values[name] for name in names if values.get(name) is not None}


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
        "--slots", dest="n_slots", type=int, default=8, help="requests at a time (8)"
    )
    parser.add_argument(
        "--prompt-tokens", type=int, default=128, help="of each request (128)"
    )
    parser.add_argument(
        "--output-tokens", type=int, default=16, help="of each request (16)"
    )
    parser.add_argument(
        "--max-step-s",
        type=float,
        default=0.3,
        metavar="S",
        help="how long a step of a fixed token budget may stall running streams (0.3)",
    )
