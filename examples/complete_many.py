"""Many prompts from a program that is not async; results come in their order."""

from pyllama_raw import EngineConfig, SamplingParams, SchedulerConfig, generate

prompts = [f"Count on: {n}, {n + 1}, {n + 2}," for n in range(8)]

results = generate(
    prompts,
    SamplingParams(max_tokens=8, temperature=0),
    config=EngineConfig(scheduler=SchedulerConfig(n_slots=4)),
)

for prompt, result in zip(prompts, results, strict=True):
    print(f"{prompt}{result.text}")
