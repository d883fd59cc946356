"""
All tiny models, wherever tokens are chosen: each output is that of the CPU and the host, or the
model is refused with a reason.

    python -m scripts.try_placements [NAME ...]

Every model runs with each placement of samplers, with one slot and several, and with each cache.
More requests than slots come in two rounds, so that slots change hands and what was computed is
used again. The reference is computed by the CPU, alone, with its margins: the distance of the best
two logits. An output may part from it where that margin is less than TIE. On a device a mixture of
experts may also part where two experts of a token nearly tie: tiny qwen3moe does.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from pyllama_raw import (
    CacheConfig,
    ContextConfig,
    EngineConfig,
    ModelConfig,
    PyllamaError,
    SamplingParams,
    SchedulerConfig,
)
from pyllama_raw.core.request import Finished, Request
from pyllama_raw.engine.driver import Driver
from pyllama_raw.engine.opening import build
from scripts.tiny_models.recipes import RECIPES

PLACEMENTS = ("auto", "backend", "host")
SLOTS = (1, 4)
CACHES = ("off", "live", "snapshots")
N_CTX_SLOT = 256
N_PROMPTS, N_OUTPUT = 6, 10
TIE = 0.05  # logits; devices that compute with half floats are given more
GREEDY = SamplingParams(temperature=0.0, max_tokens=N_OUTPUT, ignore_eos=True, seed=1)


class Output(NamedTuple):
    """Tokens of a request; of the reference, the margin of each, too."""

    tokens: list[int]
    margins: list[float]


class Case(NamedTuple):
    """One way to run a model."""

    placement: str
    n_slots: int
    cache: str

    def __str__(self) -> str:
        return f"{self.placement}, {self.n_slots} slots, {self.cache}"


CASES = tuple(itertools.starmap(Case, itertools.product(PLACEMENTS, SLOTS, CACHES)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--models", type=Path, help="the folder of the tiny models")
    parser.add_argument("--tie", type=float, default=TIE)
    options = parser.parse_args()
    folder = options.models or _made()
    counts: Counter[str] = Counter()
    for name in options.names or sorted(generating()):
        for outcome, cases in outcomes(folder, name, options.tie).items():
            kind = outcome.partition(":")[0]
            counts[kind] += len(cases)
            if kind != "right":
                where = "all cases" if len(cases) == len(CASES) else "; ".join(cases)
                print(f"{name:16} {outcome} [{where}]", flush=True)
    print(", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())))
    return 1 if counts["wrong"] or counts["died"] else 0


def generating() -> list[str]:
    """Names of the tiny models that go on with a prompt; an encoder reads that of T5."""
    return [
        name
        for name, recipe in RECIPES.items()
        if recipe.generates and recipe.arch != "t5"
    ]


def _made() -> Path:
    from tests.support.tiny import models  # makes them

    return models()


def outcomes(folder: Path, name: str, tie: float) -> dict[str, list[str]]:
    """Cases of the model *name* by outcome: "right", "refused: why", "wrong: how"."""
    path = folder / f"{RECIPES[name].name}.gguf"
    words: dict[str, list[str]] = {}
    try:
        references = run(path, Case("host", 1, "off"), is_reference=True)
    except PyllamaError as error:
        return {f"refused: {error}": [str(case) for case in CASES]}
    for case in CASES:
        try:
            outputs = run(path, case)
        except PyllamaError as error:
            outcome = f"refused: {error}"
        except Exception as error:  # noqa: BLE001 - the matrix goes on
            outcome = f"died: {type(error).__name__}: {error}"
        else:
            outcome = compared(references, outputs, tie)
        words.setdefault(outcome, []).append(str(case))
    return words


def compared(references: list[Output], outputs: list[Output], tie: float) -> str:
    """Say whether *outputs* are those of *references*, but for near ties."""
    pairs = itertools.product(range(len(outputs) // len(references)), references)
    for output, (_, reference) in zip(outputs, pairs, strict=True):
        steps = zip(output.tokens, reference.tokens, reference.margins, strict=False)
        margin = next((m for a, b, m in steps if a != b), 0.0)
        if margin > tie or not output.tokens:
            return f"wrong: parts at a margin of {margin:.2f}"
    return "right"


def run(path: Path, case: Case, *, is_reference: bool = False) -> list[Output]:
    """Outputs of two rounds of all prompts, in their order; the reference has one round."""
    model = ModelConfig(n_gpu_layers=0) if is_reference else ModelConfig()
    config = EngineConfig(
        model=model,
        context=ContextConfig(n_ctx=N_CTX_SLOT * case.n_slots, n_threads=1),
        scheduler=SchedulerConfig(n_slots=case.n_slots),
        cache=CacheConfig(mode=case.cache),  # type: ignore[arg-type]
        sampler_placement=case.placement,  # type: ignore[arg-type]
    )
    params = GREEDY
    if is_reference:
        params = GREEDY.model_copy(update={"logprobs": 2})
    parts = build(path, config)
    try:
        outputs: list[Output] = []
        for n_round in range(1 if is_reference else 2):
            requests = [
                Request(n_round * N_PROMPTS + index, prompt, N_OUTPUT, sampling=params)
                for index, prompt in enumerate(prompts(parts.vocab.n_tokens))
            ]
            groups: Iterable[list[Request]] = [requests]
            if is_reference:  # each alone
                groups = ([request] for request in requests)
            for group in groups:
                outputs += _finish(parts, group)
        return outputs
    finally:
        parts.release()


def _finish(parts, requests: list[Request]) -> Iterator[Output]:
    outputs = {request.request_id: Output([], []) for request in requests}

    def take(events) -> None:
        for event in events:
            if isinstance(event, Finished):
                if event.error is not None:
                    raise event.error
                continue
            output = outputs[event.request_id]
            output.tokens.extend(event.tokens)
            for logprobs in event.logprobs or ():
                best, second = (value for _, value in logprobs.top[:2])
                output.margins.append(best - second)

    driver = Driver(parts.scheduler, parts.executor, _Clock(), take)
    driver.add(requests, 0.0)
    while driver.step():
        pass
    yield from outputs.values()


class _Clock:
    """A clock that never lets a deadline pass."""

    def __call__(self) -> float:
        from time import monotonic

        return monotonic()


def prompts(n_vocab: int) -> list[array[int]]:
    """Prompts of several lengths, some of which begin alike."""
    common = [(7 * n + 3) % (n_vocab - 20) + 10 for n in range(40)]
    texts = []
    for index in range(N_PROMPTS):
        own = [(11 * n + 5 * index) % (n_vocab - 20) + 10 for n in range(9 * index + 5)]
        texts.append(array("i", (common if index % 2 else []) + own))
    return texts


if __name__ == "__main__":
    sys.exit(main())
