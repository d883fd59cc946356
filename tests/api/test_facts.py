"""What an engine tells of itself, and tokens of texts."""

import dataclasses
import json

import anyio
import pytest

from pyllama_raw import (
    AsyncEngine,
    EngineConfig,
    ModelConfig,
    SamplingParams,
    SchedulerConfig,
)
from pyllama_raw.errors import ClosedError, EngineStopped, InvalidRequest
from pyllama_raw.lab.sim import CostModel
from pyllama_raw.results import SpecialToken
from pyllama_raw.testing import FakeExecutor, fake_engine, fake_limits
from tests.engine.support import HANG_S, HeldSteps
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.anyio

PARAMS = SamplingParams(max_tokens=2)


async def test_an_engine_tells_that_it_was_closed():
    """
    Statistics outlive the engine and say in which state it is.
    """
    engine = fake_engine()
    await engine.complete("a", PARAMS)
    before = (engine.alive, engine.stats().state)
    await engine.aclose()
    stats = engine.stats()

    assert before == (True, "ready")
    assert (engine.alive, engine.error, stats.state) == (False, None, "closed")
    assert (stats.submitted, stats.output_tokens) == (1, 2)
    assert engine.info.model_path == "fake.gguf"


async def test_a_simulation_takes_what_an_engine_has_learned():
    """
    The formula of its steps is an object with its methods, and none before the first step.
    """
    engine = fake_engine()
    before = engine.stats().step_cost
    await engine.complete("a", PARAMS)
    cost = engine.stats().step_cost
    await engine.aclose()

    assert before is None
    assert cost.seconds(8, 1) > 0
    assert CostModel.of(cost).decode_token == cost.wide_row_s + cost.output_s


async def test_an_engine_tells_that_it_is_closing():
    """
    While aclose(drain_s) waits for what runs, no request is taken.
    """
    steps = HeldSteps()
    engine = fake_engine(FakeExecutor(fake_limits(), on_step=steps))
    with anyio.fail_after(HANG_S):
        async with engine.generate("a", PARAMS), anyio.create_task_group() as group:
            await anyio.to_thread.run_sync(steps.wait_for_one)
            group.start_soon(engine.aclose, HANG_S)
            await anyio.wait_all_tasks_blocked()
            state = engine.stats().state
            steps.allow(10)

    assert (state, engine.stats().state) == ("closing", "closed")


async def test_an_engine_tells_what_has_ended_it():
    """
    An exception of the engine's own thread is the error of the engine.
    """
    cause = RuntimeError("as told")

    def fail(step, plan):
        raise cause

    engine = fake_engine(FakeExecutor(fake_limits(), on_step=fail))
    with pytest.raises(EngineStopped):
        await engine.complete("a", PARAMS)

    assert (engine.alive, engine.error, engine.stats().state) == (
        False,
        cause,
        "error",
    )
    await engine.aclose()
    assert engine.stats().state == "error"


async def test_statistics_are_json():
    """
    asdict() makes JSON of what an engine counts.
    """
    async with fake_engine() as engine:
        await engine.complete("a", PARAMS)
        values = [engine.stats(), await engine.cache_stats()]
    texts = [json.dumps(dataclasses.asdict(value)) for value in values]

    assert [json.loads(text) for text in texts] == [
        dataclasses.asdict(v) for v in values
    ]


async def test_texts_become_tokens_and_tokens_texts():
    """
    tokenize() gives what a prompt becomes; control tokens are written if asked for.
    """
    async with fake_engine() as engine:
        ids = await engine.tokenize("hé</s>")
        texts = [
            await engine.detokenize(ids),
            await engine.detokenize(ids, special=True),
        ]
        n_tokens = await engine.count("hé</s>")
        broken = await engine.detokenize([0xC3])

    assert ids == [256, *"hé".encode(), 257]
    assert texts == ["hé", "<s>hé</s>"]
    assert (n_tokens, broken) == (len(ids), "\ufffd")


