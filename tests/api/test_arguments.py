"""What public functions refuse, in the caller's task, with an error that says why."""

from collections import UserString
from decimal import Decimal
from fractions import Fraction
from itertools import repeat

import anyio
import numpy as np
import pytest

import pyllama_raw
from pyllama_raw import (
    AsyncEngine,
    ConfigError,
    EngineConfig,
    PyllamaError,
    SamplingParams,
    SchedulerConfig,
)
from pyllama_raw.errors import BadSchema, InvalidRequest
from pyllama_raw.options.arguments import (
    checked_file,
    checked_options,
    checked_prompts,
    checked_texts,
    checked_texts_or_ids,
)
from pyllama_raw.options.requests import (
    MAX_CACHE_POINTS,
    MAX_PRIORITY,
    MAX_SALT,
    MAX_TEXTS,
)
from pyllama_raw.policy import SchedulingPolicy
from pyllama_raw.testing import fake_engine
from tests.api.test_generate import expected
from tests.support.hostile import (
    AngryInt,
    AngryText,
    EndlessMapping,
    Unhashable,
    Unreadable,
    UnreadableMapping,
    endless,
    nested,
)
from tests.support.limits import LIMIT_S


def each(names, values):
    """A test for each of *values*, which have no name: to print one may raise."""
    return pytest.mark.parametrize(names, values, ids=range(len(values)))


NAN, INFINITY = float("nan"), float("inf")

WRONG = {
    "priority": [
        NAN, INFINITY, -INFINITY, 1j, 0.5, 1.0, True, False, "high", "1", None, b"1",
        Decimal(1), Fraction(1), [], {}, object(), MAX_PRIORITY + 1, -(10**6000),
        Unreadable(), Unhashable(), nested(10_000), np.float64(1),
    ],
    "deadline_s": [
        NAN, INFINITY, -INFINITY, 1j, 0, -1, -0.0, True, "1", [], {},
        object(), 10**6000, 1e10, Unreadable(), Unhashable(), np.datetime64("2026"),
    ],
    "cache_salt": [
        1, 0, NAN, True, b"salt", bytearray(b"salt"), "", "\ud800", "x" * (MAX_SALT + 1),
        ["salt"], {"salt": 1}, ("salt",), object(), Unreadable(), Unhashable(),
        UserString("salt"),
    ],
    "cache_points": [
        None, 1, NAN, "12", b"12", {1: 2}, [0], [-1], [1.0], [NAN], ["1"], [True],
        [None], [[1]], [2**31], [10**6000], object(), [object()], Unreadable(),
        endless(), range(1, MAX_CACHE_POINTS + 2), nested(10_000), [Unreadable()],
    ],
}  # fmt: skip

WRONG["client"] = WRONG["cache_salt"]
WRONG["policy_data"] = [
    1, NAN, "a", b"a", [("a", 1)], {1: 2}, {"a": []}, {"a": 1j}, {"a": 10**6000},
    {"a": AngryInt(1)}, {"a": "x" * (MAX_SALT + 1)}, {"x" * (MAX_SALT + 1): 1},
    dict.fromkeys(map(str, range(33))), object(), Unreadable(), {"a": nested(10_000)},
    EndlessMapping(), UnreadableMapping(),
]  # fmt: skip
WRONG["adapters"] = [
    1, "a", ["a"], {1: 1}, {"a": "1"}, {"a": NAN}, {"a": 101}, {"a": True}, {"": 1},
    {"\ud800": 1}, dict.fromkeys(map(str, range(17)), 1), Unreadable(), EndlessMapping(),
]  # fmt: skip
WRONG["tools"] = ["a", b"a", 1, {}, object(), Unreadable()]
WRONG["template_kwargs"] = ["a", [], 1, Unreadable()]
WRONG["chat_template"] = [1, b"a", Unreadable()]

CASES = [(name, value) for name, values in WRONG.items() for value in values]


