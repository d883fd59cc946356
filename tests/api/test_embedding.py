"""Texts become vectors, on tiny models of every kind that makes some."""

from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from pyllama_raw import (
    AsyncEngine,
    ClosedError,
    ConfigError,
    ContextConfig,
    EmbeddingConfig,
    EmbeddingFailed,
    EngineConfig,
    InvalidRequest,
    Model,
    SamplingParams,
    TextTooLong,
    Unsupported,
)
from pyllama_raw.embedding import Shape, _rows
from scripts.mutations.gguf_file import read
from tests.native.support import run_python
from tests.tiny import tiny_model

pytestmark = [pytest.mark.anyio, pytest.mark.native]

TEXTS = [
    "hello world",
    "a",
    "the quick brown fox jumps over the lazy dog, twice: " * 2,
    "to be or not to be",
    *(f"text number {i} of many " + "and so on " * (i % 7) for i in range(60)),
]
POOLED = ["bert", "bert-cls", "nomic-bert-moe", "qwen3-embedding"]

OTHER_ENCODERS = [
    "jina-bert-v3",
    "llama-embed",
    "nomic-bert",
    "jina-bert-v2",
    "modern-bert",
    "neo-bert",
    "eurobert",
    "gemma-embedding",
    "t5encoder",
]


def config(**fields: Any) -> EngineConfig:
    return EngineConfig(context=ContextConfig(n_threads=1), **fields)


def open_engine(name: str, **fields: Any):
    return AsyncEngine.open(tiny_model(name), config(**fields))


@pytest.mark.parametrize("name", [*POOLED, *OTHER_ENCODERS[:7]])
async def test_a_vector_does_not_depend_on_its_pack(name):
    """
    Texts that are embedded together get the vectors that they get alone.
    """
    async with open_engine(name) as engine:
        await engine.embed(TEXTS)  # from here on steps are as large as they become
        together = await engine.embed(TEXTS)
        alone = [(await engine.embed([text]))[0] for text in TEXTS]

    assert together.shape == (len(TEXTS), 64)
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-6)


async def test_each_text_has_a_vector_of_its_own():
    """
    A vector says more of its text than of the model: no two are alike.
    """
    async with open_engine("bert") as engine:
        vectors = await engine.embed(TEXTS[:4])

    alike = vectors @ vectors.T - np.eye(4)
    assert alike.max() < 0.99


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
    np.testing.assert_allclose(first, [rows[0] for rows in tokens], atol=1e-5)
    np.testing.assert_allclose(last, [rows[-1] for rows in tokens], atol=1e-5)
    np.testing.assert_allclose(mean, [rows.mean(0) for rows in tokens], atol=1e-5)


async def test_a_vector_is_cut_before_it_is_normalised():
    """
    The first dimensions have the length 1, and the direction that they had.
    """
    async with open_engine("bert") as engine:
        whole = await engine.embed(TEXTS[:4], normalize=False)
        cut = await engine.embed(TEXTS[:4], 8)
        plain = await engine.embed(TEXTS[:4], 8, normalize=False)

    lengths = np.linalg.norm(whole[:, :8], axis=1, keepdims=True)
    np.testing.assert_allclose(cut, whole[:, :8] / lengths, atol=1e-6)
    np.testing.assert_allclose(plain, whole[:, :8], atol=1e-6)


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
    values = np.array(vector, np.float32).tobytes()

    rows = _rows(values, Shape(2, None, normalize))

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


async def test_a_text_in_parts_has_the_same_vector():
    """
    The last token of a causal model sees all tokens before it, however they were computed.
    """
    texts = ["Z and so on, " * 30, "short"]
    async with open_engine("qwen3-embedding") as engine:
        whole = await engine.embed(texts)
    small = EmbeddingConfig(max_step_tokens=64)
    async with open_engine("qwen3-embedding", embedding=small) as engine:
        parts = await engine.embed(texts)

    np.testing.assert_allclose(parts, whole, atol=1e-5)


