"""
Make a random model call tools: each call that ends is of the right tool and fits its schema.

    python -m scripts.try_tool_choice [--schemas N] [--seeds N] [--family NAME]

Each schema is that of the arguments of a tool, in the syntax of one family of models after the
other. The tool is asked for by name, then some tool is. What a syntax cannot promise has to be
refused by name. An output may end because it is too long; none may be wrong.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import anyio
import jsonschema

from pyllama_raw import (
    AsyncEngine,
    ContextConfig,
    EngineConfig,
    FinishReason,
    Result,
    SamplingParams,
    SchedulerConfig,
)
from pyllama_raw.errors import BadSchema
from pyllama_raw.replies.spec import ReplySpec, bundled
from tests.schemas import SCHEMAS, record
from tests.tiny import tiny_model

MAX_TOKENS = 400
CHAT = [{"role": "user", "content": "Call one."}]
TEMPLATE = "{{ tools }}{{ messages[0].content }}<|im_end|><|im_start|>assistant\n"
CONFIG = EngineConfig(
    context=ContextConfig(n_ctx=16384, n_threads=2),
    scheduler=SchedulerConfig(n_slots=16),
)
OTHER = {"name": "other", "parameters": record(n={"type": "integer", "maximum": 9})}


def arguments() -> Iterator[dict[str, Any]]:
    """Schemas of arguments without an end: one value, then two."""
    schemas = [schema for _, schema in SCHEMAS if "$defs" not in schema]
    yield from (record(value=schema) for schema in schemas)
    for step in cycle(range(1, len(schemas))):
        for at, schema in enumerate(schemas):
            other = schemas[(at + step) % len(schemas)]
            yield record("a", a=schema, b=other)


def mistake(result: Result, choice: str, tools: list[dict[str, Any]]) -> str:
    """What is wrong with an output that ended by itself; empty if nothing is."""
    if not result.tool_calls or result.text.strip():
        return f"calls {result.tool_calls}, text {result.text!r}"
    if choice != "required" and len(result.tool_calls) != 1:
        return f"{len(result.tool_calls)} calls"
    schemas = {tool["name"]: tool["parameters"] for tool in tools}
    for call in result.tool_calls:
        if choice not in ("required", call.name) or call.name not in schemas:
            return f"the name {call.name!r}"
        try:
            jsonschema.validate(json.loads(call.arguments), schemas[call.name])
        except (ValueError, jsonschema.ValidationError) as error:
            return f"{call.arguments}: {str(error).partition(chr(10))[0]}"
    return ""


def template_of(spec: ReplySpec) -> str:
    """A template that prints tools; its prompts end reasoning, which could go on for ever."""
    if spec.reasoning is None:
        return TEMPLATE
    return TEMPLATE + spec.reasoning.start[0] + spec.reasoning.end[0]


class Trial:
    """Counts what becomes of all requests."""

    def __init__(self, engine: AsyncEngine, n_seeds: int) -> None:
        self._engine, self._n_seeds = engine, n_seeds
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def run(self, family: str, spec: ReplySpec, schema: dict[str, Any]) -> None:
        tools = [{"name": "look_up", "parameters": schema}, OTHER]
        for choice in ("look_up", "required"):
            for seed in range(self._n_seeds):
                params = SamplingParams(max_tokens=MAX_TOKENS, seed=seed, temperature=1)
                try:
                    result = await self._engine.complete(
                        CHAT,
                        params,
                        tools=tools,
                        tool_choice=choice,
                        reply=spec,
                        chat_template=template_of(spec),
                    )
                except BadSchema as error:
                    self.counts["refused"] += 1
                    if "look_up" not in str(error):
                        self.wrong.append(f"{family}: {error}")
                    continue
                if result.finish_reason is FinishReason.LENGTH:
                    self.counts["too long"] += 1
                elif text := mistake(result, choice, tools):
                    self.wrong.append(f"{family}, {choice}, seed {seed}: {text}")
                else:
                    self.counts["valid"] += 1


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--family", help="only this one")
    asked = parser.parse_args()
    families = {
        name: spec
        for name, spec in bundled().items()
        if spec.calls and asked.family in (None, name)
    }
    async with AsyncEngine.open(tiny_model("llama"), CONFIG) as engine:
        trial = Trial(engine, asked.seeds)
        schemas = islice(arguments(), asked.schemas)
        async with anyio.create_task_group() as group:
            for (name, spec), schema in zip(
                cycle(families.items()), schemas, strict=False
            ):
                group.start_soon(trial.run, name, spec, schema)
    print(*trial.wrong, dict(trial.counts), sep="\n")
    return bool(trial.wrong)


if __name__ == "__main__":
    raise SystemExit(anyio.run(main))
