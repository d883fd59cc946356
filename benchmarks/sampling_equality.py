"""
For each stage and constraint our tokens are those of llama-server with the same seed.

Deterministic configuration, one slot, no cache, no flash attention on both sides. Each
case is one set of parameters, given to both in their own words. Where equality cannot be
had the case says why, and only its tokens are shown.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
from equality import differences
from load.measure import NO_DRAFTS, Report, arguments, parse, say
from load.workloads import token_prompts
from peers.llama_server import completed, llama_server

from pyllama_raw import (
    AsyncEngine,
    CacheConfig,
    ContextConfig,
    EngineConfig,
    SamplingParams,
    SchedulerConfig,
)

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.grammars import JSON

N_CTX = 1024
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}

# Our names where llama-server has others.
THEIRS = {
    "penalty_last_n": "repeat_last_n",
    "dry_last_n": "dry_penalty_last_n",
    "stages": "samplers",
}
STAGES = {"typical": "typ_p"}

Outputs = list[list[int]]


@dataclass(frozen=True)
class Case:
    """One set of parameters."""

    name: str
    params: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)  # for llama-server
    why_not: str = ""  # equality cannot be had


def _case(name: str, why_not: str = "", **params: Any) -> Case:
    return Case(name, OFF | params, why_not=why_not)


ADAPTIVE = (
    *("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc"),
    *("temperature", "adaptive_p"),
)
LIST = 'root ::= "[" item (", " item){2} "]"\nitem ::= "\\"" [a-z]{2,9} "\\""'

CASES = [
    Case("defaults", {}),
    _case("temperature 1"),
    _case("temperature 0.7", temperature=0.7),
    _case("greedy", temperature=0.0),
    _case("dynamic temperature", dynatemp_range=0.5, dynatemp_exponent=1.5),
    _case("top_k", top_k=20),
    _case("top_p", top_p=0.6),
    _case("min_p", min_p=0.1),
    _case("typical", typical_p=0.5),
    _case("top_n_sigma", top_n_sigma=1.0),
    _case("xtc", xtc_probability=0.5, xtc_threshold=0.05),
    _case("min_keep", top_p=0.2, min_keep=5),
    _case("repeat penalty", top_k=40, repeat_penalty=1.3),
    _case("repeat penalty, short", top_k=40, repeat_penalty=1.3, penalty_last_n=8),
    _case("repeat penalty, all", top_k=40, repeat_penalty=1.2, penalty_last_n=None),
    _case("frequency penalty", top_k=40, frequency_penalty=0.5),
    _case("presence penalty", top_k=40, presence_penalty=0.9),
    _case("greedy with penalties", temperature=0.0, repeat_penalty=1.3),
    _case("dry", top_k=40, dry_multiplier=0.8),
    _case("dry, greedy", temperature=0.0, dry_multiplier=0.8, dry_allowed_length=1),
    _case(
        "dry, breakers", top_k=40, dry_multiplier=1.0, dry_sequence_breakers=(" the",)
    ),
    _case("mirostat 1", mirostat=1, mirostat_tau=4.0),
    _case("mirostat 2", mirostat=2, mirostat_eta=0.2),
    Case("adaptive_p", OFF | {"adaptive_target": 0.3}, {"samplers": ADAPTIVE}),
    _case("order", top_p=0.6, top_k=30, stages=("temperature", "top_p", "top_k")),
    _case("infill", top_k=20, stages=("top_k", "infill", "temperature")),
    _case("all", top_k=40, top_p=0.9, min_p=0.02, repeat_penalty=1.1, temperature=0.9),
    _case("logit_bias", top_k=40, logit_bias={28: -3.0, 50: 2.0}),
    _case("ignore_eos", top_k=40, ignore_eos=True),
    _case("grammar", grammar=LIST),
    _case("grammar, greedy", temperature=0.0, grammar=LIST),
    _case("grammar, top_k", top_k=40, temperature=0.8, grammar=LIST),
    _case("grammar, json", top_k=40, grammar=JSON),
    _case("grammar, mirostat", mirostat=2, grammar=JSON),
    _case("grammar, dry", top_k=40, dry_multiplier=0.8, grammar=JSON),
    _case(
        "typical, ignore_eos",
        "llama.cpp computes NaN from the logit of a forbidden token",
        typical_p=0.5,
        ignore_eos=True,
    ),
]


def body_of(case: Case, seed: int, max_tokens: int) -> dict[str, Any]:
    """What llama-server is asked."""
    fields: dict[str, Any] = {}
    for name, value in case.params.items():
        fields[THEIRS.get(name, name)] = N_CTX if value is None else value
    if "logit_bias" in fields:
        fields["logit_bias"] = list(fields["logit_bias"].items())
    if "samplers" in fields:
        fields["samplers"] = [STAGES.get(name, name) for name in fields["samplers"]]
    fixed = {"cache_prompt": False, "return_tokens": True, "seed": seed}
    return fields | case.extra | fixed | {"n_predict": max_tokens}


def theirs(options: Namespace, prompts: Outputs) -> list[Outputs]:
    """By case and prompt; a prompt's number is its seed."""
    flags = ("--flash-attn", "off", "--no-kv-unified", "--cache-ram", "0")
    server = llama_server(
        options.model, n_slots=1, n_ctx=N_CTX, threads=options.threads, flags=flags
    )
    by_case = []
    with server as url:
        for case in CASES:
            outputs = []
            for seed, prompt in enumerate(prompts):
                body = body_of(case, seed, options.max_tokens) | {"prompt": prompt}
                outputs.append(completed(url, body))
            by_case.append(outputs)
            say(f"llama-server: {case.name}")
    return by_case


async def ours(options: Namespace, prompts: Outputs) -> list[Outputs]:
    """By case and prompt."""
    config = EngineConfig(
        speculation=NO_DRAFTS,
        context=ContextConfig(n_ctx=N_CTX, n_threads=options.threads),
        scheduler=SchedulerConfig(n_slots=1),
        cache=CacheConfig(mode="off"),
        deterministic=True,
    )
    by_case = []
    async with AsyncEngine.open(options.model, config) as engine:
        for case in CASES:
            outputs = []
            for seed, prompt in enumerate(prompts):
                fields = case.params | {"max_tokens": options.max_tokens, "seed": seed}
                result = await engine.complete(prompt, SamplingParams(**fields))
                outputs.append(list(result.token_ids))
            by_case.append(outputs)
    return by_case


def main() -> int:
    """Run the script."""
    parser = arguments(__doc__)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=32)
    options = parse(parser)
    report = Report("sampling_equality", options, timed=False)
    prompts = token_prompts(
        options.model, 2, [5 + 9 * i for i in range(options.prompts)]
    )
    reference = theirs(options, prompts)
    outputs = anyio.run(ours, options, prompts)
    for case, mine, other in zip(CASES, outputs, reference, strict=True):
        places = differences(mine, other)
        first = str(tuple(places[0])) if places else ""
        row = {"case": case.name, "prompts": len(prompts), "differ": len(places)}
        report.add(**row, first=first, why_not=case.why_not)
        if not case.why_not:
            report.claim(f"differ: {case.name}", len(places), "<=", 0)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
