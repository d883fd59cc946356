"""Generating on both event loops, with a fake executor below a real scheduler."""

import anyio
import pytest

from pyllama_raw import (
    Delta,
    FinishReason,
    QueueFull,
    Result,
    SamplingParams,
)
from pyllama_raw.core.step import DecodeStatus
from pyllama_raw.errors import (
    ClosedError,
    DecodeFailed,
    EngineStopped,
    InvalidRequest,
    PromptTooLong,
    SamplingFailed,
    Unsupported,
    WrongUse,
)
from pyllama_raw.results import LengthLimit, SamplerUse, StopString, StopToken
from pyllama_raw.testing import (
    BOS,
    EOS,
    FakeExecutor,
    fake_engine,
    fake_limits,
    letters,
)
from tests.engine.support import HeldSteps
from tests.support.loops import anyio_backend  # noqa: F401

pytestmark = pytest.mark.anyio


def expected(prompt: str, n_tokens: int) -> str:
    """What the fake model says after *prompt*, computed alone."""
    tokens = [BOS, *prompt.encode()]
    for _ in range(n_tokens):
        tokens.append(letters(tokens))
    return bytes(tokens[-n_tokens:]).decode()


async def test_deltas_add_up_to_the_result():
    """
    The texts and tokens of all deltas, joined, are the result.
    """
    async with fake_engine() as engine:
        params = SamplingParams(max_tokens=20, seed=7)
        async with engine.generate("hello", params) as generation:
            deltas = [delta async for delta in generation]
        result = generation.result

    assert all(isinstance(delta, Delta) for delta in deltas)
    assert "".join(delta.text for delta in deltas) == expected("hello", 20)
    assert result.text == expected("hello", 20)
    assert [t for delta in deltas for t in delta.token_ids] == list(result.token_ids)
    assert result.finish_reason is FinishReason.LENGTH
    assert result.seed == 7


async def test_usage_and_timings_are_filled():
    """
    Tokens are counted; durations are in order and not negative.
    """
    async with fake_engine() as engine:
        result = await engine.complete("hello", SamplingParams(max_tokens=5))

    usage, timings = result.usage, result.timings
    assert (usage.prompt_tokens, usage.completion_tokens) == (6, 5)
    assert usage.cached_tokens == 0
    assert 0 <= timings.queue_s <= timings.ttft_s <= timings.e2e_s
    assert 0 < timings.itl_p50_s <= timings.itl_p99_s
    assert 0 < timings.tpot_s <= timings.itl_p99_s


async def test_a_result_tells_where_it_was_sampled():
    """
    What the executor says when it closes the request.
    """
    async with fake_engine() as engine:
        result = await engine.complete("hello", SamplingParams(max_tokens=5))

    assert result.sampler == SamplerUse("host", "it is a fake")


async def test_one_token_has_no_gaps():
    """
    Gaps need two tokens: they are absent, not zero.
    """
    async with fake_engine() as engine:
        result = await engine.complete("hello", SamplingParams(max_tokens=1))

    assert result.timings.itl_p50_s is None
    assert result.timings.tpot_s is None


async def test_outputs_do_not_depend_on_what_runs_beside():
    """
    complete_many keeps the order, and each output is that of a run alone.
    """
    prompts = ["x" * n for n in range(1, 40)]
    async with fake_engine() as engine:
        results = await engine.complete_many(prompts, SamplingParams(max_tokens=9))

    assert [result.text for result in results] == [expected(p, 9) for p in prompts]


async def test_complete_many_raises_the_first_error_bare():
    """
    One bad prompt ends the call with its own error, not with a group, and the error says
    which prompt it is about.
    """
    async with fake_engine() as engine:
        with pytest.raises(PromptTooLong) as raised:
            await engine.complete_many(["a", "b" * 500, "c"])
        stats = engine.stats()

    assert stats.waiting == 0
    assert raised.value.prompt_index == 1
    assert str(raised.value).startswith("prompts[1]: the prompt has ")


async def test_complete_many_may_return_errors_in_the_places_of_results():
    """
    With errors="return" the others go on, and progress counts all that have ended.
    """
    counts: list[int] = []
    prompts = ["a", "b" * 500, "c", []]
    params = SamplingParams(max_tokens=3)
    async with fake_engine() as engine:
        results = await engine.complete_many(
            prompts, params, errors="return", progress=counts.append
        )

    texts = [r.text if isinstance(r, Result) else type(r).__name__ for r in results]
    assert texts == [
        expected("a", 3),
        "PromptTooLong",
        expected("c", 3),
        "InvalidRequest",
    ]
    assert [getattr(r, "prompt_index", None) for r in results] == [None, 1, None, 3]
    assert counts == [1, 2, 3, 4]


async def test_complete_many_of_nothing():
    """
    No prompts, no results.
    """
    async with fake_engine() as engine:
        assert await engine.complete_many([]) == []


