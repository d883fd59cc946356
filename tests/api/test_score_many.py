"""Many continuations of one prompt, with a fake executor below a real scheduler."""

import math

import anyio
import pytest

from pyllama_raw import CacheConfig, SamplingParams
from pyllama_raw.api.batches import label_scores
from pyllama_raw.api.results import Likelihood, Usage
from pyllama_raw.core.memory.snapshots import SnapshotKind
from pyllama_raw.core.request import TokenLogprobs
from pyllama_raw.engine.build import make_cache
from pyllama_raw.errors import (
    DeadlineExceeded,
    InvalidRequest,
    PromptTooLong,
    TextTooLong,
)
from pyllama_raw.testing import (
    BOS,
    FakeExecutor,
    FakeVocab,
    fake_engine,
    fake_limits,
    fake_logprobs,
)
from tests.engine.support import HANG_S, HeldSteps
from tests.serve.support import TEMPLATE
from tests.support.loops import anyio_backend  # noqa: F401

pytestmark = pytest.mark.anyio

PROMPT = "The capital of France is"


def said(n_before: int, text: str, n_top: int = 0):
    """The entries of the fake executor for *text* behind *n_before* tokens."""
    vocab, entries = FakeVocab(), []
    for index, token in enumerate(text.encode(), n_before):
        entry = fake_logprobs(index, token, n_top)
        pieces = tuple(vocab.piece(t, special=True) for t, _ in entry.top)
        entries.append(entry._replace(piece=bytes([token]), top_pieces=pieces))
    return tuple(entries)


def caching_engine(executor=None, **options):
    cache = make_cache(CacheConfig(mode="live"), SnapshotKind.RANGE)
    return fake_engine(executor, cache=cache, **options)


async def test_each_continuation_has_its_scores_in_order():
    """
    A likelihood has the tokens of its continuation alone, after the whole prompt.
    """
    texts = [" Paris", " Rome", " a city in the north"]
    async with caching_engine() as engine:
        likelihoods = await engine.score_many(PROMPT, texts, n_top=1)
        alone = [await engine.score(PROMPT + text, n_top=1) for text in texts]

    n_prompt = 1 + len(PROMPT)
    for text, likelihood, score in zip(texts, likelihoods, alone, strict=True):
        assert likelihood.token_ids == tuple(text.encode())
        assert likelihood.logprobs == said(n_prompt, text, 1)
        assert likelihood.logprobs == score.logprobs[n_prompt - 1 :]
        assert likelihood.usage.prompt_tokens == n_prompt + len(text)
        assert likelihood.usage.completion_tokens == 0
        assert likelihood.per_token == likelihood.total / len(text)
        assert likelihood.is_greedy


async def test_the_prompt_is_computed_once():
    """
    More continuations than slots: each but the first takes all but the last of its tokens over.
    """
    texts = [3 * chr(65 + number) for number in range(20)]
    async with caching_engine() as engine:
        likelihoods = await engine.score_many(PROMPT, texts)
        stats = engine.stats()

    n_prompt = 1 + len(PROMPT)
    cached = [likelihood.usage.cached_tokens for likelihood in likelihoods]
    assert cached == [0, *[n_prompt - 1] * 19]
    assert stats.computed_tokens == n_prompt + 3 + 19 * (1 + 3)


async def test_token_ids_and_chats_go_on_as_they_are():
    """
    Ids stand behind the prompt unchanged; a text behind a chat is plain text.
    """
    chat = [{"role": "user", "content": "Yes or no?"}]
    async with caching_engine(chat_template=TEMPLATE) as engine:
        prompt = await engine.tokenize(chat)
        of_ids = await engine.score_many([BOS, 65], [[66, 67], "CD"])
        of_chat = await engine.score_many(chat, ["yes", "</s>"])

    assert [item.token_ids for item in of_ids] == [(66, 67), (67, 68)]
    assert [item.logprobs for item in of_ids] == [said(2, "BC"), said(2, "CD")]
    assert of_chat[0].logprobs == said(len(prompt), "yes")
    assert of_chat[1].token_ids == tuple(b"</s>")


async def test_labels_are_sorted_and_their_probabilities_sum_up_to_one():
    """
    The fake model finds shorter labels likelier by the total, and longer ones by none of the means.
    """
    labels = [" positive", " bad", " no"]
    async with caching_engine() as engine:
        by_total = await engine.classify("Good film. It is", labels)
        by_token = await engine.classify("Good film. It is", labels, "per_token")
        by_byte = await engine.classify("Good film. It is", labels, measure="per_byte")

    totals = {item.label: item.likelihood.total for item in by_total}
    weights = [math.exp(totals[label]) for label in (" no", " bad", " positive")]
    assert [item.label for item in by_total] == [" no", " bad", " positive"]
    assert [item.index for item in by_total] == [2, 1, 0]
    assert [item.probability for item in by_total] == pytest.approx(
        [weight / sum(weights) for weight in weights]
    )
    for items in (by_total, by_token, by_byte):
        assert sum(item.probability for item in items) == pytest.approx(1)
    assert [item.probability for item in by_token] == pytest.approx(
        [item.probability for item in by_byte]
    )


