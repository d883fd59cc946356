"""
Kernels of our own, which compute some operations instead of libllama (_ffi/kernels), and notes
of whose kernels compute (_ffi/kernels/kernels.h).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from pyllama_raw.native.gguf import Header
from pyllama_raw.native.libllama import Handle, devices, ffi, levels_in, lib, text

FLOATS = {"f32", "f16", "bf16"}
AT_MOST = "at most"  # ends what a CPU needs that may have no more than that
_COMPUTERS = (
    "ours",
    "AMX",
    "libllama's, repacked",
    "libllama's",
)  # in the order of kernels.h
Deterministic = bool | Literal["fast"]


class Kernel(NamedTuple):
    """One row of the table of our kernels."""

    computes: str  # "attention", products by "columns", or with a type of weights
    needs: str  # of the CPU
    is_usable: bool  # on this machine
    is_woven: bool  # multiplies woven weights (_ffi/kernels/woven_types.h)
    why_not: str = ""  # empty if it is usable


def table() -> tuple[Kernel, ...]:
    """
    All kernels, of a kind the best first; the first one that is usable computes.

    None is usable where there is a device that is no CPU.
    """
    accelerators = [device.name for device in devices() if device.kind != "cpu"]
    row = ffi.new("plr_kernel *")
    rows: list[Kernel] = []
    while lib.plr_kernels_row(len(rows), row):
        computes, needs = text(row.computes).lower(), text(row.needs)
        why_not = ""
        if accelerators and not row.is_usable:  # see has_only_cpus() of callback.h
            why_not = f"a device that is no CPU is there ({', '.join(accelerators)})"
        # Only lesser CPUs have products of floats from us: libllama has wider ones.
        elif not row.is_usable and needs.endswith(AT_MOST) and has_avx512(rows):
            why_not = "libllama uses AVX-512 for them on this CPU"
        elif not row.is_usable:
            why_not = "this CPU is another one"
        # The row is one struct, which C fills anew each time.
        is_usable, is_woven = bool(row.is_usable), bool(row.is_woven)
        rows.append(Kernel(computes, needs, is_usable, is_woven, why_not))
    return tuple(rows)


def has_avx512(rows: Iterable[Kernel]) -> bool:
    """Whether one of *rows* computes with AVX-512 here."""
    return any(row.is_usable and row.needs.startswith("AVX-512") for row in rows)


def woven_levels() -> tuple[str, ...]:
    """
    Sets of instructions of this CPU that can multiply woven weights, the least first.

    PYLLAMA_RAW_WOVEN names the one that does. All give the same bits, but for prompts and many streams
    that "amx" multiplies where a context is not deterministic.
    """
    levels = levels_in(lib, ffi)
    return tuple(name for name, is_usable in levels.items() if is_usable)


def weaves(header: Header) -> bool:
    """Whether our kernels for woven weights multiply all weights of a model here."""
    woven = {row.computes for row in table() if row.is_woven and row.is_usable}
    # Vectors, as of norms, are in no product with a matrix.
    kinds = {
        text(lib.ggml_type_name(tensor.type)).lower()
        for tensor in header.tensors
        if len(tensor.dims) > 1
    }
    # Matrices of floats may stand beside them: libllama multiplies those.
    return bool(kinds & woven) and kinds <= woven | FLOATS


class Kernels(Handle):
    """
    Computes some operations of one context, which keeps it alive.

    Sums of products of woven weights and flash attention have other last digits than libllama's.
    Attention reads only the cells that a token sees, while one pool for all slots has many others.
    What they compute of a token does not depend on the tokens that are computed beside it, unless AMX
    multiplies: then a stream depends on whether it is one of 20 or more, or beside a prompt.

    Thread:
        That of the context.
    """

    @classmethod
    def attached(
        cls, params: Any, *, fast: bool, follows: bool, deterministic: Deterministic
    ) -> Kernels | None:
        """
        Kernels of the context that llama_context_params *params* makes, if they can be attached.

        Args:
            fast: those that are faster than libllama.
            follows: whether all slots share one pool of cells, in one cache: then cells are
                listed by position, so sums do not depend on where they lie. What is done to
                slots has to be told.
            deterministic: each column is multiplied like one alone; "fast": by our kernels.
        """
        sums = {
            False: lib.PLR_SUMS_ANY,
            True: lib.PLR_SUMS_LIBLLAMA,
            "fast": lib.PLR_SUMS_OURS,
        }[deterministic]
        pointer = lib.plr_kernels_attach(params, fast, follows, sums)
        return None if pointer == ffi.NULL else cls(pointer, lib.plr_kernels_free)

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
    def stray(self) -> str:
        """
        An operation so far whose results of a token may depend on tokens beside it, by its name.

        It is not looked for if *deterministic* is True; empty if there is none.
        """
        return text(lib.plr_kernels_stray(self.ptr))

    @property
    def taken(self) -> dict[Kernel, int]:
        """Numbers of operations that kernels took so far, in all graphs, by kernel; none is 0."""
        counts = (lib.plr_kernels_taken(self.ptr, i) for i in range(len(table())))
        return {row: n for row, n in zip(table(), counts, strict=True) if n}


class Watch(Handle):
    """
    Notes what contexts compute from when they are made; they keep it alive.

    One thread computes them. Where there is a GPU each has a thread of its own, and libllama
    waits after each part of a graph that it shows.

    Thread:
        Any.
    """

    def __init__(self) -> None:
        super().__init__(lib.plr_watch_new(), lib.plr_watch_free)

    def attach(self, params: Any) -> None:
        """
        Watch the context made from llama_context_params *params*.

        Other watchers of its nodes are attached before.

        Raises:
            MemoryError: there is none.
        """
        if not lib.plr_watch_attach(params, self.ptr):
            raise MemoryError("no memory for Watch.attach")

    @property
    def products(self) -> dict[str, dict[str, int]]:
        """Multiply-adds with weights so far, by their type, then by whose kernels computed."""
        # A row of counts for each type of weights, in the order of _COMPUTERS.
        n = len(_COMPUTERS)
        counts = ffi.new("int64_t[]", lib.GGML_TYPE_COUNT * n)
        lib.plr_watch_products(self.ptr, counts)
        values = ffi.unpack(counts, lib.GGML_TYPE_COUNT * n)
        return {
            text(lib.ggml_type_name(kind)): _named(values[kind * n : kind * n + n])
            for kind in sorted({i // n for i, value in enumerate(values) if value})
        }

    @property
    def attentions(self) -> dict[str, int]:
        """Attentions so far, by whose kernels computed."""
        counts = ffi.new("int64_t[]", len(_COMPUTERS))
        lib.plr_watch_attentions(self.ptr, counts)
        return _named(ffi.unpack(counts, len(_COMPUTERS)))


def _named(counts: list[int]) -> dict[str, int]:
    return {name: n for name, n in zip(_COMPUTERS, counts, strict=True) if n}
