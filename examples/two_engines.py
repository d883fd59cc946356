import anyio

from pyllama_raw import (
    AsyncEngine,
    ContextConfig,
    EngineConfig,
    Model,
    SamplingParams,
    SchedulerConfig,
)

STREAMS = EngineConfig(
    context=ContextConfig(n_ctx=4096), scheduler=SchedulerConfig(n_slots=4)
)
LONG = EngineConfig(
    context=ContextConfig(n_ctx=8192), scheduler=SchedulerConfig(n_slots=1)
)
PARAMS = SamplingParams(max_tokens=12, temperature=0)


async def main() -> None:
    async with (
        Model.open() as model,  # the weights, once for both engines
        AsyncEngine.open(model, STREAMS) as streams,
        AsyncEngine.open(model, LONG) as long,
        anyio.create_task_group() as group,
    ):

        async def answer(name: str, engine: AsyncEngine) -> None:
            result = await engine.complete("The capital of France is", PARAMS)
            print(f"{name} ({engine.n_ctx_slot} tokens a slot): {result.text!r}")

        group.start_soon(answer, "streams", streams)
        group.start_soon(answer, "long", long)


anyio.run(main)
