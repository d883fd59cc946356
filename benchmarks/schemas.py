"""
100 JSON schemas with 3 prompts each: every output that ends is valid, and what it costs.

All requests run at once on 8 slots. The same prompts then give as many tokens each without
a schema; the ratio is that of the time a token, in the median of the rounds. Schemas are
compiled before, which a server does once for each. Then, in deterministic mode, a batch of
8 in which one schema is invalid and one leads into a dead end: the others are as without.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import anyio
import jsonschema
from load.measure import NO_DRAFTS, Report, arguments, parse, say

from pyllama_raw import (
    AsyncEngine,
    ContextConfig,
    EngineConfig,
    FinishReason,
    PyllamaError,
    Result,
    SamplingParams,
    SchedulerConfig,
)

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.schemas import SCHEMAS, Schema

PROMPTS = (
    "A JSON document about {}:\n",
    "Describe {} as JSON. Answer with nothing else.\n",
    "{}\n",
)
N_SLOTS = 8
Work = list[tuple[str, Schema, SamplingParams]]


async def run(engine: AsyncEngine, work: Work) -> tuple[list[Result], float]:
    """Results in order, and seconds."""
    results: dict[int, Result] = {}

    async def complete(index: int) -> None:
        results[index] = await engine.complete(work[index][0], work[index][2])

    started = perf_counter()
    async with anyio.create_task_group() as group:
        for index in range(len(work)):
            group.start_soon(complete, index)
    return [results[index] for index in range(len(work))], perf_counter() - started


def make_work(n_schemas: int, max_tokens: int) -> Work:
    """Each schema with each prompt; the number is the seed."""
    return [
        (
            prompt.format(name),
            schema,
            SamplingParams(json_schema=schema, max_tokens=max_tokens, seed=seed),
        )
        for seed, (name, schema) in enumerate(SCHEMAS[:n_schemas])
        for prompt in PROMPTS
    ]


def free(work: Work, results: Sequence[Result]) -> Work:
    """The same work without schemas, of the same length."""
    return [
        (
            prompt,
            schema,
            SamplingParams(
                max_tokens=max(len(result.token_ids), 1),
                seed=params.seed,
                ignore_eos=True,
            ),
        )
        for (prompt, schema, params), result in zip(work, results, strict=True)
    ]


def n_invalid(work: Work, results: Sequence[Result]) -> int:
    """Finished outputs that are not what their schema says."""
    count = 0
    for (_, schema, _), result in zip(work, results, strict=True):
        if result.finish_reason is not FinishReason.STOP:
            continue
        try:
            jsonschema.validate(json.loads(result.text), schema)
        except (ValueError, jsonschema.ValidationError):
            say(f"invalid: {result.text!r} for {schema}")
            count += 1
    return count


async def measure(options: Namespace, report: Report) -> None:
    """Rounds of both, one after the other."""
    config = engine_config(options)
    work = make_work(options.schemas, options.max_tokens)
    async with AsyncEngine.open(options.model, config) as engine:
        compiling = perf_counter()
        await run(
            engine, [(p, s, q.model_copy(update={"max_tokens": 1})) for p, s, q in work]
        )
        report.details["compile_and_first_token_s"] = perf_counter() - compiling
        ratios = []
        for round_ in range(options.rounds):
            results, with_s = await run(engine, work)
            unconstrained, without_s = await run(engine, free(work, results))
            n_tokens = sum(len(r.token_ids) for r in results)
            n_free = sum(len(r.token_ids) for r in unconstrained)
            ratio = (with_s / n_tokens) / (without_s / n_free)
            ratios.append(ratio)
            ended = sum(r.finish_reason is FinishReason.STOP for r in results)
            invalid = n_invalid(work, results)
            report.add(
                round=round_, requests=len(work), ended=ended, invalid=invalid,
                tokens=n_tokens, with_s=with_s, without_s=without_s, ratio=ratio,
            )  # fmt: skip
            report.claim(f"invalid_{round_}", invalid, "<=", 0)
        report.claim("cost_ratio", sorted(ratios)[len(ratios) // 2], "<=", 1.25)


def engine_config(options: Namespace, *, deterministic: bool = False) -> EngineConfig:
    """8 slots of 512 tokens."""
    return EngineConfig(
        speculation=NO_DRAFTS,
        context=ContextConfig(n_ctx=N_SLOTS * 512, n_threads=options.threads),
        scheduler=SchedulerConfig(n_slots=N_SLOTS),
        deterministic=deterministic,
    )


async def disturb(options: Namespace, report: Report) -> None:
    """Two requests of a batch of eight fail, each in its own way."""
    good = make_work(N_SLOTS, options.max_tokens)[:: len(PROMPTS)][: N_SLOTS - 2]
    errors: list[str] = []
    config = engine_config(options, deterministic=True)
    async with AsyncEngine.open(options.model, config) as engine:
        pieces = engine._parts.vocab.pieces
        digits = tuple(t for t, piece in enumerate(pieces) if piece[:1].isdigit())
        bad = {
            "BadSchema": SamplingParams(json_schema={"type": "no such type"}),
            "SamplingFailed": SamplingParams(regex="[0-9]+", suppress_tokens=digits),
        }

        async def fail(params: SamplingParams) -> None:
            try:
                await engine.complete("A number:", params)
            except PyllamaError as error:
                errors.append(type(error).__name__)

        alone, _ = await run(engine, good)
        async with anyio.create_task_group() as group:
            for params in bad.values():
                group.start_soon(fail, params)
            beside, _ = await run(engine, good)
    differ = sum(a.token_ids != b.token_ids for a, b in zip(alone, beside, strict=True))
    report.details["errors"] = errors
    report.claim("failed_as_they_should", len(set(errors) & set(bad)), ">=", len(bad))
    report.claim("others_that_differ", differ, "<=", 0)


def main() -> int:
    """Run the script."""
    parser = arguments(__doc__)
    parser.add_argument("--schemas", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=128)
    options = parse(parser)
    report = Report("schemas", options)
    anyio.run(measure, options, report)
    anyio.run(disturb, options, report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
