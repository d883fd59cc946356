"""Constraints of a few bytes that would grow without an end, and outputs that would."""

import json
import random
import resource
import sys
from pathlib import Path
from threading import Event

import anyio
import pytest

from pyllama_raw import AsyncEngine, ContextConfig, EngineConfig, SamplingParams
from pyllama_raw.engine import guidance as module
from pyllama_raw.engine.guidance import (
    Guidance,
    LongestPieces,
    Trials,
    checked_schema,
)
from pyllama_raw.engine.mailbox import CALLER_LEFT
from pyllama_raw.engine.parts import at_once
from pyllama_raw.engine.rows import _error
from pyllama_raw.engine.sampling import Grammars
from pyllama_raw.errors import BadGrammar, BadSchema, ClosedError
from pyllama_raw.native.model import Model
from tests.native.support import run_python

pytestmark = pytest.mark.native

# Each of these has twice as many states as the next one.
DOUBLES = "\n".join(["start: A0", *(f"A{i}: A{i + 1} A{i + 1}" for i in range(40))])
ENDLESS = {"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}]}
EXPONENTIAL = f'{DOUBLES}\nA40: "x"'


@pytest.fixture(scope="module")
def vocab(model_path):
    with Model.load(model_path, vocab_only=True) as model:
        yield model.vocab


@pytest.fixture(scope="module")
def guidance(vocab):
    return Guidance(vocab)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 99989},
        {"type": "integer", "multipleOf": 1000000},
        {"type": "integer", "multipleOf": 1e6},
        {"type": "number", "multipleOf": 0.99989},
        {"properties": {"a": {"items": {"multipleOf": 99999989}}}},
    ],
)
def test_a_large_multiple_is_refused(schema):
    """
    An automaton has a state for each of its remainders.
    """
    with pytest.raises(BadSchema, match=r"multipleOf: .* is too large; at most 10000"):
        checked_schema(schema)


@pytest.mark.parametrize("multiple", [1, 7, 0.01, 1e-9, 9973])
def test_other_multiples_are_kept(multiple):
    """
    Whatever place they have.
    """
    assert (
        json.loads(checked_schema({"multipleOf": multiple}))["multipleOf"] == multiple
    )


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json_schema", ENDLESS),
        ("lark", EXPONENTIAL),
    ],
)
def test_what_takes_too_long_ends_only_its_trial(guidance, kind, value):
    """
    The engine goes on, and so do the next trials.
    """
    with pytest.raises(
        BadSchema, match=r"not compiled within 1 s of CPU time|more than 1000000 steps"
    ):
        guidance.make(kind, value)

    assert guidance.make("regex", "a+")().error == ""


LIMITED = {
    "many repetitions": ('"a"{30000}', ""),
    "of a rule that may be empty": ("(b? b?){30000}", ""),
    "of repetitions": ("((b{1000}){1000}){1000}", ""),
    "of repetitions without an end": ("(b{0,30000}){0,30000}", ""),
    "many ways": ("b? " * 6000, "within 1 s of CPU time|more than 10000 ways"),
    "many rules of them": (
        " ".join(f"[a{chr(0x100 + i)}]{{0,30000}}" for i in range(3000)),
        "within 1 s of CPU time|more than 200000 symbols",
    ),
    "many sets": (
        " ".join(f"[^{chr(0x100 + i)}]" for i in range(5000)),
        "within 1 s of CPU time|more than 1000000 steps",
    ),
}


@pytest.mark.parametrize(("rule", "limit"), LIMITED.values(), ids=LIMITED)
def test_repetitions_of_a_grammar_are_compiled_or_exceed_a_limit(vocab, rule, limit):
    """
    Of numbers alone nothing grows; what grows is refused by the limit that it exceeds.
    """
    params = SamplingParams(grammar=f'root ::= {rule}\nb ::= "x" | "y"')
    if not limit:
        assert Grammars(vocab).make(params, at_once)
        return

    with pytest.raises(
        BadGrammar, match=rf"^grammar: .*({limit}).*: .*(shorten|write)"
    ):
        Grammars(vocab).make(params, at_once)


