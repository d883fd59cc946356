"""
How long one caller's request keeps the others waiting, whatever it asks for.

Each case is a public call with hostile input. Beside it run a beat, a task that sleeps
5 ms again and again, and a stream. Lateness is by how much the beat's longest sleep was too
long; host time is the longest time between two decodes of the engine thread, less what was
spent in decoding and copying. Of each case the best round counts, because neighbours on the
machine only make it late. A refusal is an answer like any other. Each call gets LEAVE_S
seconds, and is then cancelled.

With --closing the engine is closed while the call is under way, and what counts is how long
that takes.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import anyio
from load.client import open_engine
from load.measure import Report, arguments, parse, say

from pyllama_raw import AsyncEngine, PyllamaError, SamplingParams

N_SLOTS, N_CTX = 8, 8 * 2048
BEAT_S = 0.005
SETTLE_S = 0.1  # of streams and beat before a call, and before it is closed on
LEAVE_S = 20.0
MAX_LATE_MS = 50.0
MAX_CLOSE_S = 2.0

ENDLESS = (
    "{% for a in range(10**5) %}{% for b in range(10**5) %}{% endfor %}{% endfor %}"
)

Call = Callable[[AsyncEngine], Awaitable[object]]


def complete(prompt: Any = "Hello", **params: Any) -> Call:
    """A call of one output; its options are checked in it, as a service would."""

    async def call(engine: AsyncEngine) -> None:
        options = {"max_tokens": 2} | params
        await engine.complete(prompt, SamplingParams(**options))

    return call


def outputs(n: int, **params: Any) -> Call:
    """A call of several outputs."""

    async def call(engine: AsyncEngine) -> None:
        await engine.complete_n("Hello", SamplingParams(n=n, max_tokens=2, **params))

    return call


def points(count: int) -> Call:
    """A call with places for snapshots."""

    async def call(engine: AsyncEngine) -> None:
        await engine.complete(
            "Hello", SamplingParams(max_tokens=2), cache_points=range(1, count)
        )

    return call


def chat(**options: Any) -> Call:
    """A chat of one message."""

    async def call(engine: AsyncEngine) -> None:
        messages = [{"role": "user", "content": "Hello"}]
        await engine.complete(messages, SamplingParams(max_tokens=2), **options)

    return call


async def read_ids(engine: AsyncEngine) -> None:
    """The text of many tokens."""
    await engine.detokenize([1] * 1_000_000)


async def read_late(engine: AsyncEngine) -> None:
    """A long output of which nothing is read until it is whole."""
    params = SamplingParams(max_tokens=1000, ignore_eos=True)
    async with engine.generate("Hello", params) as generation:
        await anyio.sleep(LEAVE_S / 2)
        async for _ in generation:
            pass


async def many(engine: AsyncEngine) -> None:
    """Ten thousand prompts, most of which wait."""
    await engine.complete_many(["Hello"] * 10_000, SamplingParams(max_tokens=1))


def alternatives(count: int) -> str:
    return "|".join(f"word{index}" for index in range(count))


def properties(count: int) -> dict[str, Any]:
    word = {"type": "string", "pattern": "^[a-z]{1,30}$"}
    names = [f"property{index}" for index in range(count)]
    return {"type": "object", "properties": dict.fromkeys(names, word)}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def gbnf(count: int) -> str:
    rules = "\n".join(
        f'r{index} ::= "word{index}" | r{index + 1}' for index in range(count)
    )
    return f'root ::= r0\n{rules}\nr{count} ::= "end"'


CASES: dict[str, Call] = {
    "nothing hostile": complete(),
    "20,000 messages": complete([{"role": "user", "content": "Hello"}] * 20_000),
    "8,000 messages": complete([{"role": "user", "content": "Hello"}] * 8_000),
    "a message of 2 MB": complete([{"role": "user", "content": "word " * 400_000}]),
    "2 MB of text": complete("word " * 400_000),
    "2 MB of markers": complete("<|im_start|>" * 170_000),
    "1,000,000 token ids": complete([1] * 1_000_000),
    "1,000,000 ids as text": read_ids,
    "a template of 1 MB": chat(chat_template="{% if a %}{% endif %}" * 50_000),
    "a template without end": chat(chat_template=ENDLESS),
    "a template's 1 MB": chat(template_kwargs={"a": "a" * 2**20}),
    "tools of 100,000 values": chat(tools=[{"a": [1] * 100}] * 1_000),
    "a salt of 2 MB": chat(cache_salt="a" * 2**21),
    "the first regex": complete(regex="[a-z]{1,50}"),
    "regex of 1 MB": complete(regex="a" * 2**20),
    "regex of 50,000 ways": complete(regex=alternatives(50_000)),
    "regex of 5,000 ways": complete(regex=alternatives(5_000)),
    "regex, nested counts": complete(regex="((a{1,100}){1,100}){1,100}"),
    "regex, hard automaton": complete(regex="(a|b)*a(a|b){18}"),
    "schema of 100,000 properties": complete(json_schema=properties(100_000)),
    "schema of 1,000 properties": complete(json_schema=properties(1_000)),
    "schema of depth 300": complete(json_schema=nested(300)),
    "lark of 50,000 ways": complete(
        lark="start: " + " | ".join(f'"w{index}"' for index in range(50_000))
    ),
    "lark of 1,000 ways": complete(
        lark="start: " + " | ".join(f'"w{index}"' for index in range(1_000))
    ),
    "GBNF of 10,000 rules": complete(grammar=gbnf(10_000)),
    "GBNF of 1 MB": complete(grammar='root ::= "' + "a" * (2**20 - 12) + '"'),
    "GBNF of 1 MB, a comment": complete(grammar='root ::= "a" #' + "a" * (2**20 - 20)),
    "GBNF of repetitions": complete(grammar='root ::= ("a" | "b"){0,33000}'),
    "GBNF of 10,000 repetitions": complete(grammar='root ::= ("a" | "b"){0,10000}'),
    "GBNF of 16,000 characters": complete(grammar='root ::= "' + "a" * 16_000 + '"'),
    "GBNF of 16,000 options": complete(grammar="root ::= " + '"a"? ' * 16_000),
    "256 outputs of a GBNF": outputs(256, grammar=gbnf(3_000)),
    "one stop of a million": complete(stop=("ab" * 500_000,)),
    "a million stops": complete(stop=tuple(f"s{index}" for index in range(1_000_000))),
    "256 stops of 4,096": complete(
        stop=tuple(chr(97 + i % 26) * 4_000 + str(i).zfill(96) for i in range(256))
    ),
    "256 outputs": outputs(256),
    "256 outputs with stops": outputs(
        256, stop=tuple(f"stop {index}" for index in range(256))
    ),
    "256 outputs of a schema": outputs(256, json_schema=properties(200)),
    "100,000 biases": complete(logit_bias=dict.fromkeys(range(40_000), 1.0)),
    "256 outputs with 40,000 biases": outputs(
        256, logit_bias=dict.fromkeys(range(40_000), 1.0)
    ),
    "40,000 suppressed": complete(suppress_tokens=tuple(range(40_000))),
    "256 outputs with 40,000 suppressed": outputs(
        256, suppress_tokens=tuple(range(40_000))
    ),
    "100,000 stop tokens": complete(stop_token_ids=tuple(range(40_000))),
    "100,000 cache points": points(100_000),
    "64 triggers": complete(
        grammar='root ::= "a"',
        grammar_triggers=tuple("t" * 990 + str(index) for index in range(64)),
    ),
    "an output read late": read_late,
    "10,000 prompts": many,
}


@dataclass
class Beats:
    """Of one round of one case."""

    late_ms: float = 0.0  # of the beat
    host_ms: float = 0.0  # of the engine thread
    took_s: float = 0.0
    answer: str = ""


@dataclass
class Watch:
    """The engine thread's time between decodes, seen from its executor."""

    engine: AsyncEngine
    host_s: float = 0.0
    _last: float = 0.0
    _inside_s: float = 0.0
    _execute: Callable[..., Any] = field(init=False)

    def __post_init__(self) -> None:
        executor = self.engine._parts.executor
        self._execute = executor.execute
        executor.execute = self.execute  # type: ignore[method-assign]

    def execute(self, plan: Any) -> Any:
        result = self._execute(plan)
        now, times = perf_counter(), self.engine._parts.executor.times
        inside_s = times.decode_s + times.sample_s + times.capture_s + times.restore_s
        if self._last:
            gap_s = now - self._last - (inside_s - self._inside_s)
            self.host_s = max(self.host_s, gap_s)
        self._last, self._inside_s = now, inside_s
        return result


