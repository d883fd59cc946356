"""A draft model: a small model says what may come next, and a large one keeps what is right."""

from pyllama_raw import Engine, EngineConfig, SamplingParams, SpeculationConfig

LARGE, SMALL = "SmolLM2-1.7B-Instruct.Q4_K_M.gguf", "SmolLM2-135M-Instruct.Q4_1.gguf"

config = EngineConfig(speculation=SpeculationConfig(draft=SMALL))
params = SamplingParams(max_tokens=48, temperature=0)

with Engine.open(LARGE, config=config) as engine:
    result = engine.complete("The seven days of the week are", params)
    print(result.text)
    print(f"{result.usage.accepted_tokens} of {result.usage.drafted_tokens} drafts")
