"""Operations that we compute instead of libllama (_ffi/kernels.h)."""

from __future__ import annotations

from typing import Any, NamedTuple

from pyllama_raw.native.handle import Handle
from pyllama_raw.native.libllama import ffi, lib


class Taken(NamedTuple):
    """Operations that were taken from libllama, in all graphs that it made."""

    products: int
    attentions: int


class Kernels(Handle):
    """
    Computes some operations of one context, which keeps it alive.

    Products with Q4_1 and Q8_0 weights have the bits of libllama's, which is slower.
    Flash attention has other last digits; it reads only the cells that a token sees, while
    one pool for all slots has many others.

    Thread:
        That of the context.
    """

    def __init__(self) -> None:
        pointer = lib.plr_kernels_new()
        if pointer == ffi.NULL:
            raise MemoryError("plr_kernels_new")
        super().__init__(pointer, lib.plr_kernels_free)

    def attach(self, params: Any) -> None:
        """Let the context made from llama_context_params *params* use them."""
        lib.plr_kernels_attach(params, self.ptr)

    @property
    def taken(self) -> Taken:
        counts = ffi.new("int64_t[2]")
        lib.plr_kernels_taken(self.ptr, counts)
        return Taken(*counts)


def is_usable() -> bool:
    """
    Whether this machine can run them: AVX-512 VNNI, and no device but CPUs.

    Products are also compared with libllama's once; if a bit differs none is used.
    """
    return bool(lib.plr_kernels_usable())