@each(("name", "value"), CASES)
def test_a_wrong_option_is_named(name, value):
    """
    The error tells the option and what is allowed, in a message of a line.
    """
    with pytest.raises(InvalidRequest) as caught:
        checked_options({name: value})

    assert caught.value.name.startswith(name)
    assert str(caught.value).startswith(f"{caught.value.name}=")
    assert len(str(caught.value)) < 400


def test_right_options_become_plain():
    """
    Numbers and text of any class are taken as int, float, str and tuple.
    """
    checked = checked_options(
        {
            "priority": AngryInt(3),
            "deadline_s": Fraction(1, 2),
            "cache_salt": AngryText("salt"),
            "cache_points": (p for p in (np.int64(2), AngryInt(1))),
        }
    )

    assert checked == {
        "priority": 3,
        "deadline_s": 0.5,
        "cache_salt": "salt",
        "cache_points": (2, 1),
    }
    assert [type(v) for v in checked.values()] == [int, float, str, tuple]
    assert {type(p) for p in checked["cache_points"]} == {int}
    assert checked_options(checked) == checked


@each(
    ("name", "words"),
    [
        ("cache_slat", r"did you mean cache_salt\?"),
        ("deadline", r"did you mean deadline_s\?"),
        ("timeout", "there are priority, deadline_s, max_wait_s, tools"),
        ("max_tokens", r"did you mean SamplingParams.max_tokens\?"),
        ("n_ctx", r"did you mean EngineConfig.context.n_ctx\?"),
        ("temprature", r"did you mean SamplingParams.temperature\?"),
        ("x" * 10**6, "no option"),
    ],
)
@pytest.mark.anyio
async def test_an_unknown_option_is_a_type_error(name, words):
    """
    The error says which option or parameter was likely meant, at every public function.
    """
    options = {name: 1}
    async with fake_engine() as engine:
        with pytest.raises(TypeError, match=words) as caught:
            engine.generate("a", **options)
        for call in (
            engine.complete("a", **options),
            engine.complete_n("a", SamplingParams(n=2), **options),
            engine.complete_many(["a"], **options),
            engine.score("ab", **options),
        ):
            with pytest.raises(TypeError, match=words):
                await call

    assert len(str(caught.value)) < 400


WRONG_PARAMS = [{"max_tokens": 3}, 3, "greedy", [], SamplingParams, Unreadable(), False]


@each("params", WRONG_PARAMS)
@pytest.mark.anyio
async def test_params_are_sampling_params(params):
    """
    A dict is the usual mistake; the error shows what to write.
    """
    async with fake_engine() as engine:
        with pytest.raises(InvalidRequest, match=r"SamplingParams\(max_tokens=16"):
            engine.generate("a", params)
        for call in (
            engine.complete("a", params),
            engine.complete_n("a", params),
            engine.complete_many(["a"], params),
        ):
            with pytest.raises(InvalidRequest, match=r"SamplingParams\(max_tokens=16"):
                await call


WRONG_PROMPTS = ["Hello", b"Hello", {"role": "user"}, 5, None, object(), Unreadable()]


@each("prompts", WRONG_PROMPTS)
@pytest.mark.anyio
async def test_complete_many_takes_no_single_prompt(prompts):
    """
    Text is no list of its characters.
    """
    async with fake_engine() as engine:
        with pytest.raises(InvalidRequest, match="a list of prompts"):
            await engine.complete_many(prompts)


@pytest.mark.anyio
async def test_what_the_prompts_raise_comes_bare():
    """
    An error of the caller's generator is not wrapped into a group.
    """

    def prompts():
        yield "a"
        raise KeyError("mine")

    async with fake_engine() as engine:
        with pytest.raises(KeyError, match="mine"):
            await engine.complete_many(prompts())


def test_prompts_are_not_consumed_by_the_check():
    """
    A generator gives all of its prompts afterwards.
    """
    assert list(checked_prompts(iter(["a", "c"]))) == ["a", "c"]


@each("n_top", [None, "3", 2.0, -1, 21, True, NAN, Unreadable()])
@pytest.mark.anyio
async def test_score_names_its_own_argument(n_top):
    """
    Not the parameter that it becomes.
    """
    async with fake_engine() as engine:
        with pytest.raises(
            InvalidRequest,
            match=r"n_top=.* give (a whole number|at (least 0|most 20))",
        ):
            await engine.score("ab", n_top)


