"""No request keeps an event loop, the engine thread or closing waiting."""

import threading
from collections.abc import Sequence
from dataclasses import replace

import anyio
import pytest
from anyio import to_thread
from anyio.lowlevel import checkpoint

from pyllama_raw import AsyncEngine, SamplingParams
from pyllama_raw.errors import ClosedError, InvalidRequest
from pyllama_raw.options.sampling import MAX_ITEMS, MAX_STOP_BYTES
from pyllama_raw.testing import FakeExecutor, FakeVocab, fake_limits, fake_parts
from tests.support.limits import LIMIT_S

pytestmark = pytest.mark.anyio

LARGE = 20_000
FEW = SamplingParams(max_tokens=2)
TOO_MANY = {
    "stages": ("top_k",) * 1_000_000,
    "logit_bias": dict.fromkeys(range(200_000), 1.0),
    "suppress_tokens": range(200_000),
    "stop": ("a",) * 1_000_000,
    "stop_token_ids": (1,) * 1_000_000,
    "grammar_triggers": ("a",) * 65,
    "dry_sequence_breakers": ("a",) * 33,
    "json_schema": dict.fromkeys(map(str, range(10_000))),
}


def large_engine(**parts) -> AsyncEngine:
    """With room for LARGE tokens in a slot."""
    limits = fake_limits(
        n_slots=2, n_ctx_slot=2 * LARGE, n_cells=4 * LARGE, n_batch=LARGE
    )
    return AsyncEngine(replace(fake_parts(FakeExecutor(limits)), **parts))


@pytest.mark.parametrize("name", MAX_ITEMS)
def test_every_list_has_a_limit(name):
    """
    The error names the option, how much was given and how much is allowed.
    """
    value = tuple(TOO_MANY[name]) if name == "suppress_tokens" else TOO_MANY[name]
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{"grammar": 'root ::= "a"', name: value})

    error = caught.value
    assert name in error.name
    assert (error.value, error.allowed) == (
        f"a {type(value).__name__} of {len(value)} items",
        f"at most {MAX_ITEMS[name]} items",
    )


@pytest.mark.parametrize(
    ("options", "name", "allowed"),
    [
        ({"stop": ("ab" * 500_000,)}, "stop[0]", "16384 characters"),
        ({"stop": ("é" * 128,) * 65}, "stop", "16384 bytes together"),
        ({"regex": "a" * 2**20}, "regex", "16384 characters"),
        ({"lark": "a" * 2**20}, "lark", "16384 characters"),
        ({"grammar": "a" * 2**21}, "grammar", "131072 characters"),
        (
            {"grammar": "a", "grammar_root": "a" * 2000},
            "grammar_root",
            "1000 characters",
        ),
    ],
)
def test_every_text_has_a_limit(options, name, allowed):
    """
    So has what is made of several texts together.
    """
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**options)

    assert name in caught.value.name
    assert allowed in caught.value.allowed