async def test_what_must_be_computed_at_once_has_to_fit_a_step():
    """
    The budget of a step limits the texts of an encoder; the error says what to raise.
    """
    small = EmbeddingConfig(max_step_tokens=64)
    async with open_engine("bert", embedding=small) as engine:
        with pytest.raises(
            TextTooLong, match="raise max_step_tokens and max_step_bytes"
        ):
            await engine.embed(["Z" * 65])
    bytes_of_ten = EmbeddingConfig(max_step_bytes=10 * 4 * 320)
    async with open_engine("bert", embedding=bytes_of_ten) as engine:
        with pytest.raises(TextTooLong, match="at most 10 go"):
            await engine.embed(["Z" * 11])
        assert (await engine.embed(["Z" * 9])).shape == (1, 64)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"texts": []}, "at least one"),
        ({"texts": "abc"}, "a list of texts"),
        ({"texts": 5}, "a list of texts"),
        ({"texts": ["a", ""]}, r"texts\[1\]='' is not allowed"),
        ({"texts": ["a", 7]}, r"texts\[1\]=7 is not allowed"),
        ({"texts": ["\ud800"]}, r"texts\[0\]=.* without lone surrogates"),
        ({"texts": ["a"], "dimensions": 65}, "from 1 to 64"),
        ({"texts": ["a"], "dimensions": 0}, "from 1 to 64"),
        ({"texts": ["a"], "dimensions": True}, "from 1 to 64"),
        ({"texts": ["a"], "pooling": "max"}, "'mean', 'cls', 'last', or None"),
        ({"texts": ["a"], "pooling": "none"}, r"embed_tokens\(\) gives a vector"),
        ({"texts": ["a"], "pooling": []}, "'mean', 'cls', 'last', or None"),
        ({"texts": ["a"], "deadline_s": -1}, "seconds above 0"),
    ],
)
async def test_wrong_arguments_are_refused(arguments, words):
    """
    The error names the argument, and the engine goes on.
    """
    async with open_engine("bert") as engine:
        with pytest.raises(InvalidRequest, match=words):
            await engine.embed(**arguments)
        assert (await engine.embed(["a"])).shape == (1, 64)


async def test_an_option_of_another_request_is_a_type_error():
    """
    Nothing is cached, so there is no salt.
    """
    async with open_engine("bert") as engine:
        with pytest.raises(
            TypeError, match="'cache_salt' is no option of an embedding"
        ):
            await engine.embed(["a"], cache_salt="x")


@pytest.mark.parametrize("name", ["bert-unpooled", "llama"])
async def test_a_model_without_pooling_has_to_be_told_one(name):
    """
    Nobody knows which one its vectors are good for.
    """
    async with open_engine(name) as engine:
        with pytest.raises(Unsupported, match="states no pooling") as caught:
            await engine.embed(["a"])
        assert caught.value.operation == "embed"
        assert len(await engine.embed(["a"], pooling="mean")) == 1


async def test_an_encoder_generates_nothing():
    """
    generate() and score() are refused at once; nothing was queued.
    """
    async with open_engine("bert") as engine:
        with pytest.raises(Unsupported, match="generate: 'bert' is an encoder"):
            engine.generate("a")
        with pytest.raises(Unsupported, match="generate: 'bert' is an encoder"):
            await engine.score("a b")
        assert engine.stats().submitted == 0


async def test_a_recurrent_model_makes_no_vectors():
    """
    It generates all the same.
    """
    greedy = SamplingParams(max_tokens=3, temperature=0)
    async with open_engine("mamba") as engine:
        with pytest.raises(Unsupported, match="recurrent"):
            await engine.embed(["a"], pooling="last")
        assert (await engine.complete("a", greedy)).usage.completion_tokens == 3


async def test_one_engine_generates_and_embeds():
    """
    What is generated beside 300 texts is what is generated alone.
    """
    greedy = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    async with open_engine("qwen3-embedding") as engine:
        alone = await engine.complete("hello", greedy)
        vectors = await engine.embed(["hello"])
        results: dict[str, Any] = {}

        async def embed() -> None:
            results["vectors"] = await engine.embed(["hello"] * 300)

        async with anyio.create_task_group() as group:
            group.start_soon(embed)
            beside = await engine.complete("hello", greedy)

    assert beside.token_ids == alone.token_ids
    np.testing.assert_allclose(
        results["vectors"], np.repeat(vectors, 300, 0), atol=1e-6
    )


