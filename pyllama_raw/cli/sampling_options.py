"""Flags that say how output tokens are chosen."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, _ArgumentGroup

from pyllama_raw.cli.flags import field, json_file, positive, text_file
from pyllama_raw.sampling.params import STAGES, SamplingParams

SAMPLING = tuple(SamplingParams.model_fields)

# A number each; the default is in brackets.
COMMON = {
    "max_tokens": "most output tokens (128)",
    "temperature": "0 is greedy (0.8)",
    "top_k": "0 is off (40)",
    "top_p": "1 is off (0.95)",
    "min_p": "0 is off (0.05)",
    "seed": "of every request (random)",
}
SAMPLERS = {
    "min_tokens": "before, only a stop string ends the output (0)",
    "typical_p": "1 is off (1)",
    "top_n_sigma": "0 is off (0)",
    "xtc_probability": "0 is off (0)",
    "xtc_threshold": "above 0.5 is off (0.1)",
    "dynatemp_range": "0 is off (0)",
    "dynatemp_exponent": "of the dynamic temperature (1)",
    "repeat_penalty": "1 is off (1)",
    "frequency_penalty": "0 is off (0)",
    "presence_penalty": "0 is off (0)",
    "penalty_last_n": "tokens that penalties look back; 0 is off (64)",
    "dry_multiplier": "0 is off (0)",
    "dry_base": "of the DRY penalty (1.75)",
    "dry_allowed_length": "tokens repeated without a penalty (2)",
    "dry_last_n": "tokens that DRY looks back; 0 is off (all)",
    "mirostat": "1 or 2: instead of all samplers but temperature (0)",
    "mirostat_tau": "the surprise that mirostat aims at (5)",
    "mirostat_eta": "how fast mirostat learns (0.1)",
}


def add_sampling(parser: ArgumentParser, *, max_tokens: int = 128) -> None:
    """Flags of everything that generates text."""
    group = parser.add_argument_group("sampling, where a line does not say otherwise")
    _add_numbers(group, COMMON | {"max_tokens": f"most output tokens ({max_tokens})"})
    group.add_argument(
        "--model-sampling",
        dest="from_model",
        action="store_const",
        const=True,
        help="what the model file declares, where no flag or line says otherwise",
    )
    group.add_argument(
        "--stop",
        action="append",
        type=_some_text,
        metavar="TEXT",
        help="ends the output; repeatable",
    )
    group.add_argument(
        "--ignore-eos", action="store_const", const=True, help="go on to --max-tokens"
    )
    _add_constraints(parser)
    more = parser.add_argument_group("more samplers")
    more.add_argument(
        "--samplers",
        dest="stages",
        type=_stages,
        metavar="NAMES",
        help=f"those that run, in this order ({','.join(STAGES)})",
    )
    _add_numbers(more, SAMPLERS)


def _add_constraints(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("forms that outputs keep; one of")
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
    group.add_argument(
        "--regex",
        type=_some_text,
        metavar="PATTERN",
        help="regular expression that a whole output matches (needs llguidance)",
    )
    group.add_argument(
        "--lark-file",
        dest="lark",
        type=text_file,
        metavar="FILE",
        help="Lark grammar of the outputs (needs llguidance)",
    )


def add_requests(parser: ArgumentParser) -> None:
    """Flags of requests that are made once and shown."""
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--deadline-s",
        type=positive,
        metavar="S",
        help="a request ends after so many seconds (never)",
    )
    _add_numbers(group, {"n": "outputs of every request (1)"})
    for name, whose in (("logprobs", "output"), ("prompt_logprobs", "prompt")):
        text = f"with --jsonl: of {whose} tokens, and of the N most likely instead"
        _add_numbers(group, {name: text})


def _add_numbers(group: _ArgumentGroup, table: dict[str, str]) -> None:
    for name, text in table.items():
        group.add_argument(
            f"--{name.replace('_', '-')}",
            type=field(SamplingParams, name),
            metavar="N",
            help=text,
        )


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
