"""What an engine does, told by logs, events, health, metrics and a trace."""

from pathlib import Path
from tempfile import TemporaryDirectory

import anyio

from pyllama_raw import AsyncEngine, EngineConfig, LogConfig, SamplingParams
from pyllama_raw.api.metrics import EngineMetrics
from pyllama_raw.lab.chrome_trace import write_trace
from pyllama_raw.results import EngineEvent, RequestEvent

CONFIG = EngineConfig(log=LogConfig(max_steps=1000, max_requests=1000))
PARAMS = SamplingParams(max_tokens=8, temperature=0)


async def follow(engine: AsyncEngine) -> None:
    """Tell what happens, until the engine has ended."""
    async with engine.events() as events:
        async for event in events:
            if isinstance(event, EngineEvent):
                print(f"engine: {event.state}")
            elif isinstance(event, RequestEvent):
                print(f"request {event.request_id}: {event.state} {event.why or ''}")


def report(engine: AsyncEngine, metrics: EngineMetrics) -> None:
    """All of these answer at once, from any thread."""
    for request in engine.request_log():
        seconds = request.finished_s - request.submitted_s
        print(f"{request.client}: {request.n_output} tokens in {seconds:.2f} s")
    steps = engine.step_log()
    n_tokens = sum(step.n_prefill + step.n_decode for step in steps)
    print(f"{len(steps)} steps computed {n_tokens} tokens")
    with TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"  # open such a file at ui.perfetto.dev
        with trace.open("w") as file:
            write_trace(file, steps, engine.request_log())
        print("trace:", "traceEvents" in trace.read_text())
    health = engine.health()
    print(f"health: {health.state}, waits {health.oldest_wait_s} s")
    lines = metrics.text().splitlines()
    print([line for line in lines if line.startswith("vllm:generation_tokens_total")])


async def main() -> None:
    async with (
        anyio.create_task_group() as tasks,
        AsyncEngine.open(config=CONFIG) as engine,
    ):
        tasks.start_soon(follow, engine)
        metrics = EngineMetrics(engine)
        for client in ("ann", "bob"):
            await engine.complete("The capital of France is", PARAMS, client=client)
        report(engine, metrics)


anyio.run(main)
