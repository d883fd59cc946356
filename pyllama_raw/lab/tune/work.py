"""
The work that settings are compared by: prompts for all slots, then all of them streaming.

It runs on a whole engine, so that every option is seen doing what it does for a user.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from pyllama_raw.api.blocking import Engine
from pyllama_raw.lab.bench.writer import TEXT
from pyllama_raw.native.model import Model
from pyllama_raw.options.profile import Measured, Settings
from pyllama_raw.options.sampling import SamplingParams

# Tokens of the text that are scored together: few models have less context.
WINDOW = 128


@dataclass(frozen=True, slots=True)
class Work:
    """The amount of work that measures one setting."""

    n_slots: int = 8  # requests at a time
    n_prompt: int = 128  # tokens of each prompt
    n_output: int = 16  # tokens of each output
    n_repeats: int = 2  # the fastest one counts: neighbours only slow things down
    max_step_s: float = 0.3  # a fixed token budget must not stall streams for longer

    def seconds(self, measured: Measured) -> float:
        """Seconds that the work takes at these speeds."""
        prefill_s = self.n_slots * self.n_prompt / measured.prefill_tok_per_s
        return prefill_s + self.n_slots * self.n_output / measured.decode_tok_per_s

    def cost(self, settings: Settings, measured: Measured) -> float:
        """seconds(), infinite if a step of the token budget takes too long."""
        budget = settings.scheduler.get("token_budget") or 0
        if budget > self.max_step_s * measured.prefill_tok_per_s:
            return math.inf
        return self.seconds(measured)


def measure(model: Path, settings: Settings, work: Work, n_vocab: int) -> Measured:
    """
    Open *model* with *settings* and do the work.

    Raises:
        PyllamaError: these settings do not work here.
    """
    with_slots = settings.updated({"scheduler": {"n_slots": work.n_slots}})
    with Engine.open(model, with_slots.engine_config()) as engine:
        return _measure(engine, work, n_vocab)


def _measure(engine: Engine, work: Work, n_vocab: int) -> Measured:
    rng = random.Random(0)  # noqa: S311 - the same prompts for every setting

    def prompts(n_prompts: int) -> list[list[int]]:
        ids = range(n_vocab)
        return [rng.choices(ids, k=work.n_prompt) for _ in range(n_prompts)]

    _seconds(engine, prompts(2), 4)  # the scheduler learns the speed
    prefill_s, decode_s = math.inf, math.inf
    for _ in range(work.n_repeats):
        new = prompts(work.n_slots)
        prefill_s = min(prefill_s, _seconds(engine, new, 1))
        # Their slots still hold them: what is left is output.
        decode_s = min(decode_s, _seconds(engine, new, work.n_output))
    return Measured(
        prefill_tok_per_s=work.n_slots * work.n_prompt / prefill_s,
        decode_tok_per_s=work.n_slots * work.n_output / decode_s,
    )


def _seconds(engine: Engine, prompts: list[list[int]], n_output: int) -> float:
    params = SamplingParams(max_tokens=n_output, temperature=0, ignore_eos=True)
    started = perf_counter()
    engine.complete_many(prompts, params)
    return perf_counter() - started


def perplexity(model: Path, settings: Settings) -> float:
    """Perplexity of the bundled text: the rough cost of settings and file in quality."""
    with Model.load(model, vocab_only=True) as loaded:
        tokens = loaded.vocab.tokenize(TEXT, add_special=False, parse_special=False)
    windows = [tokens[i : i + WINDOW] for i in range(0, len(tokens) - 1, WINDOW)]
    many_rows = {"context": {"n_outputs_max": WINDOW}, "scheduler": {"n_slots": 1}}
    config = settings.updated(many_rows).engine_config()
    with Engine.open(model, config) as engine:
        scores = [engine.score(window) for window in windows]
    n_scored = sum(len(score.logprobs) for score in scores)
    return math.exp(-math.fsum(score.total for score in scores) / n_scored)
