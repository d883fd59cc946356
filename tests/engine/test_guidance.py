"""Schemas, patterns and Lark grammars: outputs that end are right, mistakes end nothing."""

import json
import re
import sys
from random import Random

import anyio
import pytest

from pyllama_raw import (
    AsyncEngine,
    ContextConfig,
    EngineConfig,
    FinishReason,
    SamplingParams,
    SchedulerConfig,
)
from pyllama_raw.engine.guidance import Guidance
from pyllama_raw.errors import BadGrammar, BadSchema, Unsupported
from pyllama_raw.native.model import Model
from tests.support.schemas import SCHEMAS

jsonschema = pytest.importorskip("jsonschema")

pytestmark = [pytest.mark.native, pytest.mark.anyio]

CONFIG = EngineConfig(
    context=ContextConfig(n_ctx=8192, n_threads=1),
    scheduler=SchedulerConfig(n_slots=8),
    deterministic=True,
)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def engine(model_path):
    async with AsyncEngine.open(model_path, CONFIG) as opened:
        yield opened


def params(seed: int = 0, max_tokens: int = 200, **constraint) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, **constraint)


async def test_finished_outputs_are_valid(engine):
    """
    Eight schemas, all at once: what ends by itself is JSON that its schema allows.
    """
    results = {}

    async def run(name, schema):
        prompt = f"A JSON document about {name}:\n"
        results[name] = await engine.complete(prompt, params(7, json_schema=schema))

    async with anyio.create_task_group() as group:
        for name, schema in SCHEMAS[:8]:
            group.start_soon(run, name, schema)

    ended = {n: r for n, r in results.items() if r.finish_reason is FinishReason.STOP}
    assert len(ended) >= 5
    for name, result in ended.items():
        jsonschema.validate(json.loads(result.text), dict(SCHEMAS)[name])


@pytest.mark.parametrize("temperature", [0, 1])
async def test_patterns_are_followed(engine, temperature):
    """
    A regular expression matches the whole output; so does a Lark grammar.
    """
    options = {"temperature": temperature}
    date = await engine.complete(
        "The date is ", params(regex="[0-9]{4}-[0-9]{2}-[0-9]{2}", **options)
    )
    lark = await engine.complete(
        "Say ", params(lark='start: "yes" | "no" | /x{3}/', **options)
    )

    assert re.fullmatch("[0-9]{4}-[0-9]{2}-[0-9]{2}", date.text)
    assert lark.text in ("yes", "no", "xxx")


@pytest.mark.parametrize(
    "pattern",
    [
        r"\d{8}",
        r"[\d_]{8}",
        r"\w{8}",
        r"[^\W\d]{8}",
        r"\s{6}",
        r"[\w--\d]{8}",
        r"\D\d\S",
    ],
)
def test_classes_of_patterns_are_ascii(model_path, pattern):
    """
    Of fifty outputs that are drawn evenly from the masks, each is one that Python's `re`
    matches with re.ASCII.
    """
    ascii_pattern = pattern.replace(r"[\w--\d]", "[A-Za-z_]")
    with Model.load(model_path, vocab_only=True) as model:
        vocab = model.vocab
        constraint = Guidance(vocab).make("regex", pattern)
        draws = map(Random, range(50))
        outputs = [drawn(constraint(), vocab, random) for random in draws]

    assert [
        text for text in outputs if not re.fullmatch(ascii_pattern, text, re.ASCII)
    ] == []


def drawn(state, vocab, random) -> str:
    """An output whose tokens are each as likely as all others that may come."""
    output = b""
    while True:
        state.prepare()
        words = enumerate(state.mask)
        bits = ((32 * at + bit, word >> bit) for at, word in words for bit in range(32))
        token = random.choice([token for token, rest in bits if rest & 1])
        if token in vocab.eog_tokens:
            return output.decode()
        output += vocab.pieces[token]
        state.accept(token)


