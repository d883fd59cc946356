"""One encode: how far it has come, and how it is cancelled."""

from __future__ import annotations

from pyllama_raw.native.handle import Handle
from pyllama_raw.native.libllama import lib


class EncodeCall(Handle):
    """
    One call of Projector.encode(), which a cancel ends at the next border of a layer.

    Thread:
        Any.
    """

    def __init__(self) -> None:
        super().__init__(lib.plr_encode_new(), lib.plr_encode_free)
        self.cancelled = False

    def cancel(self) -> None:
        """For good, also if it has not begun."""
        self.cancelled = True
        lib.plr_encode_cancel(self.ptr)

    @property
    def n_borders(self) -> int:
        """Borders that were reached: the beginning, each layer, the end."""
        return int(lib.plr_encode_n_borders(self.ptr))