def test_labels_that_cannot_come_at_all_are_equally_likely():
    """
    Their probabilities are numbers and sum up to 1; beside one that can come they have none.
    """
    usage = Usage(prompt_tokens=1, completion_tokens=0, cached_tokens=0)
    never = Likelihood((1,), (TokenLogprobs(1, -math.inf, ()),), usage)
    rarely = Likelihood((2,), (TokenLogprobs(2, -900.0, ()),), usage)
    alone = label_scores(["a", "b"], [never, never], "total")
    beside = label_scores(["a", "b"], [never, rarely], "per_token")

    assert [score.probability for score in alone] == [0.5, 0.5]
    assert [score.probability for score in beside] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("continuations", "error", "message"),
    [
        ([], InvalidRequest, r"continuations=\[\]"),
        ("Paris", InvalidRequest, "continuations="),
        (["a", ""], InvalidRequest, r"continuations\[1\]"),
        (["a", []], InvalidRequest, r"continuations\[1\]"),
        ([[1], [10**6]], InvalidRequest, r"continuations\[1\]=1000000"),
        (["a", "b" * 120], TextTooLong, r"continuations\[1\] has 14\d tokens"),
        (
            ["a", "b" * 500],
            TextTooLong,
            r"continuations\[1\] has .* at most 127 .* or raise n_ctx",
        ),
        (
            ["a", [1] * 500],
            TextTooLong,
            r"continuations\[1\] has 525 .* at most 127 .* or raise n_ctx",
        ),
        (["a"] * 40, InvalidRequest, "max_waiting"),
    ],
)
async def test_what_cannot_be_scored_is_refused_by_name(continuations, error, message):
    """
    An error says which continuation it is about, what was given, and what is allowed.
    """
    async with fake_engine(max_waiting=30) as engine:
        with pytest.raises(error, match=message):
            await engine.score_many(PROMPT, continuations)
        again = await engine.score_many(PROMPT, ["a"])

    assert again[0].logprobs == said(1 + len(PROMPT), "a")


async def test_too_many_continuations_are_refused_before_all_are_read():
    """
    A list of any length costs no more than the prompt and the first of them.
    """
    labels = ["a"] * 100_000 + ["b" * 120]  # the last one fits no slot
    async with fake_engine(max_waiting=30) as engine:
        with pytest.raises(InvalidRequest, match=r"labels=100001 .* at most 34"):
            await engine.classify(PROMPT, labels)


async def test_labels_and_prompts_are_named_in_errors():
    """
    A label is no continuation to its caller, and a prompt that is too long is the prompt's fault.
    """
    async with fake_engine() as engine:
        with pytest.raises(TextTooLong, match=r"labels\[1\] has"):
            await engine.classify(PROMPT, ["a", "b" * 120])
        with pytest.raises(InvalidRequest, match="labels"):
            await engine.classify(PROMPT, [])
        with pytest.raises(InvalidRequest, match="one of total, per_token, per_byte"):
            await engine.classify(PROMPT, ["a"], "tokens")
        with pytest.raises(PromptTooLong):
            await engine.score_many("a" * 200, ["b"])
        with pytest.raises(InvalidRequest, match="n_top"):
            await engine.score_many(PROMPT, ["b"], n_top=21)


async def test_leaving_ends_all_of_them():
    """
    A caller that is cancelled leaves nothing behind that runs or waits.
    """
    steps = HeldSteps()
    executor = FakeExecutor(fake_limits(), on_step=steps)
    async with caching_engine(executor) as engine:
        async with anyio.create_task_group() as group:
            group.start_soon(engine.score_many, PROMPT, ["a"] * 12)
            with anyio.fail_after(HANG_S):
                await anyio.to_thread.run_sync(steps.wait_for_one)
            group.cancel_scope.cancel()
        steps.allow(100)
        with anyio.fail_after(HANG_S):
            await engine.complete("b", SamplingParams(max_tokens=1))
        stats = engine.stats()

    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.finished["cancelled"] == 12


async def test_a_deadline_ends_all_of_them():
    """
    Scores that are not there in time are no answer: the error counts those that are.
    """
    async with fake_engine() as engine:
        with pytest.raises(DeadlineExceeded, match="0 of 2 continuations"):
            await engine.score_many(PROMPT, ["a", "b"], deadline_s=1e-9)


async def test_a_salt_keeps_prompts_apart():
    """
    Callers with another salt share neither tokens nor scores.
    """
    async with caching_engine() as engine:
        cached = [
            (await engine.score_many(PROMPT, ["a"], cache_salt=salt))[0].usage
            for salt in ("one", "two", "one")
        ]

    assert [usage.cached_tokens for usage in cached] == [0, 0, len(PROMPT)]
