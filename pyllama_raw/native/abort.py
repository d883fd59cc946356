"""A flag libllama polls while it computes; on the CPU and Metal backends only."""

from __future__ import annotations

from pyllama_raw.native.handle import Handle
from pyllama_raw.native.libllama import lib


class AbortFlag(Handle):
    """
    While it is set, a decode of the contexts made with it stops at the next graph node.

    Thread:
        Any. The engine thread clears it before the next step.
    """

    def __init__(self) -> None:
        super().__init__(lib.plr_flag_new(), lib.plr_flag_free)

    def set(self) -> None:
        lib.plr_flag_set(self.ptr, True)

    def clear(self) -> None:
        lib.plr_flag_set(self.ptr, False)
