"""Operations that we compute instead of libllama (_ffi/kernels)."""

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
    one pool for all slots has many others. What it computes of a token does not depend on
    the tokens that are computed beside it.

    Thread:
        That of the context.
    """

    def __init__(self) -> None:
        pointer = lib.plr_kernels_new()
        if pointer == ffi.NULL:
            raise MemoryError("plr_kernels_new")
        super().__init__(pointer, lib.plr_kernels_free)

    def attach(self, params: Any, *, follows: bool) -> None:
        """
        Let the context made from llama_context_params *params* use them.

        Args:
            follows: whether all slots share one pool of cells, in one cache: then cells are
                listed by position, so sums do not depend on where they lie. What is done to
                slots has to be told.
        """
        lib.plr_kernels_attach(params, self.ptr, follows)

    def removed(self, slot: int, p0: int, p1: int) -> None:
        """A range of *slot* was forgotten."""
        self._check(lib.plr_cells_rm(self.ptr, slot, p0, p1))

    def copied(self, src: int, dst: int, p0: int, p1: int) -> None:
        """*dst* has a range of *src* too."""
        self._check(lib.plr_cells_cp(self.ptr, src, dst, p0, p1))

    def moved(self, slot: int, p0: int, p1: int, delta: int) -> None:
        """The positions of a range have moved."""
        self._check(lib.plr_cells_add(self.ptr, slot, p0, p1, delta))

    def cleared(self) -> None:
        """No slot holds anything."""
        lib.plr_cells_clear(self.ptr)

    def restored(self, slot: int, state: Any, n_bytes: int) -> None:
        """*slot* holds *state*, n_bytes long, as libllama wrote it."""
        self._check(lib.plr_cells_restore(self.ptr, slot, state, n_bytes))

    def _check(self, code: int) -> None:
        if code:
            self.cleared()  # no memory for the lists: cells are taken as they lie

    @property
    def taken(self) -> Taken:
        counts = ffi.new("int64_t[2]")
        lib.plr_kernels_taken(self.ptr, counts)
        return Taken(*counts)


def is_usable() -> bool:
    """Whether this machine can run them: AVX2, FMA and F16C, and no device but CPUs."""
    return bool(lib.plr_kernels_usable())


def has_products() -> bool:
    """
    Whether products are among them: the CPU has AVX-512 VNNI, too.

    They are compared with libllama's once; if a bit differs none is used.
    """
    return bool(lib.plr_kernels_has_products())
