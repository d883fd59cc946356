"""What may be done to an encode while it runs: pause it, go on, cancel it."""

from __future__ import annotations

from pyllama_raw.native.handle import Handle
from pyllama_raw.native.libllama import ffi, lib


class Encode(Handle):
    """
    One call of Projector.encode(). A pause or the end comes at the next border of a layer.

    Thread:
        Any.
    """

    def __init__(self) -> None:
        pointer = lib.plr_encode_new()
        if pointer == ffi.NULL:
            raise MemoryError("plr_encode_new")
        super().__init__(pointer, lib.plr_encode_free)

    def pause(self) -> None:
        lib.plr_encode_pause(self.ptr, True)

    def resume(self) -> None:
        lib.plr_encode_pause(self.ptr, False)

    def cancel(self) -> None:
        """For good, also if it is paused or has not begun."""
        lib.plr_encode_cancel(self.ptr)

    @property
    def n_borders(self) -> int:
        """Borders that were reached: the beginning, each layer, the end."""
        return int(lib.plr_encode_n_borders(self.ptr))
