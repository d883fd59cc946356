"""
What the host sampler costs a row and a request, by stages, for the vocabulary of the model.

Random logits, no model is computed. `row_us` is one call that samples and accepts, a copy
of the logits not included; `open_us` builds and frees what samples one request with a
prompt of 500 tokens. Medians of 200.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from load.measure import Report, arguments, parse

from pyllama_raw import SamplingParams
from pyllama_raw.engine.sampling import open_sampler
from pyllama_raw.native.model import Model

N = 200
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
    "temperature": OFF,
    "top_p": OFF | {"top_p": 0.95},
    "typical": OFF | {"typical_p": 0.9},
    "mirostat 1": OFF | {"mirostat": 1},
    "mirostat 2": OFF | {"mirostat": 2},
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


def main() -> int:
    """Run the script."""
    options = parse(arguments(__doc__))
    report = Report("sampler_cost", options)
    with Model.load(options.model) as model:
        vocab = model.vocab
        logits = np.random.default_rng(0).normal(0, 3, vocab.n_tokens)
        base = logits.astype(np.float32)
        row = base.copy()
        for name, given in CASES.items():
            params = SamplingParams(seed=1, **given)
            open_one = (params, vocab, PROMPT, vocab.eog_tokens, None)
            sampler = open_sampler(*open_one)
            row_us = median_us(
                lambda s=sampler: s.sample(row), lambda: np.copyto(row, base)
            )
            open_us = median_us(
                lambda o=open_one: open_sampler(*o).close(), lambda: None
            )
            sampler.close()
            report.add(stages=name, row_us=row_us, open_us=open_us)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