async def test_a_slow_reader_gets_everything_in_one_delta():
    """
    What was generated while nobody read comes merged, and stalls nobody.
    """
    async with fake_engine() as engine:
        params = SamplingParams(max_tokens=30)
        async with engine.generate("slow", params) as slow:
            fast = await engine.complete("fast", SamplingParams(max_tokens=60))
            deltas = [delta async for delta in slow]

    assert fast.usage.completion_tokens == 60
    assert [delta.text for delta in deltas] == [expected("slow", 30)]


async def test_stop_strings_end_the_text_before_them():
    """
    The text ends before the stop string; its tokens are counted.
    """
    text = expected("hello", 20)
    async with fake_engine() as engine:
        params = SamplingParams(max_tokens=50, stop=(text[4:6],))
        result = await engine.complete("hello", params)

    assert result.text == text[: text.index(text[4:6])]
    assert result.finish_reason is FinishReason.STOP
    assert result.finish_detail == StopString(text[4:6])


async def test_end_of_generation_stops_unless_ignored():
    """
    ignore_eos takes end-of-generation tokens for ordinary ones.
    """

    def next_token(tokens):
        return EOS if len(tokens) == 8 else letters(tokens)

    executor = FakeExecutor(fake_limits(), next_token=next_token)
    async with fake_engine(executor) as engine:
        stopped = await engine.complete("hello", SamplingParams(max_tokens=9))
        ignoring = SamplingParams(max_tokens=9, ignore_eos=True)
        ignored = await engine.complete("hello", ignoring)

    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.finish_detail == StopToken(EOS)
    assert stopped.usage.completion_tokens == 3
    assert ignored.finish_reason is FinishReason.LENGTH
    assert ignored.finish_detail is LengthLimit.MAX_TOKENS


async def test_stop_tokens_of_the_caller():
    """
    Any token can end the output; its text is not part of it.
    """
    text = expected("hello", 20)
    async with fake_engine() as engine:
        params = SamplingParams(max_tokens=50, stop_token_ids=(ord(text[3]),))
        result = await engine.complete("hello", params)

    assert result.text == text[: text.index(text[3])]
    assert result.finish_reason is FinishReason.STOP
    assert result.finish_detail == StopToken(ord(text[3]))


async def test_seeds_are_drawn_and_told():
    """
    Without a seed each request gets its own, and the executor the same one.
    """
    opened = []

    class Recording(FakeExecutor):
        def open(self, request):
            super().open(request)
            opened.append(request.sampling.seed)

    async with fake_engine(Recording(fake_limits())) as engine:
        params = SamplingParams(max_tokens=1)
        results = [await engine.complete("a", params) for _ in range(3)]

    assert [result.seed for result in results] == opened
    assert len(set(opened)) == 3


@pytest.mark.parametrize(
    ("prompt", "options", "error", "words"),
    [
        ([], {}, InvalidRequest, "at least one token"),
        ([1, 258], {}, InvalidRequest, "0 to 257"),
        ([1, -1], {}, InvalidRequest, "0 to 257"),
        ([1, 2**40], {}, InvalidRequest, "0 to 257"),
        ([1, "a"], {}, InvalidRequest, "0 to 257"),
        (b"bytes", {}, InvalidRequest, "text, token ids"),
        ("\ud800", {}, InvalidRequest, "surrogates"),
        ("a" * 127, {}, PromptTooLong, "128"),
        ([{"content": "a"}], {}, InvalidRequest, "role"),
        ([{"role": "user", "content": "a"}], {}, Unsupported, "chat template"),
        ("a", {"priority": 2**31}, InvalidRequest, "priority"),
        ("a", {"deadline_s": 0}, InvalidRequest, "deadline_s"),
        ("a", {"deadline_s": float("nan")}, InvalidRequest, "deadline_s"),
        (
            "a",
            {"params": SamplingParams(stop_token_ids=(258,))},
            InvalidRequest,
            "stop_token_ids",
        ),
    ],
)
async def test_bad_requests_are_refused_before_the_engine(
    prompt, options, error, words
):
    """
    The error names the parameter; the engine hears nothing and goes on.
    """
    async with fake_engine() as engine:
        with pytest.raises(error, match=words):
            await engine.complete(prompt, **options)
        result = await engine.complete("fine", SamplingParams(max_tokens=1))

    assert result.finish_reason is FinishReason.LENGTH
    assert engine.stats().submitted == 1


async def test_an_empty_text_still_has_its_first_token():
    """
    The vocabulary adds a token to "", so it can be generated from.
    """
    async with fake_engine() as engine:
        result = await engine.complete("", SamplingParams(max_tokens=2))

    assert result.usage.prompt_tokens == 1


async def test_output_ends_where_the_slot_is_full():
    """
    max_tokens beyond the slot is no error: the reason is length.
    """
    async with fake_engine() as engine:
        result = await engine.complete("a" * 99, SamplingParams(max_tokens=1000))

    assert result.finish_reason is FinishReason.LENGTH
    assert result.finish_detail is LengthLimit.SLOT
    assert result.usage.prompt_tokens + result.usage.completion_tokens == 128