@pytest.mark.anyio
async def test_others_are_served_while_a_constraint_is_tried(model_path):
    """
    A trial takes a second of another process; requests without a constraint need none of it.
    """
    ended: list[str] = []
    config = EngineConfig(context=ContextConfig(n_ctx=512, n_threads=1))

    async def refused() -> None:
        with pytest.raises(BadSchema, match="within 1 s of CPU time: shorten"):
            await engine.complete("a", SamplingParams(json_schema=ENDLESS))
        ended.append("refused")

    async with AsyncEngine.open(model_path, config) as engine:
        await engine.complete("a", SamplingParams(max_tokens=1, lark='start: "a"'))
        async with anyio.create_task_group() as group:
            group.start_soon(refused)
            while "refused" not in ended:
                await engine.complete("a", SamplingParams(max_tokens=1))
                ended.append("served")

    assert ended.index("refused") > 0


def test_a_caller_who_leaves_ends_a_trial():
    """
    Long before its limit of time is reached.
    """
    left = Event()
    left.set()
    token = CALLER_LEFT.set(left)
    try:
        with pytest.raises(ClosedError, match="left"):
            Trials(module.BYTES, [256]).n_bytes("lark", EXPONENTIAL)
    finally:
        CALLER_LEFT.reset(token)


def test_where_no_process_can_be_started_constraints_are_compiled(vocab, monkeypatch):
    """
    As in a frozen application, whose executable is no Python.
    """
    monkeypatch.setattr("sys.frozen", True, raising=False)

    assert Guidance(vocab).make("regex", "a+")().error == ""
    with pytest.raises(BadSchema):
        checked_schema({"type": "no type, nor was it checked before"})


def test_a_fork_has_processes_of_its_own():
    """
    Otherwise it would read answers that are for its parent, whose processes stay.
    """
    code = """
import os
from pyllama_raw.engine.guidance import byte_trials

def pids():
    byte_trials().n_bytes("regex", "a+")
    return {process._popen.pid for process in byte_trials()._all}

ours = pids()
child = os.fork()
if not child:
    os._exit(len(ours & pids()))
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0
assert pids() == ours
"""
    process = run_python(code)

    assert process.returncode == 0, process.stderr


def test_a_program_that_embeds_python_is_not_started(monkeypatch, tmp_path, caplog):
    """
    Its executable is no Python. One that is named by the variable may lack what is needed; then
    constraints are compiled without a trial, too.
    """
    app, marks = tmp_path / "app", tmp_path / "marks"
    app.write_text(f"#!/bin/sh\necho started >> {marks}\nexit 3\n")
    app.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(app))
    trials = Trials(module.BYTES, [256])

    assert trials.n_bytes("regex", "a+") is not None  # by the Python of the library
    assert not marks.exists()
    monkeypatch.setenv("PYLLAMA_RAW_PYTHON", str(app))
    other = Trials(module.BYTES, [256])
    assert [other.n_bytes("regex", text) for text in ("a+", "b+")] == [None, None]
    assert marks.read_text() == "started\n"
    assert "ended with 3: it needs cffi, llguidance" in caplog.text


def test_the_longest_pieces_of_a_text_are_looked_up():
    """
    As a look through all of them would have them, and of a long text at once: a mask waits for it.
    """
    draw = random.Random(1)  # noqa: S311
    pieces = [bytes([97 + n]) for n in range(3)]
    pieces += ["".join(draw.choices("abc", k=n)).encode() for n in range(2, 40)]
    longest = LongestPieces(pieces)
    texts = ["".join(draw.choices("abc", k=n)).encode() for n in range(60)]
    expected = []
    for text in texts:
        parts, left = [], text
        while left:
            parts.append(max(filter(left.startswith, pieces), key=len))
            left = left.removeprefix(parts[-1])
        expected.append(parts)
    split = [[pieces[token] for token in longest.tokens(text)] for text in texts]

    assert split == expected
    assert longest.tokens(b"abd") == longest.tokens(b"d") == []
    assert len(LongestPieces(pieces[:3]).tokens(b"a" * 10**6)) == 10**6


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of a process")
def test_vocabularies_without_named_tokens_are_freed():
    """
    Else constraints of one client that name tokens use up the memory for those of all others.
    """
    pieces = [*module.BYTES, *(b"%08d" % n for n in range(20_000))]
    trials, sizes = Trials(pieces, [256]), []
    for token in range(300, 340):
        trials.n_bytes("lark", f'start: "a" <[{token}]>', [token])
        [process] = trials._all
        status = Path(f"/proc/{process._popen.pid}/statm").read_text()
        sizes.append(int(status.split()[1]) * resource.getpagesize())

    # Each would take more than a MiB.
    assert max(sizes) - sizes[9] < 15 * 2**20


