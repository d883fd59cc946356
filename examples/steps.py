"""Some steps of an engine without its thread, one at a time, for experiments."""

from itertools import count
from time import monotonic

from pyllama_raw import EngineConfig, SamplingParams, SchedulerConfig
from pyllama_raw.core.request import Event, Finished, NewTokens, Request
from pyllama_raw.engine.driver import Driver
from pyllama_raw.engine.opening import build
from pyllama_raw.options.models import default_model

MAX_STEPS = 100
PROMPTS = ("The capital of France is", "One, two, three,")
GREEDY = SamplingParams(temperature=0, seed=0)


def words(tokens: tuple[int, ...]) -> str:
    return b"".join(map(parts.vocab.piece, tokens)).decode(errors="replace")


def tell(events: list[Event]) -> None:
    """Print what came of a step."""
    for event in events:
        if isinstance(event, NewTokens):
            print(f"  request {event.request_id}: {words(event.tokens)!r}")
        elif isinstance(event, Finished):
            print(f"  request {event.request_id} has ended: {event.reason}")


parts = build(default_model(), EngineConfig(scheduler=SchedulerConfig(n_slots=2)))
try:
    driver = Driver(parts.scheduler, parts.executor, monotonic, tell)
    for number, text in zip(count(1), PROMPTS):
        tokens = parts.vocab.tokenize(text, add_special=True, parse_special=False)
        request = Request(number, tokens, max_tokens=4, sampling=GREEDY)
        driver.add([request], driver.clock())
    for number in range(MAX_STEPS):
        print(f"step {number}")
        if not driver.step():
            break
finally:
    parts.release()