async def beat(beats: Beats) -> None:
    """Until cancelled."""
    last = perf_counter()
    while True:
        await anyio.sleep(BEAT_S)
        now = perf_counter()
        beats.late_ms = max(beats.late_ms, (now - last - BEAT_S) * 1e3)
        last = now


async def stream(engine: AsyncEngine) -> None:
    """Until cancelled: somebody who wants each token at once."""
    params = SamplingParams(max_tokens=1900, ignore_eos=True, seed=1)
    while True:
        async with engine.generate(
            "Once upon a time", params, priority=-1
        ) as generation:
            async for _ in generation:
                pass


async def answer_of(call: Call, engine: AsyncEngine) -> str:
    """What came of *call*, in a word."""
    try:
        with anyio.move_on_after(LEAVE_S) as scope:
            await call(engine)
    except (PyllamaError, ValueError) as error:
        return type(error).__name__
    return "left" if scope.cancelled_caught else "done"


async def beside(options: Namespace, call: Call) -> Beats:
    """One round of *call*."""
    beats = Beats()
    async with (
        open_engine(options, n_slots=N_SLOTS, n_ctx=N_CTX) as engine,
        anyio.create_task_group() as group,
    ):
        watch = Watch(engine)
        group.start_soon(stream, engine)
        await anyio.sleep(SETTLE_S)
        group.start_soon(beat, beats)
        await anyio.sleep(SETTLE_S)
        beats.late_ms = watch.host_s = 0.0
        began = perf_counter()
        beats.answer = await answer_of(call, engine)
        beats.took_s = perf_counter() - began
        await anyio.sleep(2 * BEAT_S)
        beats.host_ms = watch.host_s * 1e3
        group.cancel_scope.cancel()
    return beats