async def test_a_text_is_tokenized_as_the_caller_says():
    """
    Tokens that begin a prompt may be left out, and spelled control tokens be text.
    """
    async with fake_engine() as engine:
        found = [
            await engine.tokenize("a<s>", add_special=add, parse_special=parse)
            for add in (True, False)
            for parse in (True, False)
        ]
        nothing = await engine.tokenize("", add_special=False)

    text = [*b"a<s>"]
    assert found == [[256, 97, 256], [256, *text], [97, 256], text]
    assert nothing == []


async def test_messages_are_tokenized_as_the_model_gets_them():
    """
    tokenize() gives what count() counts; options of texts are refused with a chat.
    """
    chat = [{"role": "user", "content": "hi</s>"}]
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    async with fake_engine(chat_template=template) as engine:
        ids, n_tokens = await engine.tokenize(chat), await engine.count(chat)
        with pytest.raises(InvalidRequest, match="a text without chat options"):
            await engine.tokenize(chat, add_special=False)

    assert ids == [256, *b"[user]hi</s>"]
    assert n_tokens == len(ids)


async def test_pieces_are_the_bytes_of_tokens():
    """
    A piece may be a part of a character; control tokens have names, if asked for.
    """
    ids = [256, *"é".encode()]
    async with fake_engine() as engine:
        named = await engine.pieces(ids)
        plain = await engine.pieces(ids, special=False)
        with pytest.raises(InvalidRequest, match="token ids from 0 to 257"):
            await engine.pieces([258])

    assert named == [b"<s>", b"\xc3", b"\xa9"]
    assert plain == [b"", b"\xc3", b"\xa9"]


@pytest.mark.parametrize("ids", ["text", [258], [-1], [None], 7, [2**40], range(2**30)])
async def test_only_token_ids_are_detokenized(ids):
    """
    What no token has as its id is refused.
    """
    async with fake_engine() as engine:
        with pytest.raises(InvalidRequest, match=r"^token_ids"):
            await engine.detokenize(ids)


async def test_a_closed_engine_has_no_vocabulary():
    """
    What needs the model says that the engine is closed.
    """
    engine = fake_engine()
    await engine.aclose()
    for call in (
        engine.tokenize("a"),
        engine.tokenize("a", add_special=False),
        engine.detokenize([1]),
        engine.pieces([1]),
        engine.count("a"),
    ):
        with pytest.raises(ClosedError):
            await call


@pytest.mark.native
async def test_info_tells_what_options_came_to():
    """
    Limits are those that hold, not those asked for; the file tells the rest.
    """
    path = tiny_model("llama")
    config = EngineConfig(scheduler=SchedulerConfig(n_slots=2))
    async with AsyncEngine.open(path, config) as engine:
        info = engine.info

    assert (info.model_path, info.n_slots, info.config) == (str(path), 2, config)
    assert info.n_ctx_slot == engine.n_ctx_slot
    assert info.metadata["general.architecture"] == "llama"
    assert set(info.versions) == {"pyllama_raw", "llama_cpp"}
    assert info.n_threads >= 1
    assert info.devices
    assert info.description.startswith("llama")
    assert info.n_params > 0
    assert info.model_bytes > 0


@pytest.mark.native
async def test_info_tells_the_tokens_of_a_vocabulary():
    """
    Its size, those that begin and end a text, and those for a gap in one.
    """
    path = tiny_model("llama")
    keys = {
        "tokenizer.ggml.fim_pre_token_id": 5,
        "tokenizer.ggml.fim_suf_token_id": 6,
    }
    config = EngineConfig(model=ModelConfig(kv_overrides=keys))
    async with AsyncEngine.open(path) as engine:
        plain, n_vocab = engine.info.vocab, engine.capabilities.model.n_vocab
    async with AsyncEngine.open(path, config) as engine:
        vocab = engine.info.vocab
        texts = [piece.decode() for piece in await engine.pieces([5, 6])]

    assert plain.n_tokens == n_vocab
    assert plain.eos is not None
    assert plain.eos.text == "<|endoftext|>"
    assert plain.fill == {}
    assert vocab.fill == {
        "prefix": SpecialToken(5, texts[0]),
        "suffix": SpecialToken(6, texts[1]),
    }
