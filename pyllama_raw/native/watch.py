"""Notes of the kernels that compute products and attentions (_ffi/kernels/watch.h)."""

from __future__ import annotations

from typing import Any

from pyllama_raw.native.handle import Handle
from pyllama_raw.native.libllama import lib, text

_COMPUTERS = {  # by the constants of watch.h
    "PLR_BY_US": "ours",
    "PLR_BY_AMX": "AMX",
    "PLR_BY_REPACKED": "libllama's, repacked",
    "PLR_BY_LIBLLAMA": "libllama's",
}


class Watch(Handle):
    """
    Notes what one context computes from when it is made; the context keeps it alive.

    Thread:
        That of the context.
    """

    def __init__(self) -> None:
        super().__init__(lib.plr_watch_new(), lib.plr_watch_free)

    def attach(self, params: Any) -> None:
        """
        Watch the context made from llama_context_params *params*.

        Other watchers of its nodes are attached before.
        """
        lib.plr_watch_attach(params, self.ptr)

    @property
    def kernels(self) -> dict[str, tuple[str, ...]]:
        """Kernels that computed, by work: "attention", and types of weights by name."""
        found = {"attention": _names(lib.plr_watch_attentions(self.ptr))}
        for kind in range(lib.GGML_TYPE_COUNT):
            name = text(lib.ggml_type_name(kind))
            found[name] = _names(lib.plr_watch_products(self.ptr, kind))
        return {name: computers for name, computers in found.items() if computers}


def _names(bits: int) -> tuple[str, ...]:
    return tuple(name for bit, name in _COMPUTERS.items() if bits & getattr(lib, bit))