@each("seconds", [None, "3", -1, NAN, [], Unreadable()])
@pytest.mark.anyio
async def test_waits_are_seconds(seconds):
    """
    Of health() and of aclose(), which has closed nothing then.
    """
    async with fake_engine() as engine:
        with pytest.raises(
            InvalidRequest, match=r"stall_s=.* give (a number|at least 0)"
        ):
            engine.health(seconds)
        with pytest.raises(
            InvalidRequest, match=r"drain_s=.* give (a number|at least 0)"
        ):
            await engine.aclose(seconds)
        assert engine.alive


DEEP = nested(100_000)
STRANGE = [
    5, None, b"bytes", object(), {"role": "user"}, {1, 2}, Unreadable(), Unhashable(), DEEP,
    [1, "a"], [1.5], [2**40], [None], [[]], [Unreadable()], ["a", 1],
    [{"role": "user", "content": DEEP}], [{"role": Unreadable(), "content": "a"}],
    [{"role": "user", "content": Unreadable()}], [{"role": "user", "content": [DEEP]}],
    [{"role": "user", "content": "a", "more": Unreadable()}],
    [{"role": "user", "content": "a"}, 7],
    [Unhashable(), {"role": "user"}],
]  # fmt: skip


@each("prompt", STRANGE)
@pytest.mark.anyio
async def test_no_prompt_raises_but_what_is_declared(prompt):
    """
    Whatever stands in the place of a prompt, the error is of this package.
    """
    template = "{% for m in messages %}{{ m.content }}{{ m.more }}{% endfor %}"
    async with fake_engine(chat_template=template) as engine:
        with anyio.fail_after(LIMIT_S):
            with pytest.raises(InvalidRequest):
                await engine.complete(prompt)
            result = await engine.complete("hello", SamplingParams(max_tokens=5))

    assert result.text == expected("hello", 5)


@each("path", ["a\0b", b"a", "", "\ud800\udfff\0", 5, Unreadable()])
def test_paths_are_those_that_files_have(path):
    """
    One that no file can have is refused before anything looks for it.
    """
    with pytest.raises(InvalidRequest, match="the path of a file"):
        checked_file("path", path)


LISTS = (
    checked_texts,
    checked_texts_or_ids,
    lambda items: checked_options({"cache_points": items}),
)


@each("check", LISTS)
def test_nothing_is_read_behind_the_first_wrong_item(check):
    """
    A million of them would be as many errors, of a thousand bytes each.
    """
    items = iter([None] * 100)

    with pytest.raises(InvalidRequest):
        check(items)

    assert len([*items]) > 95


@each("check", [checked_texts, checked_texts_or_ids])
def test_texts_without_an_end_are_refused(check):
    """
    The number that is allowed is told.
    """
    with pytest.raises(InvalidRequest, match=f"give at most {MAX_TEXTS} items$"):
        check(repeat("a"))


@pytest.mark.anyio
@pytest.mark.parametrize("parses", [True, False])
async def test_tokenize_takes_no_unreadable_prompt(parses):
    """
    It says which argument cannot be read.
    """
    async with fake_engine() as engine:
        with pytest.raises(InvalidRequest, match="prompt"):
            await engine.tokenize(WithoutClass(), parse_special=parses)


class WithoutClass:
    """Even isinstance() raises."""

    @property
    def __class__(self):
        raise ZeroDivisionError


@pytest.mark.anyio
async def test_cache_points_of_an_iterator_reach_every_request():
    """
    The check consumes the iterator once and hands on what was in it.
    """
    seen = []
    async with fake_engine() as engine:
        add_all = engine._parts.scheduler.add_all

        def record(requests, now):
            seen.extend(request.cache_points for request in requests)
            add_all(requests, now)

        engine._parts.scheduler.add_all = record
        await engine.complete_many(["ab", "cd"], cache_points=iter([1, 2]))
        await engine.complete("ef", cache_points=(n for n in (3,)))

    assert seen == [(1, 2), (1, 2), (3,)]