async def test_a_full_queue_is_told_on_entering():
    """
    The request that found no place raises before its block begins, the others are served.
    """
    held = HeldSteps()
    executor = FakeExecutor(fake_limits(n_slots=1), on_step=held)
    params = SamplingParams(max_tokens=2)
    async with fake_engine(executor, max_waiting=1) as engine:
        async with engine.generate("a", params) as running:
            await anyio.to_thread.run_sync(held.wait_for_one)
            async with engine.generate("b", params) as waiting:
                refused = engine.generate("c", params)
                with pytest.raises(QueueFull):
                    await refused.__aenter__()
                with pytest.raises(QueueFull):
                    _ = refused.result
                held.allow(100)
                first = await running.collect()
                second = await waiting.collect()

    assert first.text == expected("a", 2)
    assert second.text == expected("b", 2)


async def test_failures_below_are_raised_in_the_reader():
    """
    What libllama failed with ends the request; deltas before it are read first.
    """
    twice = {2: DecodeStatus.FAILED, 3: DecodeStatus.FAILED}
    executor = FakeExecutor(fake_limits(), failures=twice)
    async with fake_engine(executor) as engine:
        async with engine.generate("a", SamplingParams(max_tokens=9)) as generation:
            first = [(await anext(generation)).text]
            while len("".join(first)) < 2:
                first.append((await anext(generation)).text)
            with pytest.raises(DecodeFailed):
                await anext(generation)
        after = await engine.complete("a", SamplingParams(max_tokens=2))

    assert "".join(first) == expected("a", 2)
    assert after.text == expected("a", 2)


async def test_a_failing_sampler_ends_one_request():
    """
    A row that cannot be sampled does not harm the rows beside it.
    """
    executor = FakeExecutor(fake_limits(), failing_rows=frozenset({(1, 1), (2, 1)}))
    async with fake_engine(executor) as engine:
        params = SamplingParams(max_tokens=9)
        async with (
            engine.generate("a", params) as bad,
            engine.generate("b", params) as good,
        ):
            result = await good.collect()
            with pytest.raises(SamplingFailed):
                await bad.collect()

    assert result.text == expected("b", 9)


async def test_a_dead_engine_wakes_all_readers():
    """
    A bug below ends every stream with EngineStopped from its cause; nothing hangs.
    """
    bug = ZeroDivisionError("a bug")
    held = HeldSteps()

    def on_step(step, plan):
        held(step, plan)
        raise bug

    errors = []

    async def read(engine):
        try:
            await engine.complete("a")
        except EngineStopped as error:
            errors.append(error.__cause__)

    async with fake_engine(FakeExecutor(fake_limits(), on_step=on_step)) as engine:
        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(read, engine)
            await anyio.to_thread.run_sync(held.wait_for_one)
            held.allow()
        with pytest.raises(EngineStopped):
            await engine.complete("a")

    assert errors == [bug] * 5


async def test_a_closed_engine_refuses():
    """
    Use after the block raises ClosedError, also from a generation made before.
    """
    async with fake_engine() as engine:
        unused = engine.generate("a")

    with pytest.raises(ClosedError):
        await engine.complete("a")
    with pytest.raises(ClosedError):
        await unused.collect()
    await engine.aclose()


async def test_closing_ends_what_is_being_read():
    """
    A call that cannot give a whole result raises, with what there was; nobody hangs.
    """
    held = HeldSteps()
    executor = FakeExecutor(fake_limits(), on_step=held)
    results: list[Result] = []

    async def read(engine):
        with pytest.raises(ClosedError) as caught:
            await engine.complete("a", SamplingParams(max_tokens=50))
        results.extend(caught.value.results)

    async with anyio.create_task_group() as group:
        async with fake_engine(executor) as engine:
            group.start_soon(read, engine)
            held.allow(3)
            for _ in range(4):
                await anyio.to_thread.run_sync(held.wait_for_one)
            engine._thread.close()
            held.allow(100)

    (result,) = results
    assert result.finish_reason is FinishReason.CLOSED
    assert result.text == expected("a", 3)


async def test_a_generation_is_used_once():
    """
    It cannot be started again, and its end stays its end.
    """
    async with fake_engine() as engine:
        generation = engine.generate("a", SamplingParams(max_tokens=1))
        with pytest.raises(RuntimeError, match="not ended"):
            _ = generation.result
        async with generation:
            assert [delta async for delta in generation]
            with pytest.raises(WrongUse, match="read to its end"):
                assert [delta async for delta in generation] == []
        with pytest.raises(WrongUse, match="once"):
            async with generation:
                pass


async def test_stats_count_what_happened():
    """
    Totals add up once everything has ended.
    """
    async with fake_engine() as engine:
        await engine.complete_many(["a"] * 5, SamplingParams(max_tokens=3))
        await engine.aclose()
        stats = engine.stats()

    assert (stats.running, stats.waiting, stats.n_cells_used) == (0, 0, 0)
    assert stats.submitted == 5
    assert stats.finished["length"] == 5
    assert stats.output_tokens == 15
    assert (stats.n_slots, stats.n_cells) == (4, 512)
