"""Drafts of what was said before: a text that comes again is computed in fewer steps."""

from pyllama_raw import Engine, SamplingParams

params = SamplingParams(max_tokens=48, temperature=0)
prompt = "one two three four five six seven eight nine ten " * 3

with Engine.open() as engine:
    result = engine.complete(prompt, params)
    print(f"speculation is {engine.info.speculation}")
    print(result.text)
    print(f"{result.usage.accepted_tokens} of {result.usage.drafted_tokens} drafts")

    without = engine.complete(prompt, params, speculation=False)
    print(without.usage.drafted_tokens)  # 0: this request refuses
