"""
Let a random model answer in forms and call tools: what ends by itself is as it was asked for.

    python -m scripts.try_structure [--schemas N] [--seeds N] [--family NAME] [--first N] [--last N]

Each schema is that of the answer and of the arguments of a tool, in the syntax of one family of
models after the other; every fourth answer is a regular expression or a grammar instead. Each is
tried with thoughts (that the prompt begins, or that the model may begin), with tools, with both
and with neither, where the model may call and where it must. An answer that ends fits its form, or
is a whole call whose arguments fit; thoughts are apart. What a syntax cannot promise has to be
refused by name. An output may end because it is too long; none may be wrong.

300 schemas are 1,800 cases, which may take an hour. Every 100 cases stderr has the number with
which `--first` goes on.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any, NamedTuple

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
from pyllama_raw.replies.spec import ReasoningSpec, ReplySpec, bundled
from tests.support.schemas import SCHEMAS, record
from tests.support.tiny import tiny_model

MAX_TOKENS = 300
CHAT = [{"role": "user", "content": "Call one."}]
TEMPLATE = "{{ tools }}{{ messages[0].content }}<|im_end|><|im_start|>assistant\n"
CONFIG = EngineConfig(
    context=ContextConfig(n_ctx=16384, n_threads=2),
    scheduler=SchedulerConfig(n_slots=16),
)
OTHER = {"name": "other", "parameters": record(n={"type": "integer", "maximum": 9})}
START, END = (
    "<|mask|>",
    "<|sep|>",
)  # of thoughts: single tokens that a random model finds
BIASES = {317: 4.0, 318: 6.0}  # of these, so that thoughts begin and end
FORMS = [  # others than schemas, and a regular expression of what they mean
    ({"regex": "[0-9]{3}(-[a-z]+)?"}, "[0-9]{3}(-[a-z]+)?"),
    ({"regex": r"\s?(yes|no/maybe)\n?"}, r"\s?(yes|no/maybe)\n?"),
    ({"lark": 'start: "a" b | "}"\nb: /[0-9]{1,4}/'}, "a[0-9]{1,4}|}"),
    ({"grammar": 'root ::= w (" " w)*\nw ::= [a-c]{1,3}'}, "[a-c]{1,3}( [a-c]{1,3})*"),
]


class Case(NamedTuple):
    """What one request asks for."""

    family: str
    spec: ReplySpec
    schema: dict[str, Any]  # of the arguments of a tool, and of the answer
    form: dict[str, Any]  # of SamplingParams
    pattern: str  # of the whole answer; empty: the schema says it
    thoughts: str  # "none", "begun" or "free"
    has_tools: bool
    choice: str

    def __str__(self) -> str:
        form = json.dumps(self.form)[:80]
        return f"{self.family}, {form}, {self.thoughts}, {self.choice}, tools: {self.has_tools}"

    @property
    def template(self) -> str:
        """The chat template, which says where thoughts are."""
        return (
            TEMPLATE + {"none": START + END, "begun": START, "free": ""}[self.thoughts]
        )


def schemas() -> Iterator[dict[str, Any]]:
    """Schemas of objects without an end: of one value, then of two."""
    schemas = [schema for _, schema in SCHEMAS if "$defs" not in schema]
    yield from (record(value=schema) for schema in schemas)
    for step in cycle(range(1, len(schemas))):
        for at, schema in enumerate(schemas):
            other = schemas[(at + step) % len(schemas)]
            yield record("a", a=schema, b=other)


def cases(n_schemas: int, family: str | None) -> Iterator[Case]:
    """All cases of so many schemas."""
    families = {
        name: spec
        for name, spec in bundled().items()
        if spec.calls and not spec.messages and family in (None, name)
    }
    forms = cycle(FORMS)
    numbered = enumerate(zip(cycle(families.items()), islice(schemas(), n_schemas)))
    for at, ((name, spec), schema) in numbered:
        form, pattern = {"json_schema": schema}, ""
        if at % 4 == 3:
            form, pattern = next(forms)
        calls = spec.reasoning is not None and spec.reasoning.calls
        reasoning = ReasoningSpec(start=(START,), end=(END,), calls=calls)
        shape = spec.model_copy(update={"reasoning": reasoning})
        for thoughts in ("none", ("begun", "free")[at % 2]):
            for has_tools, choice in (
                (False, "auto"),
                (True, "auto"),
                (True, "required"),
            ):
                yield Case(
                    name, shape, schema, form, pattern, thoughts, has_tools, choice
                )


def mistake(case: Case, result: Result) -> str:
    """What is wrong with an output that ended by itself; empty if nothing is."""
    if case.thoughts == "none" and result.reasoning:
        return f"thoughts {result.reasoning!r}"
    if result.tool_calls:
        return _mistake_of_calls(case, result)
    if case.choice == "required":
        return f"no call: {result.text!r}"
    if case.pattern:
        fits = re.fullmatch(case.pattern, result.text, re.ASCII)
        return "" if fits else f"text {result.text!r}"
    try:
        jsonschema.validate(json.loads(result.text), case.schema)
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{result.text!r}: {str(error).partition(chr(10))[0]}"
    return ""


def _mistake_of_calls(case: Case, result: Result) -> str:
    if not case.has_tools or not result.calls_tools or result.text.strip():
        return f"calls {result.tool_calls}, text {result.text!r}"
    schemas = {"look_up": case.schema, OTHER["name"]: OTHER["parameters"]}
    for call in result.tool_calls:
        if call.name not in schemas:
            return f"the name {call.name!r}"
        try:
            jsonschema.validate(json.loads(call.arguments), schemas[call.name])
        except jsonschema.ValidationError as error:
            return f"{call.arguments}: {str(error).partition(chr(10))[0]}"
    return ""


class Trial:
    """Counts what becomes of all requests."""

    def __init__(self, engine: AsyncEngine, n_seeds: int) -> None:
        self._engine, self._n_seeds = engine, n_seeds
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def run(self, case: Case) -> None:
        """Ask for it, once a seed."""
        tools = [{"name": "look_up", "parameters": case.schema, "strict": True}, OTHER]
        options: dict[str, Any] = {"tools": tools, "tool_choice": case.choice}
        for seed in range(self._n_seeds):
            params = SamplingParams(
                max_tokens=MAX_TOKENS,
                seed=seed,
                temperature=1,
                logit_bias=BIASES,
                **case.form,
            )
            try:
                result = await self._engine.complete(
                    CHAT,
                    params,
                    reply=case.spec,
                    chat_template=case.template,
                    **(options if case.has_tools else {}),
                )
            except BadSchema as error:
                self.counts["refused"] += 1
                if "look_up" not in str(error):
                    self.wrong.append(f"{case}: {error}")
                continue
            if result.finish_reason is FinishReason.LENGTH:
                self.counts["too long"] += 1
            elif text := mistake(case, result):
                self.wrong.append(f"{case}, seed {seed}: {text}")
            else:
                self.counts["calls" if result.tool_calls else "answers"] += 1
                self.counts["with thoughts"] += bool(result.reasoning)


async def tried(
    n_schemas: int,
    n_seeds: int,
    family: str | None = None,
    *,
    first: int = 0,
    last: int | None = None,
) -> Trial:
    """What becomes of so many schemas, in one family or in all; of the cases *first* to *last*."""
    async with AsyncEngine.open(tiny_model("llama"), CONFIG) as engine:
        trial = Trial(engine, n_seeds)
        places = anyio.Semaphore(16)
        open_cases: set[int] = set()

        async def run(number: int, case: Case) -> None:
            try:
                await trial.run(case)
            finally:
                places.release()
            open_cases.remove(number)
            if number % 100 == 99:
                print(
                    f"--first {min(open_cases, default=number + 1)}",
                    *trial.wrong,
                    sep="\n",
                    file=sys.stderr,
                )

        stop = None if last is None else last + 1
        async with anyio.create_task_group() as group:
            for number, case in islice(
                enumerate(cases(n_schemas, family)), first, stop
            ):
                await places.acquire()
                open_cases.add(number)
                group.start_soon(run, number, case)
    return trial


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--schemas", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--family", help="only this one")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--last", type=int, help="number of the last case")
    options = parser.parse_args()
    trial = await tried(
        options.schemas,
        options.seeds,
        options.family,
        first=options.first,
        last=options.last,
    )
    print(*trial.wrong, dict(trial.counts), sep="\n")
    return bool(trial.wrong)


if __name__ == "__main__":
    raise SystemExit(anyio.run(main))
