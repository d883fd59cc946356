"""
How output rows become tokens.

The order is that of llama-server: top_k, top_p, min_p, temperature, then the draw; a
stage that would change nothing is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from pyllama_raw.errors import InvalidRequest
from pyllama_raw.native.handle import Handle
from pyllama_raw.native.library import ffi, lib

_INT32_MAX = 2**31 - 1
_SEED_MAX = 2**32 - 1  # llama.h: LLAMA_DEFAULT_SEED, a random seed


class SamplerChain(Handle):
    """A llama_sampler chain that ends with a random draw. Belongs to one request."""

    @classmethod
    def build(
        cls, *, temperature: float, top_k: int, top_p: float, min_p: float, seed: int
    ) -> Self | None:
        """
        The chain for these parameters; None where they mean the most likely token.

        Args:
            temperature: 0 is greedy.
            top_k: 0 is off, 1 is greedy.
            top_p: 1 is off.
            min_p: 0 is off.
            seed: 0 to 2**32 - 2.

        Raises:
            InvalidRequest: a number out of range.
        """
        _check("temperature", temperature, 0, float("inf"))
        _check("top_k", top_k, 0, _INT32_MAX)
        _check("top_p", top_p, 0, 1)
        _check("min_p", min_p, 0, 1)
        _check("seed", seed, 0, _SEED_MAX - 1)
        if temperature == 0 or top_k == 1:
            return None
        stages = []
        if top_k > 0:
            stages.append(lib.llama_sampler_init_top_k(top_k))
        if top_p < 1:
            stages.append(lib.llama_sampler_init_top_p(top_p, 1))
        if min_p > 0:
            stages.append(lib.llama_sampler_init_min_p(min_p, 1))
        if temperature != 1:
            stages.append(lib.llama_sampler_init_temp(temperature))
        stages.append(lib.llama_sampler_init_dist(seed))
        return cls._of(stages)

    @classmethod
    def _of(cls, stages: Sequence[Any]) -> Self:
        params = lib.llama_sampler_chain_default_params()
        pointer = lib.llama_sampler_chain_init(params)
        for stage in stages:
            lib.llama_sampler_chain_add(pointer, stage)  # the chain owns it now
        return cls(pointer, lib.llama_sampler_free)

    def reset(self) -> None:
        """As newly built: the same seed draws the same tokens again."""
        lib.llama_sampler_reset(self.ptr)

    @property
    def names(self) -> tuple[str, ...]:
        """The stages in order."""
        ptr = self.ptr
        found = []
        for i in range(lib.llama_sampler_chain_n(ptr)):
            stage = lib.llama_sampler_chain_get(ptr, i)
            found.append(ffi.string(lib.llama_sampler_name(stage)).decode())
        return tuple(found)


class RowSampler:
    """
    What the rows of one request are sampled with: a chain or greedy, and forbidden ids.

    Closes its chain. Used after close(), its rows fail and no other.

    Args:
        chain: None takes the largest logit, the lowest id among equals.
        suppress: ids that are never sampled.
    """

    def __init__(
        self, chain: SamplerChain | None = None, suppress: Sequence[int] = ()
    ) -> None:
        for token in suppress:
            if not 0 <= token <= _INT32_MAX:
                raise InvalidRequest("suppress", token, "token ids")
        self.chain = chain
        self._suppress = ffi.new("llama_token[]", list(suppress))
        self._struct = ffi.new("plr_sampler *")
        self._struct.chain = ffi.NULL if chain is None else chain.ptr
        self._struct.suppress = self._suppress
        self._struct.n_suppress = len(suppress)
        self.address = int(ffi.cast("uintptr_t", self._struct))

    def close(self) -> None:
        """Free the chain. Idempotent."""
        self._struct.n_suppress = -1
        self._struct.chain = ffi.NULL
        if self.chain is not None:
            self.chain.close()


class RowSamplers:
    """The samplers of a step by row: a table of pointers, cheap to set each step."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise InvalidRequest("capacity", capacity, "at least 1")
        self.capacity = capacity
        self._table = np.zeros(capacity, np.uintp)
        self._kept: list[RowSampler | None] = [None] * capacity
        self.ptr = ffi.cast("plr_sampler **", self._table.ctypes.data)

    def set(self, row: int, sampler: RowSampler) -> None:
        """Sample the *row*-th output row of the next step with *sampler*."""
        if not 0 <= row < self.capacity:
            raise InvalidRequest("row", row, f"0 to {self.capacity - 1}")
        if self._kept[row] is not sampler:
            self._table[row] = sampler.address
            self._kept[row] = sampler

    def set_all(self, samplers: list[RowSampler]) -> None:
        """Set rows 0 to len(samplers) - 1."""
        count = len(samplers)
        if count > self.capacity:
            raise InvalidRequest("rows", count, f"at most {self.capacity}")
        if self._kept[:count] != samplers:
            self._table[:count] = [sampler.address for sampler in samplers]
            self._kept[:count] = samplers


def _check(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise InvalidRequest(name, value, f"{low} to {high}")
