"""Notes of whose kernels compute products and attentions (_ffi/kernels/watch.h)."""

from __future__ import annotations

from typing import Any

from pyllama_raw.native.handle import Handle
from pyllama_raw.native.libllama import ffi, lib, text

_COMPUTERS = (
    "ours",
    "AMX",
    "libllama's, repacked",
    "libllama's",
)  # in the order of watch.h


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
