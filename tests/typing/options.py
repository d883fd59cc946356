"""
Never run: mypy and pyright read how options are given. An unused `type: ignore` is an
error, so each mistake below is one that an editor shows.
"""

from pathlib import Path

from pyllama_raw import (
    AsyncEngine,
    CacheConfig,
    ContextConfig,
    EngineConfig,
    ModelConfig,
    SamplingParams,
    SchedulerConfig,
)


async def right(engine: AsyncEngine, stops: list[str], biases: dict[int, int]) -> None:
    """Lists, tuples, dicts and paths of any kind are taken as they are at run time."""
    SamplingParams(
        temperature=0,
        stop=stops,
        stages=["top_k", "temperature"],
        stop_token_ids=[2],
        suppress_tokens=(3, 4),
        logit_bias=biases,
        dry_sequence_breakers=["\n"],
        grammar_triggers=["<", 7],
        json_schema={"type": "object"},
    )
    EngineConfig(
        model=ModelConfig(
            devices=["CPU"], tensor_split=[1, 2], kv_overrides={"a.b": 3}
        ),
        context=ContextConfig(n_ctx=4096, type_k="q8_0"),
        scheduler=SchedulerConfig(n_slots=4),
        cache=CacheConfig(directory="states"),
    )
    CacheConfig(directory=Path("states"))
    await engine.complete("a", deadline_s=3, priority=-1, cache_points={1, 2})


async def wrong(engine: AsyncEngine) -> None:
    """An editor shows misspelt names and values of another kind."""
    SamplingParams(max_token=3)  # type: ignore[call-arg]
    SamplingParams(stop="\n")  # type: ignore[arg-type]
    SamplingParams(stages=["topk"])  # type: ignore[list-item]
    SamplingParams(temperature="hot")  # type: ignore[arg-type]
    EngineConfig(n_ctx=4096)  # type: ignore[call-arg]
    SchedulerConfig(slots=4)  # type: ignore[call-arg]
    CacheConfig(mode="all")  # type: ignore[arg-type]
    await engine.complete("a", cache_slat="b")  # type: ignore[call-arg]
    await engine.complete("a", priority="high")  # type: ignore[arg-type]