async def test_calls_with_other_poolings_run_side_by_side():
    """
    Each has its own vectors, whoever shares the engine.
    """
    async with open_engine("bert") as engine:
        expected = {p: await engine.embed(TEXTS, pooling=p) for p in ("mean", "cls")}
        found: dict[str, list[Any]] = {"mean": [], "cls": []}

        async def embed(pooling: Any) -> None:
            found[pooling].append(await engine.embed(TEXTS, pooling=pooling))

        async with anyio.create_task_group() as group:
            for pooling in ["mean", "cls"] * 4:
                group.start_soon(embed, pooling)

    for pooling, arrays in found.items():
        assert len(arrays) == 4
        for array in arrays:
            np.testing.assert_allclose(array, expected[pooling], atol=1e-6)


async def test_progress_is_told():
    """
    The numbers rise, and the last one is that of the texts.
    """
    told: list[int] = []
    async with open_engine("bert") as engine:
        await engine.embed(TEXTS, progress=told.append)

    assert told == sorted(told)
    assert told[-1] == len(TEXTS)


async def test_a_call_that_is_cancelled_leaves_nothing():
    """
    Its request ends, and the engine goes on.
    """
    async with open_engine("bert") as engine:
        with anyio.CancelScope() as scope:
            await engine.embed(TEXTS * 50, progress=lambda _: scope.cancel())
        await engine.embed(["a"])
        stats = engine.stats()

    assert scope.cancelled_caught
    assert (stats.running, stats.waiting) == (0, 0)


async def test_closing_ends_what_runs():
    """
    The call that waits is told, as every later one.
    """
    engine = await open_engine("bert")
    told = anyio.Event()

    async def embed() -> None:
        with pytest.raises(ClosedError):
            await engine.embed(TEXTS * 100, progress=lambda _: told.set())

    async with anyio.create_task_group() as group:
        group.start_soon(embed)
        await told.wait()
        await engine.aclose()
    with pytest.raises(ClosedError):
        await engine.embed(["a"])


async def test_engines_share_the_weights_of_an_encoder():
    """
    A Model serves several engines, and outlives none of them too early.
    """
    async with Model.open(tiny_model("bert")) as model:
        async with (
            AsyncEngine.open(model, config()) as one,
            AsyncEngine.open(model, config()) as other,
        ):
            vectors = [await engine.embed(TEXTS[:3]) for engine in (one, other)]

    np.testing.assert_allclose(*vectors, atol=1e-6)


@pytest.mark.parametrize("name", ["bert", "qwen3-embedding"])
async def test_what_is_no_number_fails_its_own_text(name, tmp_path: Path):
    """
    The call is told which text it is; those of others have their vectors.
    """
    path = tmp_path / "model.gguf"
    path.write_bytes(with_nan(tiny_model(name), token=ord("Z")))
    found: list[Any] = []
    async with AsyncEngine.open(path, config()) as engine:

        async def embed() -> None:
            found.append(await engine.embed(TEXTS))

        async with anyio.create_task_group() as group:
            group.start_soon(embed)
            with pytest.raises(EmbeddingFailed) as caught:
                await engine.embed(["a", "b", "Zed", "c"])

    assert caught.value.index == 2
    assert np.isfinite(found[0]).all()


def with_nan(path: Path, token: int) -> bytes:
    """The model with the vector of *token* at its entrance made of what is no number."""
    file = read(path)
    table = next(
        tensor for tensor in file.tensors if tensor.name == b"token_embd.weight"
    )
    rows = np.frombuffer(table.data, np.float32).reshape(-1, table.dims[0]).copy()
    rows[token] = np.nan
    table.data = rows.tobytes()
    return file.encode()