def test_compiled_constraints_are_counted_by_their_bytes(vocab, monkeypatch):
    """
    The oldest give way, and what is larger than all of them is not kept.
    """
    guidance = Guidance(vocab)
    cache = guidance._cache
    schemas = [{"type": "integer", "multipleOf": n} for n in (3989, 4001, 9973)]
    guidance.make("json_schema", schemas[0])
    n_bytes = cache.n_bytes
    monkeypatch.setattr(module, "MAX_CACHE_BYTES", n_bytes * 3 // 2)

    facts = []
    for schema in schemas[1:]:
        guidance.make("json_schema", schema)
        facts.append((len(cache), cache.n_bytes <= n_bytes * 3 // 2))

    assert n_bytes > 2**20
    assert facts == [(1, True), (1, True)]


def follow(guidance, vocab, kind, value, text):
    """Accept *text* as far as the masks let it; returns what they did not."""
    state = guidance.make(kind, value)()
    tokens = vocab.tokenize(text, add_special=False, parse_special=False)
    for index, token in enumerate(tokens):
        if not state.mask[token // 32] >> token % 32 & 1:
            return b"".join(vocab.pieces[t] for t in tokens[index:]).decode()
        state.accept(token)
        state.prepare()
    return ""


@pytest.mark.parametrize("kind", ["json_schema", "lark"])
@pytest.mark.parametrize(
    ("schema", "text", "refused"),
    [
        ({"type": "integer"}, "1" * 16, ""),
        ({"type": "integer"}, "1" * 17, "1"),
        ({"type": "number"}, "-0." + "3" * 16 + "e-12", ""),
        ({"type": "number"}, "0." + "3" * 17, "3"),
        ({"type": "number"}, "1e" + "3" * 17, "3"),
        ({"type": "number", "minimum": 0}, "1." + "0" * 17, "0"),
        ({"type": "number", "minimum": 1e-20, "maximum": 2e-20}, f"0.{'0' * 19}1", ""),
        ({"type": "string"}, '"' + "1" * 40 + '"', ""),
        ({"type": "array", "items": {"type": "integer"}}, "[1, 2]", ""),
        ({"type": "array", "items": {"type": "integer"}}, "[\n  1,\n  2\n]", ""),
        ({"type": "array", "items": {"type": "integer"}}, "[1,\n\n2]", "\n2]"),
    ],
)
def test_numbers_and_white_space_end(guidance, vocab, *, kind, schema, text, refused):
    """
    In schemas, and in the arguments of calls; strings go on as they like.
    """
    value = (
        schema if kind == "json_schema" else f"start: %json {checked_schema(schema)}"
    )

    left = follow(guidance, vocab, kind, value, text)

    assert left.strip("\n") == refused.strip("\n")


def test_a_pattern_has_as_many_digits_as_it_says(guidance, vocab):
    """
    The limit is that of numbers in schemas only.
    """
    assert follow(guidance, vocab, "regex", "[0-9]{40}", "7" * 40) == ""


def test_a_constraint_that_cannot_be_followed_further_is_a_mistake_of_its_request(
    guidance, vocab
):
    """
    Clients do not try again what their constraint cannot have.
    """
    state = guidance.make("lark", "start: r\nr: /[a-z ]/ r r? | /[a-z ]/")()
    (letter,) = vocab.tokenize("a", add_special=False, parse_special=False)
    while not state.error:
        state.accept(letter)
        state.prepare()

    error = _error(state, -1)

    assert isinstance(error, BadSchema)
    assert error.name == "lark"


DEEP = {
    "at most 28 parentheses": (28, "lark", "start: ", "(", '"a"', ")"),
    "or 14 grammars": (14, "lark", "start: ", "%lark {\nstart: ", '"a"', "\n}"),
    "at most 126 levels": (126, "json_schema", "", '{"items":', "{}", "}"),
}


@pytest.mark.parametrize("limit", DEEP)
def test_depths_that_a_refusal_names_are_those_that_are_read(limit):
    """
    One level more is refused with the limit, and with what to do.
    """
    n_most, kind, start, begin, inside, end = DEEP[limit]

    def nested(n):
        return start + begin * n + inside + end * n

    assert module.byte_trials().n_bytes(kind, nested(n_most)) is not None
    with pytest.raises(BadSchema, match=f"{limit}.*: flatten it"):
        module.byte_trials().n_bytes(kind, nested(n_most + 1))