async def closed_on(options: Namespace, call: Call) -> Beats:
    """One round of *call* in which the engine is closed."""
    beats = Beats()
    async with (
        open_engine(options, n_slots=N_SLOTS, n_ctx=N_CTX) as engine,
        anyio.create_task_group() as group,
    ):
        group.start_soon(answer_of, call, engine)
        group.start_soon(beat, beats)
        await anyio.sleep(SETTLE_S)
        began = perf_counter()
        await engine.aclose()
        beats.took_s = perf_counter() - began
        group.cancel_scope.cancel()
    return beats


async def measure(options: Namespace, report: Report) -> None:
    """Every case in turn."""
    one_round = closed_on if options.closing else beside
    for name in options.cases or CASES:
        say(name)
        rounds = [await one_round(options, CASES[name]) for _ in range(options.rounds)]
        late_ms = min(beats.late_ms for beats in rounds)
        host_ms = min(beats.host_ms for beats in rounds)
        took_s = min(beats.took_s for beats in rounds)
        report.add(
            case=name, late_ms=late_ms, host_ms=host_ms, took_s=took_s,
            answer=rounds[0].answer,
        )  # fmt: skip
        if options.closing:
            report.claim(f"{name}: closed, s", took_s, "<=", MAX_CLOSE_S)
        else:
            report.claim(f"{name}: loop, ms", late_ms, "<=", MAX_LATE_MS)
            report.claim(f"{name}: engine, ms", host_ms, "<=", MAX_LATE_MS)


def main() -> int:
    """Run the script."""
    parser = arguments(__doc__)
    parser.set_defaults(rounds=3)
    parser.add_argument("--closing", action="store_true", help="close during each call")
    parser.add_argument("--cases", nargs="+", choices=CASES, metavar="NAME")
    options = parse(parser)
    report = Report("beat", options)
    anyio.run(partial(measure, options, report))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
