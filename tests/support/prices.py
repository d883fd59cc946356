"""What captures cost, for plays whose steps must not depend on how busy a machine is."""

from typing import Any

from pyllama_raw.core.costs import CostHistory


def capture_all(parts: Any) -> None:
    """
    Every capture of an engine pays, and none has to wait.

    Else what is saved follows from seconds that were measured. Where more is saved, requests start
    later in their text, take fewer steps, and are cancelled at other tokens.
    """
    parts.scheduler.memory.captures.__init__(None, CostHistory(), 1e9)
