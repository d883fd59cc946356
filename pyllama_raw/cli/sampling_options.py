"""Flags that say how output tokens are chosen."""

from __future__ import annotations

from argparse import ArgumentParser

from pyllama_raw.cli.fields import add_fields
from pyllama_raw.cli.flags import add, positive
from pyllama_raw.options.described import descriptions
from pyllama_raw.options.requests import TextOptions
from pyllama_raw.options.sampling import CONSTRAINTS, SamplingParams

SAMPLING = tuple(SamplingParams.model_fields)

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


def add_sampling(parser: ArgumentParser, **defaults: int) -> None:
    """Flags of everything that generates text; a command may have other defaults."""
    for title, names in GROUPS.items():
        group = parser.add_argument_group(title)
        add_fields(group, SamplingParams, names, **defaults)


def add_requests(parser: ArgumentParser) -> None:
    """Flags of requests that are made once and shown."""
    group = parser.add_argument_group("requests")
    text = descriptions(TextOptions)["deadline_s"]
    add(group, "--deadline-s", positive, "S", text)
    add_fields(group, SamplingParams, ("n", "logprobs", "prompt_logprobs"))
