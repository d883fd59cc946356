"""Texts become vectors, on tiny models of every kind that makes some."""

from typing import Any

import anyio
import numpy as np
import pytest

from pyllama_raw import (
    AsyncEngine,
    ContextConfig,
    EmbeddingConfig,
    EngineConfig,
    SchedulerConfig,
)
from pyllama_raw.api.vectors import vectors_of
from pyllama_raw.errors import DeadlineExceeded, InvalidRequest, TextTooLong
from tests.api.embedding_support import (
    OTHER_ENCODERS,
    POOLED,
    TEXTS,
    open_engine,
)
from tests.support.last_digits import assert_near
from tests.support.limits import LIMIT_S
from tests.support.tiny import tiny_model

pytestmark = [pytest.mark.anyio, pytest.mark.native]


@pytest.mark.parametrize("name", [*POOLED, *OTHER_ENCODERS[:7]])
async def test_a_vector_does_not_depend_on_its_pack(name):
    """
    Texts that are embedded together get the vectors that they get alone.
    """
    together, alone = await packed_and_alone(name)

    assert together.shape == (len(TEXTS), 64)
    assert_near(together, alone, 1e-6)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-6)


@pytest.mark.parametrize(
    "name",
    [POOLED[0], *(pytest.param(n, marks=pytest.mark.nightly) for n in POOLED[1:])],
)
async def test_without_our_kernels_a_pack_changes_last_digits_only(name):
    """
    Those of 16 bits with libllama's flash attention, those of 32 bits without it.
    """
    halves = await packed_and_alone(name, fast_kernels=False)
    floats = await packed_and_alone(name, fast_kernels=False, flash_attn="off")

    assert_near(*halves, 0, fast_kernels=False)
    np.testing.assert_allclose(*floats, rtol=0, atol=1e-4)


async def packed_and_alone(name: str, **fields: Any) -> tuple[np.ndarray, np.ndarray]:
    """The vectors of TEXTS in one call, and in a call for each."""
    options = EngineConfig(
        context=ContextConfig(n_threads=1, **fields),
        scheduler=SchedulerConfig(target_step_s=LIMIT_S),  # no step is cut for its time
    )
    async with AsyncEngine.open(tiny_model(name), options) as engine:
        await engine.embed(TEXTS)  # from here on steps are as large as they become
        together = await engine.embed(TEXTS)
        alone = [(await engine.embed([text]))[0] for text in TEXTS]
    return np.asarray(together), np.asarray(alone)


async def test_each_text_has_a_vector_of_its_own():
    """
    A vector says more of its text than of the model: no two are alike.
    """
    async with open_engine("bert") as engine:
        vectors = await engine.embed(TEXTS[:4])

    alike = vectors @ vectors.T - np.eye(4)
    assert alike.max() < 0.99


async def test_control_tokens_are_for_prompts():
    """
    What a prompt spells is understood; in a text that is embedded it stays text.
    """
    async with open_engine("bert") as engine:
        n_prompt = len(await engine.tokenize("a<|endoftext|>"))
        (rows,) = await engine.embed_tokens(["a<|endoftext|>"])
        vectors = await engine.embed(["a<|endoftext|>", "a"])

    assert (n_prompt, len(rows)) == (3, 14)  # with the first token of all prompts
    assert vectors.usage.prompt_tokens == 14 + 2


async def test_token_ids_may_stand_for_a_text():
    """
    As they are; a wrong one is told with its place.
    """
    async with open_engine("bert") as engine:
        ids = await engine.tokenize(TEXTS[0], parse_special=False)
        by_text = await engine.embed([TEXTS[0], TEXTS[1]])
        by_ids = await engine.embed([ids, TEXTS[1]])
        with pytest.raises(InvalidRequest, match=r"texts\[1\]") as caught:
            await engine.embed(["a", [1, -1]])
        with pytest.raises(InvalidRequest, match=r"texts\[0\]"):
            await engine.embed([[]])

    assert_near(by_ids, by_text, 1e-5)
    assert caught.value.value == -1


