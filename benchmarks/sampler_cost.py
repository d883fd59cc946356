"""
What sampling costs a row and a request, by stages, for the vocabulary of the model.

On the host: random logits, no model is computed. `row_us` is one call that samples and
accepts, a copy of the logits not included; `open_us` builds and frees what samples one
request with a prompt of 500 tokens. Medians of 200. With a grammar, here of JSON, the rows
are those of one text; tokens it refuses are drawn again under the grammar.

In the graph: what a decode of 8 rows takes longer than one in which nothing is sampled,
by row. `first_ms` is how much longer the decode takes that prepares the graphs.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from load.measure import Report, arguments, parse

from pyllama_raw import SamplingParams
from pyllama_raw.engine.sampling import Constraints, open_sampler
from pyllama_raw.native.batch import Batch
from pyllama_raw.native.context import Context
from pyllama_raw.native.libllama import lib
from pyllama_raw.native.model import Model
from pyllama_raw.native.sampler import FIRST_MAX, RowSampler, SamplerChain
from pyllama_raw.native.stages import Draw, Greedy, Nucleus, Stage, Temperature, TopK
from pyllama_raw.native.vocab import Vocab

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.grammars import JSON

N = 200
N_SLOTS = 8
N_DECODES = 20  # a round
PROMPT = array("i", range(100, 600))
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy, repeat penalty": {"temperature": 0.0, "repeat_penalty": 1.1},
    "defaults": {},
    "defaults, ignore_eos": {"ignore_eos": True},
    "defaults, repeat penalty": {"repeat_penalty": 1.1},
    "defaults, dry": {"dry_multiplier": 0.8},
    "defaults, typical": {"typical_p": 0.9},
    "defaults, xtc": {"xtc_probability": 0.5},
    "defaults, top_n_sigma": {"top_n_sigma": 1.0},
    "defaults, adaptive_p": {"adaptive_target": 0.3},
    "defaults, 300 biases": {"logit_bias": dict.fromkeys(range(300), -1.0)},
    "defaults, grammar": {"grammar": JSON},
    "greedy, grammar": {"temperature": 0.0, "grammar": JSON},
    "temperature": OFF,
    "top_p": OFF | {"top_p": 0.95},
    "typical": OFF | {"typical_p": 0.9},
    "mirostat 1": OFF | {"mirostat": 1},
    "mirostat 2": OFF | {"mirostat": 2},
}


class GraphTopP:
    """libllama's; that of a request is ours, and runs in no graph."""

    def make(self, vocab: Vocab) -> Any:  # noqa: ARG002 - see Stage
        return lib.llama_sampler_init_top_p(0.95, 0)


# What can run in the graph; a lane of an engine is the first of these.
CHAIN = [GraphTopP(), Nucleus("min_p", 0.05), Temperature(0.8), Draw(1)]
GRAPHS: dict[str, Sequence[Stage]] = {
    "nothing": (),
    f"top_k {FIRST_MAX}": [TopK(FIRST_MAX)],
    "greedy": [Greedy()],
    "defaults": [TopK(40), *CHAIN],
}


def median_us(work: Callable[[], object], before: Callable[[], object]) -> float:
    """Microseconds of *work*, *before* not included."""
    times = []
    for _ in range(N):
        before()
        started = perf_counter()
        work()
        times.append(perf_counter() - started)
    return 1e6 * median(times)


def in_graph(model: Model, options: Namespace, report: Report) -> None:
    """Decode 8 rows, with the same stages for each slot, in interleaved rounds."""
    steps: dict[str, list[float]] = {name: [] for name in GRAPHS}
    firsts: dict[str, list[float]] = {name: [] for name in GRAPHS}
    fields = {"n_ctx": 256 * N_SLOTS, "n_threads": options.threads}
    with Context(model, n_seq_max=N_SLOTS, **fields) as context:
        for _ in range(options.rounds):
            for name, graph in GRAPHS.items():
                chains = [
                    SamplerChain.build(graph, model.vocab)
                    for _ in range(N_SLOTS if graph else 0)
                ]
                context.set_lanes(chains)
                first, *times = decodes_ms(context)
                firsts[name].append(first - median(times))
                steps[name] += times
    nothing = median(steps["nothing"])
    for name, times in steps.items():
        row_us = 1e3 * (median(times) - nothing) / N_SLOTS
        first_ms = median(firsts[name])
        report.add(stages=f"graph: {name}", row_us=row_us, first_ms=first_ms)


def decodes_ms(context: Context) -> list[float]:
    """Milliseconds of decodes one after the other; the first prepares the graphs."""
    batch, times = Batch(N_SLOTS), []
    for pos in range(N_DECODES + 1):
        batch.clear()
        batch.add_rows([100] * N_SLOTS, [pos] * N_SLOTS, list(range(N_SLOTS)))
        started = perf_counter()
        context.decode(batch)
        times.append(1e3 * (perf_counter() - started))
    context.clear()
    return times


def opener(params: SamplingParams, vocab: Vocab) -> Callable[[], RowSampler]:
    """Opens what samples one request; its grammar is read before."""
    grammar = Constraints(vocab).make(params)

    def open_one() -> RowSampler:
        started = None if grammar is None else grammar()
        return open_sampler(params, vocab, PROMPT, vocab.eog_tokens, started)

    return open_one


def main() -> int:
    """Run the script."""
    options = parse(arguments(__doc__))
    report = Report("sampler_cost", options)
    with Model.load(options.model) as model:
        vocab = model.vocab
        logits = np.random.default_rng(0).normal(0, 3, vocab.n_tokens)
        base = logits.astype(np.float32)
        row = base.copy()
        for name, params in CASES.items():
            open_one = opener(SamplingParams(seed=1, **params), vocab)
            sampler = open_one()
            row_us = median_us(
                lambda s=sampler: s.sample(row), lambda: np.copyto(row, base)
            )
            open_us = median_us(lambda o=open_one: o().close(), lambda: None)
            sampler.close()
            report.add(stages=name, row_us=row_us, open_us=open_us)
        in_graph(model, options, report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
