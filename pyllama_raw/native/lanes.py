"""
Lanes: chains that a context runs in its graph, one a slot.

libllama takes a chain once in its life and aborts on the second time; so each is spent
before any is handed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyllama_raw.errors import InvalidRequest
from pyllama_raw.native.libllama import ffi
from pyllama_raw.native.sampler import SamplerChain


def seq_configs(lanes: Sequence[SamplerChain], n_seq_max: int) -> Any:
    """llama_sampler_seq_config[len(lanes)]: lanes[i] is for slot i."""
    pointers = _spend(lanes, n_seq_max)
    return ffi.new("struct llama_sampler_seq_config[]", list(enumerate(pointers)))


def pointers_of(lanes: Sequence[SamplerChain], n_seq_max: int) -> Any:
    """llama_sampler *[n_seq_max], NULL where there is no lane."""
    pointers = _spend(lanes, n_seq_max)
    rest = [ffi.NULL] * (n_seq_max - len(pointers))
    return ffi.new("struct llama_sampler *[]", [*pointers, *rest])


def _spend(lanes: Sequence[SamplerChain], n_seq_max: int) -> list[Any]:
    if len(lanes) > n_seq_max:
        raise InvalidRequest("lanes", len(lanes), f"at most {n_seq_max} (n_seq_max)")
    return [lane.spend() for lane in lanes]
