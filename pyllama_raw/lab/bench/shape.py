"""Sizes of workloads, and what a user may change of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from pyllama_raw.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a workload; 0 where it has no such thing."""

    requests: int = 0
    prompt_tokens: int = 0  # of each call, beside a prefix; sharegpt: median
    output_tokens: int = 0  # of each call; sharegpt: median
    prefix_tokens: int = 0  # that calls share, or a chat begins with
    groups: int = 0  # prefixes
    turns: int = 0  # of each chat; requests are the chats
    every: int = 0  # each call of so many is long
    long_tokens: int = 0  # in its prompt
    leave_share: float = 0.0  # of clients that leave early

    def changed(self, given: Mapping[str, int | float]) -> Shape:
        """
        This shape with what is *given*.

        Raises:
            ConfigError: the workload has no such thing, or the number is too small.
        """
        for name, value in given.items():
            if not getattr(self, name):
                known = [f.name for f in fields(self) if getattr(self, f.name)]
                raise ConfigError(f"{name}={value}: this workload has {known}")
            if not (0 <= value <= 1 if name == "leave_share" else value >= 1):
                allowed = "0 to 1" if name == "leave_share" else "1 or more"
                raise ConfigError(f"{name}={value}: give {allowed}")
        return replace(self, **given)  # type: ignore[arg-type]