@pytest.mark.parametrize("name", ["bert", "qwen3-embedding"])
async def test_poolings_are_made_of_the_vectors_of_tokens(name):
    """
    The first, the last and the mean of what "none" gives are what their poolings give.
    """
    async with open_engine(name) as engine:
        tokens = await engine.embed_tokens(TEXTS[:4], normalize=False)
        counts = [len(await engine.tokenize(text)) for text in TEXTS[:4]]
        first = await engine.embed(TEXTS[:4], normalize=False, pooling="cls")
        last = await engine.embed(TEXTS[:4], normalize=False, pooling="last")
        mean = await engine.embed(TEXTS[:4], normalize=False, pooling="mean")

    assert [rows.shape for rows in tokens] == [(n, 64) for n in counts]
    assert_near(first, [rows[0] for rows in tokens], 1e-5)
    assert_near(last, [rows[-1] for rows in tokens], 1e-5)
    assert_near(mean, [rows.mean(0) for rows in tokens], 1e-5)


async def test_a_vector_is_cut_before_it_is_normalised():
    """
    The first dimensions have the length 1, and the direction that they had.
    """
    async with open_engine("bert") as engine:
        whole = await engine.embed(TEXTS[:4], normalize=False)
        cut = await engine.embed(TEXTS[:4], 8)
        plain = await engine.embed(TEXTS[:4], 8, normalize=False)

    lengths = np.linalg.norm(whole[:, :8], axis=1, keepdims=True)
    assert_near(cut, whole[:, :8] / lengths, 1e-6)
    assert_near(plain, whole[:, :8], 1e-6)


@pytest.mark.parametrize(
    ("vector", "normalize", "expected"),
    [
        ([3, 4], True, [0.6, 0.8]),
        ([1, 0], True, [1, 0]),
        ([0, 0], True, [0, 0]),
        ([3, 4], False, [3, 4]),
    ],
)
def test_normalised_vectors_have_the_length_one(vector, normalize, expected):
    """
    A vector of zeros stays one.
    """
    rows = vectors_of(np.array([vector], np.float32), 1, normalize=normalize)

    np.testing.assert_allclose(rows, [expected], atol=1e-7)


async def test_a_text_may_be_as_long_as_the_model_allows():
    """
    2048 tokens go, of an encoder and of a decoder, in one step or in several.
    """
    vectors = []
    for name in ("bert", "qwen3-embedding"):
        async with open_engine(name) as engine:
            text = "Z" * (2048 - len(await engine.tokenize("")))
            vectors.append(await engine.embed([text]))
            with pytest.raises(TextTooLong, match="was made for no more") as caught:
                await engine.embed(["a", text + "Z"])
            assert (caught.value.name, caught.value.n_tokens) == ("texts[1]", 2049)

    assert all(np.isfinite(vector).all() for vector in vectors)


@pytest.mark.parametrize("name", ["qwen3-embedding", "llama", "gemma3"])
async def test_a_text_in_parts_has_the_same_vector(name):
    """
    A token of a causal model sees those before it, however they were computed. So the vector of
    each is the same, and so is what they are pooled to.
    """
    texts = ["Z and so on, " * 30, "short", "another one, " * 20]

    async def vectors(n_tokens):
        steps = SchedulerConfig(token_budget=n_tokens)
        async with open_engine(name, scheduler=steps) as engine:
            rows = await engine.embed_tokens(texts)
            words = ("mean", "cls", "last")
            pooled = [await engine.embed(texts, pooling=word) for word in words]
            return [*rows, *pooled], engine.stats().steps

    (whole, few), (parts, many) = await vectors(2048), await vectors(48)

    assert few == 4 < many
    for one, other in zip(parts, whole, strict=True):
        assert_near(one, other, 1e-5)


async def test_a_text_that_is_given_up_in_part_leaves_nothing_to_the_next():
    """
    Its tokens are not counted to the mean of another text.
    """
    small = EmbeddingConfig(max_step_tokens=64)
    async with open_engine("llama", embedding=small) as engine:
        alone = await engine.embed(["a text of some length, " * 9], pooling="mean")
        with anyio.move_on_after(0):
            await engine.embed(["Z" * 1500], pooling="mean")
        with pytest.raises(DeadlineExceeded):
            await engine.embed(["Z" * 1900], pooling="mean", deadline_s=1e-3)
        after = await engine.embed(["a text of some length, " * 9], pooling="mean")

    assert_near(after, alone, 1e-6)


