"""
Whether tokens are to be chosen with lanes, or from rows of logits on the host.

Where the CPU computes the logits there is nothing to gain: a lane runs there on one
thread, while the others wait, what the host does faster (`benchmarks/placement.py`). On
another device it is measured, once for each device and shape in a process.
"""

from __future__ import annotations

import time
from statistics import median

from pyllama_raw.config import EngineConfig
from pyllama_raw.engine.lanes import make_lanes
from pyllama_raw.native import stages
from pyllama_raw.native.batch import Batch
from pyllama_raw.native.context import Context
from pyllama_raw.native.libllama import devices
from pyllama_raw.native.model import Model
from pyllama_raw.native.sampler import RowSampler, RowSamplers, SamplerChain

N_ROUNDS = 2
N_STEPS = 5  # timed a round
CPU = "auto: the CPU computes the logits, and chooses faster on the host"

_measured: dict[tuple[object, ...], bool] = {}


def refusal(model: Model, config: EngineConfig) -> str:
    """Why there can be no lanes, before a context is made; empty if there can."""
    if config.sampler_placement == "host":
        return "sampler_placement is host"
    if config.model.split_mode == "tensor":
        return "split_mode tensor has no lanes"
    if config.sampler_placement == "auto" and not _device_has_output(model, config):
        return CPU
    return ""


def _device_has_output(model: Model, config: EngineConfig) -> bool:
    """Whether another device than the CPU may compute the output layer, the last one."""
    names, n_gpu_layers = config.model.devices, config.model.n_gpu_layers
    used = [d for d in devices() if names is None or d.name in names]
    takes_all = n_gpu_layers < 0 or n_gpu_layers > model.n_layer
    return takes_all and any(d.kind in ("gpu", "igpu") for d in used)


def lanes_pay(context: Context, n_slots: int) -> bool:
    """
    Whether a step of *n_slots* rows is faster with lanes, as they are by default sampled.

    Args:
        context: empty, with a lane for each slot; afterwards it is empty and has lanes
            just if they pay.
    """
    names = tuple((d.name, d.description) for d in devices())
    key = (names, context.model.n_vocab, context.model.n_embd, n_slots)
    if key not in _measured:
        _measured[key] = _measure(context, n_slots)
    elif not _measured[key]:
        context.set_lanes([])
    return _measured[key]


def _measure(context: Context, n_slots: int) -> bool:
    lanes_s: list[float] = []
    rows_s: list[float] = []
    for index in range(N_ROUNDS):
        if index:
            context.set_lanes(make_lanes(context.model.vocab, n_slots))
        lanes_s += _steps_s(context, n_slots)
        context.set_lanes([])
        rows_s += _steps_s(context, n_slots)
    pays = median(lanes_s) < median(rows_s)
    if pays:
        context.set_lanes(make_lanes(context.model.vocab, n_slots))
    return pays


def _steps_s(context: Context, n_slots: int) -> list[float]:
    """Times of steps that sample a row of each slot."""
    vocab = context.model.vocab
    chains = [SamplerChain.build(_typical(), vocab) for _ in range(n_slots)]
    rows = [RowSampler(chain, n_first=40) for chain in chains]
    samplers, batch = RowSamplers(n_slots), Batch(n_slots)
    samplers.set_all(rows)
    batch.add_rows([0] * n_slots, [0] * n_slots, list(range(n_slots)))
    times = []
    for _ in range(N_STEPS + 1):
        started = time.perf_counter()
        context.step(batch, samplers)  # which advances the batch
        times.append(time.perf_counter() - started)
    context.clear()
    for row in rows:
        row.close()
    return times[1:]  # the first one prepares the graphs


def _typical() -> list[stages.Stage]:
    """The stages that SamplingParams has by default."""
    return [
        stages.TopK(40),
        stages.Nucleus("top_p", 0.95),
        stages.Nucleus("min_p", 0.05),
        stages.Temperature(0.8),
        stages.Draw(0),
    ]
