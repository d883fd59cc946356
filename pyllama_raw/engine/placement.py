"""
Whether tokens are to be chosen with lanes, or from rows of logits on the host.

Where the CPU computes the logits there is nothing to gain: a lane runs there on one
thread, while the others wait, what the host does faster (`benchmarks/placement.py`).
Another device leaves some candidates, and only these are copied to the host.
"""

from __future__ import annotations

from pyllama_raw.native.libllama import devices
from pyllama_raw.native.model import Model
from pyllama_raw.options.config import EngineConfig

NO_LANES = "the model reads prompts with an encoder: its rows have no lanes"
CPU = "auto: the CPU computes the logits, and chooses faster on the host"


def refusal(model: Model, config: EngineConfig) -> str:
    """Why there can be no lanes, before a context is made; empty if there can."""
    if model.reads_sources:
        return NO_LANES
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
