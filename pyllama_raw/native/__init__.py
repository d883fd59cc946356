"""
Owned C objects, no policy. Nothing here is loaded by importing it.

The words that options have for enumerations of C are here, each list once for both sides, because
programs read options without the library of C.
"""

from __future__ import annotations

from typing import Literal

SplitMode = Literal["none", "layer", "row", "tensor"]
LoadMode = Literal["auto", "none", "mmap", "mlock", "mmap_mlock", "direct_io"]
LazyMode = Literal["off", "auto", "on"]
FlashAttention = Literal["auto", "on", "off"]
RopeScaling = Literal["model", "none", "linear", "yarn", "longrope"]
KVType = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"]
ContextType = Literal["default", "mtp"]
Pooling = Literal["none", "mean", "cls", "last", "rank"]