@pytest.mark.parametrize("name", ["bert", "bert-cls", "qwen3-embedding"])
@pytest.mark.parametrize("n_tokens", [2, 63, 100, 191])
async def test_steps_of_any_size_are_computed(name, n_tokens):
    """
    Whatever the budget of a step is, a graph of that many tokens can be made.
    """
    budget = EmbeddingConfig(max_step_tokens=n_tokens)
    async with open_engine(name, embedding=budget) as engine:
        vectors = await engine.embed(["Z"] * 9)

    assert np.isfinite(vectors).all()


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("bert", {"embedding": EmbeddingConfig(max_step_tokens=32)}),
        ("llama", {"context": ContextConfig(n_threads=1, n_ctx=32)}),
    ],
)
async def test_a_text_that_is_too_long_may_lose_its_end(name, limit):
    """
    What is cut is the text of the first tokens, with the control tokens of its end.
    """
    async with AsyncEngine.open(tiny_model(name), EngineConfig(**limit)) as engine:
        long = "a b c d " * 40
        with pytest.raises(TextTooLong, match="truncate=True"):
            await engine.embed([long], pooling="mean")
        (rows,) = await engine.embed_tokens([long], truncate=True)
        vectors = await engine.embed([long, "a"], pooling="mean", truncate=True)
        alone = await engine.embed(["a"], pooling="mean")

    assert len(rows) == 32
    assert vectors.usage.prompt_tokens == 32 + alone.usage.prompt_tokens
    assert vectors.shape[0] == 2
    assert_near(vectors[1], alone[0], 1e-6)


async def test_chunks_cover_a_text_and_fit():
    """
    Without an overlap they are the text; each has as many tokens as are allowed at most.
    """
    text = "".join(f"word{i} and more. " for i in range(60))
    text += "".join(f"{i:03}" for i in range(100, 120))
    async with open_engine("bert") as engine:
        parts = await engine.chunks(text, max_tokens=20)
        counts = [(await engine.embed([part])).usage.prompt_tokens for part in parts]
        shared = await engine.chunks(text, max_tokens=20, overlap=6)

    assert "".join(parts) == text
    assert len(parts) > 10
    assert max(counts) <= 20
    assert len(shared) > len(parts)
    at = [text.index(part) for part in shared]
    ends = [start + len(part) for start, part in zip(at, shared, strict=True)]
    assert at == sorted(at)
    assert all(start < end for start, end in zip(at[1:], ends, strict=False))
    assert ends[-1] == len(text)


async def test_whoever_leaves_cuts_no_more(monkeypatch):
    """
    A long text is cut a few chunks at a time, because the workers are those of all callers.
    """
    jobs = []
    async with open_engine("bert") as engine:
        workers = engine._sessions.workers
        run = workers.run

        async def leave_in_the_second(kind, function):
            jobs.append(kind)
            if len(jobs) == 2:
                scope.cancel()
            return await run(kind, function)

        monkeypatch.setattr(workers, "run", leave_in_the_second)
        with anyio.CancelScope() as scope:
            await engine.chunks("some words of a text " * 10**4, max_tokens=20)
        monkeypatch.undo()
        with anyio.fail_after(LIMIT_S):
            await engine.aclose()

    assert jobs == ["text", "text"]
    assert scope.cancelled_caught


@pytest.mark.parametrize(
    ("arguments", "name"),
    [(("",), "text"), (("a", 1), "max_tokens"), (("a", 20, 15), "overlap")],
)
async def test_chunks_refuse_what_cannot_be(arguments, name):
    """
    An empty text, no room for a token, an overlap of more than half.
    """
    async with open_engine("bert") as engine:
        with pytest.raises(InvalidRequest) as raised:
            await engine.chunks(*arguments)

    assert raised.value.name == name
