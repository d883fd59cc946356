"""Memory of the process, for what is above the engine and has no C of its own."""

from pyllama_raw._ffi.allocator import trim

__all__ = ["trim"]