ANY = ["ok", "TextTooLong", "TextTooLong"]
ENDS = {"gemma-embedding": ["DecodeFailed"] * 3}  # with two layers, both with a window
CODE = """
import anyio, sys
from pyllama_raw import AsyncEngine, ContextConfig, EmbeddingConfig, EngineConfig
from pyllama_raw import SamplingParams
from tests.tiny import tiny_model

async def try_one(name, call, **fields):
    config = EngineConfig(context=ContextConfig(n_threads=1), **fields)
    try:
        async with AsyncEngine.open(tiny_model(name), config) as engine:
            await call(engine)
            print(name, "ok")
    except Exception as error:
        print(name, type(error).__name__)

def embed(*texts, **arguments):
    return lambda engine: engine.embed(list(texts), **arguments)

async def main():
    small = EmbeddingConfig(max_step_tokens=64)
    long = "Z" * 3000
    await try_one("bert", embed(long))
    await try_one("bert", embed("Z" * 65), embedding=small)
    await try_one("bert", lambda engine: engine.complete("a"))
    await try_one("bert-unpooled", embed("a"))
    await try_one("bert-rank", embed("a"))
    await try_one("bert-rank", embed("a", pooling="rank"))
    await try_one("nomic-bert-moe", embed(long))
    await try_one("qwen3-embedding", embed(long))
    await try_one("qwen3-embedding", embed("Z" * 65, pooling="mean"), embedding=small)
    await try_one("qwen3-embedding", embed("Z" * 65), embedding=small)
    await try_one("llama", embed("a", pooling="cls"))
    for name in sys.argv[1:]:
        await try_one(name, embed("a", "hello world", "b " * 90))
        await try_one(name, embed(long))
        await try_one(name, embed("Z" * 65), embedding=small)
    await try_one("t5", embed("a"))
    await try_one("llada", embed("a"))
    await try_one("mamba", embed("a", pooling="mean"))
    await try_one("jamba", embed("a", pooling="last"))
    await try_one("gemma3", embed("Z" * 300, pooling="mean"))
    await try_one("qwen2vl", embed("Z" * 300, pooling="last"))
    await try_one("llama-no-vocab", embed("a", pooling="last"))

anyio.run(main)
"""


def test_nothing_that_can_be_asked_ends_the_process():
    """
    What libllama would abort on is an error of this package, and the process goes on.
    """
    done = run_python(CODE, *OTHER_ENCODERS)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "bert TextTooLong",
        "bert TextTooLong",
        "bert Unsupported",
        "bert-unpooled Unsupported",
        "bert-rank Unsupported",
        "bert-rank InvalidRequest",
        "nomic-bert-moe TextTooLong",
        "qwen3-embedding TextTooLong",
        "qwen3-embedding TextTooLong",
        "qwen3-embedding ok",
        "llama ok",
        *(f"{name} {end}" for name in OTHER_ENCODERS for end in ENDS.get(name, ANY)),
        "t5 Unsupported",
        "llada Unsupported",
        "mamba Unsupported",
        "jamba Unsupported",
        "gemma3 ok",
        "qwen2vl ok",
        "llama-no-vocab Unsupported",
    ]


@pytest.mark.parametrize(("name", "needs"), [("bert", "generate"), ("llama", "rank")])
async def test_what_a_caller_needs_is_asked_before_weights_are_read(name, needs):
    """
    A model that cannot do it is refused by its header; an unknown need is a mistake.
    """
    with pytest.raises(Unsupported) as caught:
        await AsyncEngine.open(tiny_model(name), config(), needs=needs)

    assert caught.value.operation == needs
    with pytest.raises(ConfigError, match="needs='sing': give one of 'generate'"):
        await AsyncEngine.open(tiny_model(name), config(), needs="sing")  # type: ignore[arg-type]


async def test_an_engine_that_is_dropped_ends_its_embedder():
    """
    The thread that made vectors ends with the one that generates.
    """
    held = [await open_engine("qwen3-embedding")]
    await held[0].embed(["a"])
    embedder = await held[0]._embedders.get()

    with pytest.warns(ResourceWarning, match="dropped before aclose"):
        held.clear()

    assert embedder.thread.join(30)


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
