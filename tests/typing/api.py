"""Never run: mypy reads how the public API is used and what comes out of it."""

from typing import Any, assert_type

import pyllama_raw
from pyllama_raw import (
    AsyncEngine,
    Delta,
    Engine,
    FinishReason,
    Generation,
    Model,
    ModelConfig,
    PyllamaError,
    Result,
    SamplingParams,
)
from pyllama_raw.results import (
    BlockingGeneration,
    EngineInfo,
    EngineState,
    EngineStats,
    LabelScore,
    LengthLimit,
    Likelihood,
    SamplerUse,
    Score,
    SlotStats,
    StopString,
    StopToken,
    TokenLogprobs,
    VocabInfo,
)
from pyllama_raw.tools import ToolCall, arguments_of, schema_of


async def stream() -> None:
    async with AsyncEngine.open("model.gguf") as engine:
        assert_type(engine, AsyncEngine)
        chat = [{"role": "user", "content": "hello"}]
        async with engine.generate(chat, SamplingParams(seed=1)) as generation:
            assert_type(generation, Generation)
            async for delta in generation:
                assert_type(delta, Delta)
        assert_type(generation.result, Result)
        assert_type(generation.result.finish_reason, FinishReason)
        match generation.result.finish_detail:
            case StopToken(token_id):
                assert_type(token_id, int)
            case StopString(text):
                assert_type(text, str)
            case detail:
                assert_type(detail, LengthLimit | None)
        assert_type(await engine.complete([1, 2, 3]), Result)
        called = await engine.complete(
            chat, tools=[schema_of(stream)], tool_choice="auto", reply=True
        )
        assert_type(called.tool_calls, tuple[ToolCall, ...])
        assert_type(arguments_of(called.tool_calls[0]), dict[str, Any])
        assert_type(await engine.complete_many(["a", [1], chat]), list[Result])
        either = await engine.complete_many(["a"], errors="return")
        assert_type(either, list[Result | PyllamaError])
        assert_type(
            await engine.complete_n("a", SamplingParams(n=2)), tuple[Result, ...]
        )
        assert_type(generation.results, tuple[Result, ...])
        assert_type(generation.errors, dict[int, PyllamaError])
        assert_type(generation.result.logprobs, tuple[TokenLogprobs, ...])
        assert_type(generation.result.sampler, SamplerUse | None)
        assert_type((await engine.score("a")).perplexity, float)
        assert_type(engine.stats(), EngineStats)


async def shared() -> None:
    async with Model.open("model.gguf", ModelConfig()) as model:
        assert_type(model, Model)
        async with AsyncEngine.open(model) as engine:
            assert_type(engine, AsyncEngine)
    with Model.load("model.gguf") as model, Engine.open(model) as blocking:
        assert_type(blocking, Engine)
    assert_type(await Model.open(), Model)


async def facts() -> None:
    engine = await AsyncEngine.open("model.gguf")
    assert_type(engine, AsyncEngine)
    chat = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert_type(await engine.tokenize("a"), list[int])
    assert_type(await engine.tokenize(chat, tools=tools), list[int])
    assert_type(await engine.detokenize([1, 2]), str)
    assert_type(await engine.pieces([1, 2]), list[bytes])
    assert_type(await engine.slots(), tuple[SlotStats, ...])
    assert_type(engine.info.vocab, VocabInfo)
    assert_type(await engine.count(chat, tools=tools), int)
    assert_type(await engine.render(chat, template_kwargs={"think": False}), str)
    assert_type(await engine.complete(chat, tools=tools, chat_template="x"), Result)
    assert_type(engine.alive, bool)
    assert_type(engine.error, BaseException | None)
    assert_type(engine.info.n_ctx_slot, int)
    assert_type(engine.stats().state, EngineState)
    assert_type(engine.state, EngineState)
    assert_type(await engine.score_many([1], [[2]], n_top=1), list[Likelihood])
    assert_type(await engine.classify("a", ("b",)), list[LabelScore])
    assert_type(await engine.warmup(), None)
    assert_type(await engine.sleep(2), None)
    assert_type(await engine.wake(), None)
    assert_type(await engine.reload("model.gguf", progress=print), None)
    assert_type(await engine.rebuild_session("cause"), None)


def blocking() -> None:
    with Engine.open("model.gguf") as engine:
        assert_type(engine, Engine)
        with engine.generate("a", priority=1) as generation:
            assert_type(generation, BlockingGeneration)
            for delta in generation:
                assert_type(delta, Delta)
        assert_type(generation.result, Result)
        assert_type(engine.complete("a"), Result)
        assert_type(engine.complete_many(["a", [1]]), list[Result])
        either = engine.complete_many(["a"], errors="return")
        assert_type(either, list[Result | PyllamaError])
        assert_type(engine.complete_n("a", SamplingParams(n=2)), tuple[Result, ...])
        assert_type(engine.score("a"), Score)
        assert_type(engine.score_many("a", ["b", [1]]), list[Likelihood])
        assert_type(engine.classify("a", ["b"], "per_token"), list[LabelScore])
        assert_type(engine.stats(), EngineStats)
        assert_type(engine.info, EngineInfo)
        assert_type(engine.sleep(), None)
        assert_type(engine.reload(), None)


def sync() -> None:
    assert_type(pyllama_raw.generate("a"), Result)
    assert_type(pyllama_raw.generate([1, 2]), Result)
    assert_type(pyllama_raw.generate(["a", "b"]), list[Result])
    assert_type(pyllama_raw.generate([[1], [2]]), list[Result])
    assert_type(pyllama_raw.score("a"), Score)
