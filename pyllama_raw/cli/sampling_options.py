"""Flags that say how output tokens are chosen."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, _ArgumentGroup

from pyllama_raw.arguments import RequestOptions
from pyllama_raw.cli.flag_help import help_of
from pyllama_raw.cli.flags import field, json_file, positive, text_file
from pyllama_raw.sampling.params import STAGES, SamplingParams

SAMPLING = tuple(SamplingParams.model_fields)

# A number each.
COMMON = ("temperature", "top_k", "top_p", "min_p", "seed")
SAMPLERS = (
    "min_tokens",
    "typical_p",
    "top_n_sigma",
    "xtc_probability",
    "xtc_threshold",
    "dynatemp_range",
    "dynatemp_exponent",
    "repeat_penalty",
    "frequency_penalty",
    "presence_penalty",
    "penalty_last_n",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_last_n",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
)


def add_sampling(parser: ArgumentParser, *, max_tokens: int = 128) -> None:
    """Flags of everything that generates text."""
    group = parser.add_argument_group("sampling, where a line does not say otherwise")
    _add_number(group, "max_tokens", max_tokens)
    for name in COMMON:
        _add_number(group, name)
    group.add_argument(
        "--model-sampling",
        dest="from_model",
        action="store_const",
        const=True,
        help=_help("from_model", more=", where no flag or line says otherwise"),
    )
    group.add_argument(
        "--stop",
        action="append",
        type=_some_text,
        metavar="TEXT",
        help=_help("stop", more="; repeatable"),
    )
    group.add_argument(
        "--ignore-eos", action="store_const", const=True, help=_help("ignore_eos")
    )
    _add_constraints(parser)
    more = parser.add_argument_group("more samplers")
    more.add_argument(
        "--samplers",
        dest="stages",
        type=_stages,
        metavar="NAMES",
        help=_help("stages"),
    )
    for name in SAMPLERS:
        _add_number(more, name)


def _add_constraints(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("forms that outputs keep; one of")
    group.add_argument(
        "--grammar-file",
        dest="grammar",
        type=text_file,
        metavar="FILE",
        help=_help("grammar"),
    )
    group.add_argument(
        "--json-schema-file",
        dest="json_schema",
        type=json_file,
        metavar="FILE",
        help=_help("json_schema"),
    )
    group.add_argument(
        "--regex",
        type=_some_text,
        metavar="PATTERN",
        help=_help("regex"),
    )
    group.add_argument(
        "--lark-file",
        dest="lark",
        type=text_file,
        metavar="FILE",
        help=_help("lark"),
    )


def add_requests(parser: ArgumentParser) -> None:
    """Flags of requests that are made once and shown."""
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--deadline-s",
        type=positive,
        metavar="S",
        help=help_of(RequestOptions, "deadline_s"),
    )
    _add_number(group, "n")
    for name in ("logprobs", "prompt_logprobs"):
        _add_number(group, name, more="; shown with --jsonl")


def _add_number(
    group: _ArgumentGroup, name: str, default: int | None = None, *, more: str = ""
) -> None:
    group.add_argument(
        f"--{name.replace('_', '-')}",
        type=field(SamplingParams, name),
        metavar="N",
        help=_help(name, default, more=more),
    )


def _help(name: str, default: int | None = None, *, more: str = "") -> str:
    """Help of the flag for a sampling parameter; nobody has to turn a switch off."""
    text = help_of(SamplingParams, name, default, more=more)
    return text.removesuffix(" (no)")


def _some_text(text: str) -> str:
    if not text:
        raise ArgumentTypeError("'': some text")
    return text


def _stages(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    allowed = (*STAGES, "infill")
    for name in names:
        if name not in allowed:
            raise ArgumentTypeError(f"{name}: some of {', '.join(allowed)}")
    return names
