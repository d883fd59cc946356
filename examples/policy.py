"""A policy of one's own: simulated first, then on a model."""

import anyio

from pyllama_raw import AsyncEngine, EngineConfig, SamplingParams, SchedulerConfig
from pyllama_raw.lab.sim import Machine, Workload, simulate, table
from pyllama_raw.policy import RequestView, SchedulerView, SchedulingPolicy, register


@register
class ShortPrompts(SchedulingPolicy):
    """Short prompts first, but waiting for a minute makes up for 1000 tokens."""

    name = "short_prompts"

    def order_key(self, request: RequestView, view: SchedulerView) -> float:
        return request.submitted + request.n_prompt * 60 / 1000


async def main() -> None:
    workload = Workload(n_requests=300, rate=4)
    policies = ("fcfs", "short_prompts")
    results = [simulate(workload, Machine(policy=policy)) for policy in policies]
    print("\n".join(table(results)))

    config = EngineConfig(scheduler=SchedulerConfig(policy="short_prompts"))
    async with AsyncEngine.open(config=config) as engine:
        params = SamplingParams(max_tokens=8, temperature=0)
        result = await engine.complete("The capital of France is", params)
    print(result.text)


anyio.run(main)