async def test_an_invalid_schema_disturbs_no_other(engine):
    """
    One of four is refused before it is queued; the others are what they are alone.
    """
    valid = params(3, 40, json_schema=dict(SCHEMAS)["a colour"])
    prompts = [f"Colour number {i}: " for i in range(3)]
    alone = [await engine.complete(prompt, valid) for prompt in prompts]
    together = {}

    async def run(prompt):
        together[prompt] = await engine.complete(prompt, valid)

    async def refused():
        with pytest.raises(BadSchema, match="nonsense"):
            await engine.complete("a", params(json_schema={"type": "nonsense"}))

    async with anyio.create_task_group() as group:
        group.start_soon(refused)
        for prompt in prompts:
            group.start_soon(run, prompt)

    assert [together[p].text for p in prompts] == [result.text for result in alone]
    assert all(result.text for result in alone)


@pytest.mark.parametrize(
    ("constraint", "error", "words"),
    [
        ({"regex": "((("}, BadSchema, "unclosed"),
        ({"lark": "start: missing"}, BadSchema, "missing"),
        ({"json_schema": {"$ref": "#/nowhere"}}, BadSchema, "json_schema"),
        ({"grammar": "root ::= ("}, BadGrammar, "not closed"),
    ],
)
async def test_what_cannot_be_used_is_refused_with_its_reason(
    engine, constraint, error, words
):
    """
    Before the request is queued.
    """
    before = engine.stats().steps

    with pytest.raises(error, match=words):
        await engine.complete("a", params(**constraint))

    assert engine.stats().steps == before


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ({"regex": r"[^\s\S]"}, "regex: it excludes every output: loosen it"),
        (
            {"regex": "a(b"},
            "regex: unclosed group, at character 2 of the pattern, in `a(b`",
        ),
        (
            {"lark": 'start: a\na: "a"\na: "b"'},
            'lark: duplicate rule: "a", at line 3, column 4, in `a: "b"`',
        ),
        (
            {
                "json_schema": {
                    "$defs": {"a": {"$ref": "#/$defs/a"}},
                    "$ref": "#/$defs/a",
                }
            },
            "json_schema: it excludes every output: loosen it",
        ),
        (
            {"grammar": "root ::= root"},
            "grammar: it excludes every output: loosen it",
        ),
    ],
)
async def test_a_refusal_has_nothing_of_the_library(engine, constraint, message):
    """
    What is wrong, where, and what to do, as long as a line.
    """
    with pytest.raises((BadGrammar, BadSchema)) as caught:
        await engine.complete("a", params(**constraint))

    assert str(caught.value) == message


async def test_outputs_of_one_prompt_have_states_of_their_own(engine):
    """
    n outputs of one schema are each valid.
    """
    pattern = "[a-z]{3,6}!"
    results = await engine.complete_n("Word: ", params(1, regex=pattern, n=3))

    assert len(results) == 3
    assert all(re.fullmatch(pattern, result.text) for result in results)


def test_without_the_package_the_error_names_it(model_path, monkeypatch):
    """
    Unsupported, with the versions that can be used.
    """
    monkeypatch.setitem(sys.modules, "llguidance", None)

    with Model.load(model_path, vocab_only=True) as model:
        with pytest.raises(Unsupported, match=r"need llguidance 1\.9"):
            Guidance(model.vocab)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"enum": ["a"] * 20_000}, "20002 or more values, at most 16384"),
        (
            {"properties": {str(index): {} for index in range(1001)}},
            "1001 or more names in one mapping, at most 1000",
        ),
        (
            {"const": "a" * 20_000},
            "20000 or more characters in one text, at most 16384",
        ),
        ({"enum": ["a" * 9_999] * 14}, "or more characters, at most 131072"),
    ],
)
def test_a_schema_has_limits(model_path, schema, words):
    """
    What is too large is refused before all of it is written down or compiled.
    """
    with Model.load(model_path, vocab_only=True) as model:
        with pytest.raises(BadSchema, match=words):
            Guidance(model.vocab).make("json_schema", schema)


async def test_a_token_that_a_grammar_names_is_only_there(engine):
    """
    It has no text: the same text elsewhere is spelled with other tokens.
    """
    [the] = await engine.tokenize(" the", add_special=False)
    lark = f"start: / the the/ <[{the}]>"

    result = await engine.complete("Say", params(lark=lark))

    assert result.text == " the the the"
    assert result.token_ids.count(the) == 1