def test_what_is_within_the_limits_is_taken():
    """
    As many stop strings as can be, with as many bytes.
    """
    n_most = MAX_ITEMS["stop"]
    strings = ("a" * (MAX_STOP_BYTES // n_most),) * n_most

    assert SamplingParams(stop=strings).stop == strings


@pytest.mark.parametrize(
    ("options", "n_calls"),
    [
        ({"grammar": 'root ::= "a"'}, 1),
        ({"json_schema": {}}, 1),
        ({"regex": "a"}, 1),
        ({"lark": "start: /a/"}, 1),
        ({"dry_multiplier": 1.0}, 1),
        ({"logit_bias": dict.fromkeys(range(257), 1.0)}, 1),
        ({"suppress_tokens": tuple(range(257))}, 1),
        ({"stop": ("a" * 257,)}, 1),
        ({"logit_bias": {1: 1.0}, "suppress_tokens": (1,), "stop": ("a",)}, 0),
    ],
)
async def test_rules_of_a_request_are_made_once_and_by_a_worker(options, n_calls):
    """
    Not in the event loop or the engine thread, and not for each output again.
    """
    threads = []

    def make_rules(params, reading):
        threads.append(threading.current_thread())

    async with large_engine(make_rules=make_rules) as engine:
        engine_thread = engine._thread._thread
        await engine.complete_n("a", SamplingParams(max_tokens=1, n=3, **options))

    assert len(threads) == n_calls
    assert not {threading.current_thread(), engine_thread} & {*threads}


class Ids(Sequence):
    """Token ids that know who read them."""

    def __init__(self, n_tokens: int) -> None:
        self.n_tokens = n_tokens
        self.readers = set()

    def __len__(self):
        return self.n_tokens

    def __getitem__(self, index):
        return 1

    def __iter__(self):
        self.readers.add(threading.current_thread())
        return iter([1] * self.n_tokens)


@pytest.mark.parametrize(("n_tokens", "is_worker"), [(100, False), (LARGE, True)])
async def test_many_token_ids_are_read_by_a_worker(n_tokens, is_worker):
    """
    Few are read where the caller is.
    """
    ids = Ids(n_tokens)
    async with large_engine() as engine:
        await engine.complete(ids, FEW)

    (reader,) = ids.readers
    assert (reader is not threading.current_thread()) is is_worker


async def test_a_long_text_is_looked_at_part_by_part():
    """
    A lone surrogate far behind is found, and the error shows it alone.
    """
    async with large_engine() as engine:
        with pytest.raises(InvalidRequest) as caught:
            await engine.complete("a" * (2**20 + 5) + "\ud800", FEW)

    assert caught.value.value == "\ud800"


async def test_other_work_in_threads_keeps_no_request_waiting():
    """
    All default threads are taken: long prompts, rules and calls have their own.
    """
    limiter = to_thread.current_default_thread_limiter()
    others = [object() for _ in range(int(limiter.total_tokens))]
    with anyio.fail_after(LIMIT_S):
        async with large_engine() as engine:
            for other in others:
                limiter.acquire_on_behalf_of_nowait(other)
            try:
                result = await engine.complete("a" * LARGE, SamplingParams(regex="a"))
                await engine.complete([1] * LARGE, FEW)
                await engine.clear_cache()
                await engine.cache_stats()
            finally:
                for other in others:
                    limiter.release_on_behalf_of(other)

    assert len(result.token_ids) == 128


async def test_closing_does_not_wait_for_rules():
    """
    Their request hears that the engine is closed, and they cannot read its vocabulary.
    """
    begun, closed = threading.Event(), threading.Event()
    refused = []

    def make_rules(params, reading):
        begun.set()
        assert closed.wait(LIMIT_S)
        try:
            reading(lambda: None)
        except ClosedError as error:
            refused.append(error)
            raise

    async def request() -> None:
        with pytest.raises(ClosedError):
            await engine.complete("a", SamplingParams(regex="a"))

    engine = large_engine(make_rules=make_rules)
    with anyio.fail_after(LIMIT_S):
        async with anyio.create_task_group() as group:
            group.start_soon(request)
            await to_thread.run_sync(begun.wait, 20)
            await engine.aclose()
            assert not refused
            closed.set()

    assert len(refused) == 1


async def test_closing_waits_for_who_reads_the_vocabulary():
    """
    It is freed when nobody does.
    """
    order = []
    begun, go_on = threading.Event(), threading.Event()

    def read() -> None:
        begun.set()
        assert go_on.wait(LIMIT_S)
        order.append("read")

    async def request() -> None:
        with pytest.raises(ClosedError):
            await engine.complete("a", SamplingParams(regex="a"))

    async def let_go() -> None:
        while not engine._sessions.current.preparation._encoder._users.are_refused:
            await checkpoint()
        go_on.set()

    engine = large_engine(
        make_rules=lambda _, reading: reading(read),
        release=lambda: order.append("freed"),
    )
    with anyio.fail_after(LIMIT_S):
        async with anyio.create_task_group() as group:
            group.start_soon(request)
            await to_thread.run_sync(begun.wait, 20)
            group.start_soon(let_go)
            await engine.aclose()

    assert order == ["read", "freed"]


@pytest.mark.parametrize("collects", [False, True])
async def test_reading_late_lets_others_run(collects):
    """
    Thousands of tokens that wait are taken in part by part, and still are one delta.
    """
    n_turns = 0

    async def count() -> None:
        nonlocal n_turns
        while True:
            n_turns += 1
            await checkpoint()

    n_tokens = 2_500
    params = SamplingParams(max_tokens=n_tokens, ignore_eos=True)
    async with (
        large_engine() as engine,
        engine.generate("a", params) as generation,
        anyio.create_task_group() as group,
    ):
        await engine.aclose(drain_s=60)
        group.start_soon(count)
        await checkpoint()
        n_before = n_turns
        if collects:
            deltas = [await generation.collect()]
        else:
            deltas = [delta async for delta in generation]
        n_between = n_turns - n_before
        group.cancel_scope.cancel()

    assert [len(delta.token_ids) for delta in deltas] == [n_tokens]
    assert n_between >= 1


async def test_long_texts_are_tokenized_by_a_worker():
    """
    Short ones are tokenized where the caller is.
    """
    threads = []

    class Recording(FakeVocab):
        def tokenize(self, text, *, add_special, parse_special):
            threads.append(threading.current_thread())
            return super().tokenize(
                text, add_special=add_special, parse_special=parse_special
            )

    async with large_engine(vocab=Recording()) as engine:
        await engine.complete("a" * 5_000, FEW)
        await engine.complete("a", FEW)

    here = threading.current_thread()
    assert [thread is here for thread in threads] == [False, True]


async def test_more_ids_than_a_slot_holds_have_a_text():
    """
    They are read part by part, for which the size of a slot is no limit.
    """
    async with large_engine() as engine:
        text = await engine.detokenize([ord("a")] * 3 * LARGE)

    assert text == "a" * 3 * LARGE


async def test_a_character_may_lie_in_two_parts_of_a_text():
    """
    Its bytes are put together, and one that lacks some is U+FFFD.
    """
    ids = [ord("a"), *"é".encode() * LARGE, "é".encode()[0]]
    async with large_engine() as engine:
        text = await engine.detokenize(ids)

    assert text == "a" + "é" * LARGE + "\ufffd"
