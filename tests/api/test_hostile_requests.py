"""
Every public option times every kind of wrong value, beside four running streams.

PYLLAMA_RAW_TEST_CASES sets how many pairs are tried.
"""

from __future__ import annotations

import os
import pickle
from array import array
from contextlib import AsyncExitStack
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction

import anyio
import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pyllama_raw import (
    AsyncEngine,
    CacheConfig,
    ConfigError,
    ContextConfig,
    EngineConfig,
    ModelConfig,
    RequestError,
    RequestOptions,
    SamplingParams,
    SchedulerConfig,
)
from pyllama_raw.testing import FakeExecutor, fake_engine, fake_limits
from tests.support.hostile import (
    AngryInt,
    AngryText,
    Unhashable,
    Unreadable,
    endless,
    nested,
)
from tests.support.limits import LIMIT_S

N_CASES = int(os.environ.get("PYLLAMA_RAW_TEST_CASES", "100"))
N_TOGETHER = 20  # pairs tried beside the same streams
HANG_S = LIMIT_S
STREAMS = ("a", "bc", "def", "ghij")

# Made anew for each case, because an iterator is used up.
STRANGE = {
    "nan": lambda: float("nan"),
    "infinity": lambda: float("inf"),
    "minus infinity": lambda: float("-inf"),
    "complex": lambda: 1 + 2j,
    "complex nan": lambda: complex("nan"),
    "decimal nan": lambda: Decimal("NaN"),
    "signalling nan": lambda: Decimal("sNaN"),
    "fraction": lambda: Fraction(1, 3),
    "numpy nan": lambda: np.float32("nan"),
    "numpy array": lambda: np.arange(3),
    "numpy text": lambda: np.str_("a"),
    "array": lambda: array("d", [1.0]),
    "none": lambda: None,
    "true": lambda: True,
    "minus one": lambda: -1,
    "zero": lambda: 0,
    "huge": lambda: 10**6000,
    "minus huge": lambda: -(10**6000),
    "int 32": lambda: 2**31,
    "int 64": lambda: 2**63,
    "huge float": lambda: 1e308,
    "tiny float": lambda: 5e-324,
    "text": lambda: "high",
    "number as text": lambda: "1",
    "empty text": lambda: "",
    "long text": lambda: "x" * 100_000,
    "surrogate": lambda: "\ud800",
    "NUL": lambda: "a\0b",
    "bytes": lambda: b"salt",
    "bytearray": lambda: bytearray(b"salt"),
    "list": lambda: [1, "a", None],
    "numbers": lambda: [3, 1, 2],
    "long list": lambda: [1] * 10_000,
    "wrong list": lambda: [float("nan")],
    "list of lists": lambda: [[1], ["a"]],
    "dict": lambda: {"a": 1},
    "context": lambda: {"context": {"n_ctx": 1}},
    "dict by number": lambda: {1: float("nan")},
    "set": lambda: {1, 2},
    "set of text": lambda: {"a"},
    "tuple": lambda: ("a", 1),
    "iterator": lambda: iter([1, 2]),
    "generator": lambda: (n for n in "ab"),
    "failing generator": lambda: (1 // n for n in [0]),
    "endless": endless,
    "range": lambda: range(10**9),
    "deep": lambda: nested(100_000),
    "deep dict": lambda: {"a": nested(2000)},
    "object": object,
    "class": lambda: SamplingParams,
    "function": lambda: print,
    "duration": lambda: timedelta(seconds=1),
    "unreadable": Unreadable,
    "list of unreadable": lambda: [Unreadable()],
    "unhashable": Unhashable,
    "angry int": lambda: AngryInt(1),
    "angry text": lambda: AngryText("a"),
    "message": lambda: [{"role": "user", "content": nested(50_000)}],
    "messages": lambda: [{"role": "user", "content": "a"}, 5],
}  # fmt: skip

CONFIGS = (ModelConfig, ContextConfig, SchedulerConfig, CacheConfig, EngineConfig)
ONE = SamplingParams(max_tokens=1)


async def enter(generation) -> None:
    async with generation:
        pass


TARGETS = {
    "params": lambda e, v: enter(e.generate("a", v)),
    "params of many": lambda e, v: e.complete_many(["a"], v),
    "prompt": lambda e, v: enter(e.generate(v, ONE)),
    "prompts": lambda e, v: e.complete_many(v, ONE),
    "n_top": lambda e, v: e.score("ab", v),
    "clear_cache": lambda e, v: e.clear_cache(v),
    "open config": lambda e, v: enter(AsyncEngine.open("nowhere.gguf", v)),
    "open progress": lambda e, v: enter(AsyncEngine.open("nowhere.gguf", progress=v)),
}


async def with_option(engine, name, value, verb):
    options = {name: value}
    match verb:
        case "generate":
            await enter(engine.generate("a", ONE, **options))
        case "complete":
            await engine.complete("a", ONE, **options)
        case "complete_n":
            await engine.complete_n("a", SamplingParams(max_tokens=1, n=2), **options)
        case "complete_many":
            await engine.complete_many(["a", "b"], ONE, **options)
        case "score":
            await engine.score("ab", **options)


async def with_field(engine, kind, name, value):
    made = kind(**{name: value})
    if kind is SamplingParams:
        await enter(engine.generate("a", made))
        ONE.model_copy(update={name: value})


def cases():
    """(what, its arguments, the name of a strange value)"""
    verbs = st.sampled_from(
        ["generate", "complete", "complete_n", "complete_many", "score"]
    )
    options = st.sampled_from(sorted(RequestOptions.__annotations__))
    unknown = st.text(max_size=12).filter(
        lambda n: (
            n not in {"prompt", "params", "n_top", *RequestOptions.__annotations__}
        )
    )
    fields = [
        (kind, name)
        for kind in (SamplingParams, *CONFIGS)
        for name in kind.model_fields
    ]
    what = st.one_of(
        st.tuples(st.just("option"), st.tuples(options, verbs)),
        st.tuples(st.just("option"), st.tuples(options, verbs)),
        st.tuples(st.just("unknown"), st.tuples(unknown, verbs)),
        st.tuples(st.just("target"), st.tuples(st.sampled_from(sorted(TARGETS)))),
        st.tuples(st.just("field"), st.sampled_from(fields)),
    )
    return st.tuples(what, st.sampled_from(sorted(STRANGE)))


async def attempt(engine, what, given_to, value) -> BaseException | None:
    """What came of it; None: the value was allowed."""
    try:
        match what:
            case "option" | "unknown":
                name, verb = given_to
                await with_option(engine, name, value, verb)
            case "target":
                await TARGETS[given_to[0]](engine, value)
            case "field":
                await with_field(engine, *given_to, value)
    except Exception as error:  # noqa: BLE001 - judged by the test
        return error
    return None


def judge(pair, error) -> None:
    """Fails with *pair* in the message if *error* is none that is declared."""
    what, _, value_name = pair
    is_theirs = value_name == "failing generator" and type(error) is ZeroDivisionError
    if error is None:
        assert what != "unknown", pair
    elif what == "unknown":
        assert type(error) is TypeError, pair
    elif not is_theirs:
        assert isinstance(error, RequestError | ConfigError), (pair, error)
        assert len(str(error)) < 3000, pair
        arrived = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
        assert repr(vars(arrived)) == repr(vars(error)), pair  # NaN equals nothing


def said_after(prompt: str, n_tokens: int) -> str:
    """What next_token says, so that a token of another stream or place is seen."""
    start = 1 + len(prompt)
    return "".join(
        chr(97 + (ord(prompt[0]) + i) % 26) for i in range(start, start + n_tokens)
    )


def next_token(tokens) -> int:
    return 97 + (tokens[min(1, len(tokens) - 1)] + len(tokens)) % 26


async def try_beside_streams(tried) -> None:
    limits = fake_limits(n_slots=6, n_ctx_slot=2**16, n_cells=6 * 2**16)
    executor = FakeExecutor(limits, next_token=next_token)
    async with fake_engine(executor) as engine, AsyncExitStack() as stack:
        params = SamplingParams(max_tokens=2**15)
        streams = [
            await stack.enter_async_context(engine.generate(prompt, params))
            for prompt in STREAMS
        ]
        texts = [(await anext(stream)).text for stream in streams]
        for (what, given_to), value_name in tried:
            error = await attempt(engine, what, given_to, STRANGE[value_name]())
            judge((what, given_to, value_name), error)
        for index, stream in enumerate(streams):
            for _ in range(2):  # what came meanwhile is one delta; the next one is new
                delta = await anext(stream, None)  # None: it has reached its end
                texts[index] += "" if delta is None else delta.text
        later = await engine.complete("later", SamplingParams(max_tokens=5))

    assert texts == [said_after(p, len(t)) for p, t in zip(STREAMS, texts, strict=True)]
    assert later.text == said_after("later", 5)


@settings(
    max_examples=max(N_CASES // N_TOGETHER, 1),
    suppress_health_check=list(HealthCheck),
    phases=[
        Phase.explicit,
        Phase.generate,
    ],  # a failure names its pair: no search for less
)
@given(
    tried=st.lists(cases(), min_size=N_TOGETHER, max_size=N_TOGETHER),
    backend=st.sampled_from(["asyncio", "trio"]),
)
def test_no_request_hurts_those_that_run(tried, backend):
    """
    Whatever is given to whichever option, the error is typed; streams keep their tokens.
    """

    async def bounded() -> None:
        with anyio.fail_after(HANG_S):
            await try_beside_streams(tried)

    anyio.run(bounded, backend=backend)
