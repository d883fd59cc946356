"""Changes of a request that a scheduler tells of as they happen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

# Told when a request gets a slot or its first step, and when it gives a slot up and will get
# another.
SlotChange = Literal["running", "preempted"]
Note = Callable[[SlotChange, int, float], None]  # with its id and the time
