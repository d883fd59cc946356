"""What makes no vector: wrong arguments, models that cannot, numbers that are none."""

from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from pyllama_raw import AsyncEngine, ConfigError, EmbeddingConfig, SamplingParams
from pyllama_raw.errors import EmbeddingFailed, InvalidRequest, TextTooLong, Unsupported
from tests.api.embedding_support import (
    OTHER_ENCODERS,
    TEXTS,
    config,
    open_engine,
    with_nan,
)
from tests.native.support import run_python
from tests.support.hostile import (
    AngryText,
    UncountableList,
    Unreadable,
    UnreadableList,
)
from tests.support.tiny import tiny_model

pytestmark = [pytest.mark.anyio, pytest.mark.native]


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
        with pytest.raises(TextTooLong, match="at most 10 are allowed"):
            await engine.embed(["Z" * 11])
        assert (await engine.embed(["Z" * 9])).shape == (1, 64)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"texts": []}, "at least 1 item"),
        ({"texts": "abc"}, "a list"),
        ({"texts": 5}, "a list"),
        ({"texts": ["a", ""]}, r"texts\[1\]='' is not allowed"),
        ({"texts": ["a", 7]}, r"texts\[1\]=7 is not allowed"),
        ({"texts": ["\ud800"]}, r"texts\[0\]=.* unicode"),
        ({"texts": ["a", UnreadableList([1])]}, r"texts\[1\]=.* text or token ids"),
        ({"texts": [UncountableList([1])]}, "texts or token ids"),
        ({"texts": ["a"], "dimensions": 65}, "at most 64"),
        ({"texts": ["a"], "dimensions": 0}, "at least 1"),
        ({"texts": ["a"], "dimensions": True}, "a whole number"),
        ({"texts": ["a"], "pooling": "max"}, "'mean', 'cls', 'last', or None"),
        ({"texts": ["a"], "pooling": "none"}, r"embed_tokens\(\) gives a vector"),
        ({"texts": ["a"], "pooling": []}, "'mean', 'cls', 'last', or None"),
        ({"texts": ["a"], "deadline_s": -1}, "more than 0"),
        ({"texts": ["a"], "pooling": AngryText("max")}, "'mean', 'cls', 'last', or"),
        (
            {"texts": ["a"], "normalize": Unreadable()},
            "normalize=.* give True or False",
        ),
        ({"texts": ["a"], "progress": 5}, "progress=5 .* give a function, or None"),
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


async def test_texts_of_other_classes_are_texts():
    """
    What their classes override is never asked.
    """
    async with open_engine("bert") as engine:
        plain = await engine.embed(["a"])
        angry = await engine.embed([AngryText("a")], pooling=AngryText("mean"))

    assert np.array_equal(angry, plain)


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


ANY = ["ok", "TextTooLong", "TextTooLong"]
ENDS = {"gemma-embedding": ["DecodeFailed"] * 3}  # with two layers, both with a window
CODE = """
import anyio, sys
from pyllama_raw import AsyncEngine, ContextConfig, EmbeddingConfig, EngineConfig
from pyllama_raw import SamplingParams
from tests.support.tiny import tiny_model

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
        "qwen3-embedding ok",
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