@pytest.mark.anyio
async def test_what_a_policy_is_told_reaches_it():
    """
    A policy sees the client and a copy of the data; the caller's may change meanwhile.
    """
    seen, data = [], {"plan": "free", "n_output": 3}

    class Curious(SchedulingPolicy):
        name = "curious"

        def on_arrival(self, request, now):
            seen.append((request.client, dict(request.data)))

    async with fake_engine(policy=Curious()) as engine:
        await engine.complete("ab", client="me", policy_data=data)
        await engine.complete("ab")

    assert seen == [("me", {"plan": "free", "n_output": 3}), (None, {})]
    with pytest.raises(TypeError, match="item assignment"):
        checked_options({"policy_data": data})["policy_data"]["plan"] = "paid"


@each("salt", WRONG["cache_salt"])
@pytest.mark.anyio
async def test_clear_cache_takes_what_a_request_takes(salt):
    """
    A salt that no request can have is refused, not taken for one without entries.
    """
    async with fake_engine() as engine:
        with pytest.raises(InvalidRequest, match="cache_salt"):
            await engine.clear_cache(salt)


@each(
    ("arguments", "words"),
    [
        ({"config": {"context": {"n_ctx": 64}}}, "config=.*give an EngineConfig"),
        ({"config": SchedulerConfig()}, "config=.*give an EngineConfig"),
        ({"config": EngineConfig}, "config=.*give an EngineConfig"),
        ({"config": 0}, "config=0: give an EngineConfig"),
        ({"config": Unreadable()}, "give an EngineConfig"),
        ({"model": 5}, "model=5: give the path"),
        ({"model": b"m.gguf"}, "model=b'm.gguf': give the path"),
        ({"model": EngineConfig()}, "give the path"),
        ({"model": Unreadable()}, "give the path"),
        ({"model": ""}, "no such file: give a path"),
        ({"model": "x" * 10_000}, "File name too long"),
        ({"model": "~nobody-of-this-name/m.gguf"}, "home"),
        ({"progress": 5}, "progress=5: give a function"),
    ],
)
@pytest.mark.anyio
async def test_wrong_arguments_of_open_are_refused_before_anything_loads(
    arguments, words
):
    """
    One ConfigError says what to give instead.
    """
    with pytest.raises(ConfigError, match=words) as caught:
        async with AsyncEngine.open(**arguments):
            pass

    assert len(str(caught.value)) < 400


@each(
    "call",
    [
        lambda: pyllama_raw.generate("a", {"max_tokens": 3}),
        lambda: pyllama_raw.generate(5),
        lambda: pyllama_raw.generate({1, 2}),
        lambda: pyllama_raw.generate(Unreadable()),
        lambda: pyllama_raw.score("a", n_top="3"),
        lambda: pyllama_raw.generate("a", model=5),
        lambda: pyllama_raw.score("a", config={"context": {}}),
    ],
)
def test_blocking_calls_refuse_before_a_model_is_loaded(call, monkeypatch):
    """
    Nobody waits for a model to learn of a mistake in the arguments.
    """

    def find(model):
        raise AssertionError("a model is looked for")

    monkeypatch.setattr("pyllama_raw.options.models.resolve_model", find)

    with pytest.raises(PyllamaError):
        call()


SCHEMAS = [
    {"const": b"bytes"}, {b"key": 1}, {"const": {1, 2}}, {"const": object()},
    {"const": DEEP}, {"const": Unreadable()}, {"enum": [1j]},
]  # fmt: skip


@pytest.mark.native
@each("schema", SCHEMAS)
def test_a_schema_that_is_no_json_is_a_bad_schema(schema):
    """
    Bytes, sets, strange objects and endless depth are the request's fault.
    """
    from pyllama_raw.engine.guidance import Guidance
    from pyllama_raw.native.model import Model
    from tests.support.tiny import tiny_model

    with Model.load(tiny_model("llama")) as model:
        guidance = Guidance(model.vocab)
        with pytest.raises(BadSchema, match=r"it is no JSON|at most"):
            guidance.make("json_schema", schema)
