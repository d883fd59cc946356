"""Sizes of workloads, and what a user may change of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated

from pydantic import Field

from pyllama_raw.errors import ConfigError, shown
from pyllama_raw.lab.checked import Checked, Whole


@dataclass(frozen=True, slots=True)
class Shape(Checked):
    """Sizes of a workload; 0 where it has no such thing."""

    requests: Whole = 0
    prompt_tokens: Whole = 0  # of each call, beside a prefix; sharegpt: median
    output_tokens: Whole = 0  # of each call; sharegpt: median
    prefix_tokens: Whole = 0  # that calls share, or a chat begins with
    groups: Whole = 0  # prefixes
    turns: Whole = 0  # of each chat; requests are the chats
    every: Whole = 0  # each call of so many is long
    long_tokens: Whole = 0  # in its prompt
    # Of clients that leave early.
    leave_share: Annotated[float, Field(ge=0, le=1)] = 0.0

    def changed(self, changes: Mapping[str, int | float]) -> Shape:
        """
        This shape with what is *changes*.

        Raises:
            ConfigError: the workload has no such thing, or the number is not allowed.
        """
        for name, value in changes.items():
            if not getattr(self, name, 0):
                names = [f.name for f in fields(self) if getattr(self, f.name)]
                raise ConfigError(f"{name}={shown(value)}: this workload has {names}")
            if name != "leave_share" and value == 0:
                raise ConfigError(f"{name}=0: give at least 1")
        return replace(self, **changes)  # type: ignore[arg-type]
