"""Products with Q4_1 weights by a kernel of our own (_ffi/fast_matmul.h)."""

from __future__ import annotations

from typing import Any

from pyllama_raw.native.handle import Handle
from pyllama_raw.native.libllama import ffi, lib


class FastMatmul(Handle):
    """
    Computes products of one context: the bits of libllama's, several times faster.

    libllama unpacks Q4_1 weights anew for every token; the other common types have fast
    kernels there. A context keeps it alive, and is computed by one thread at a time.
    """

    def __init__(self) -> None:
        pointer = lib.plr_matmul_new()
        if pointer == ffi.NULL:
            raise MemoryError("plr_matmul_new")
        super().__init__(pointer, lib.plr_matmul_free)

    def attach(self, params: Any) -> None:
        """Let the context made from llama_context_params *params* use it."""
        lib.plr_matmul_attach(params, self.ptr)


def is_usable() -> bool:
    """
    Whether this machine can run the kernel: AVX-512 VNNI, and no device but CPUs.

    It is also compared with libllama's once; where a bit differs it is not used.
    """
    return bool(lib.plr_matmul_usable())
