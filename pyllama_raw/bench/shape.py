"""Sizes of workloads, and what a user may change of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from pyllama_raw.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a workload; None where it has no such thing."""

    requests: int | None = None
    prompt_tokens: int | None = None  # of each call, beside a prefix; sharegpt: median
    output_tokens: int | None = None  # of each call; sharegpt: median
    prefix_tokens: int | None = None  # that calls share, or a chat begins with
    groups: int | None = None  # prefixes
    turns: int | None = None  # of each chat; requests are the chats
    every: int | None = None  # each call of so many is long
    long_tokens: int | None = None  # in its prompt
    leave_share: float | None = None  # of clients that leave early

    def changed(self, given: Mapping[str, int | float]) -> Shape:
        """
        This shape with what is *given*.

        Raises:
            ConfigError: the workload has no such thing, or the number is too small.
        """
        for name, value in given.items():
            if getattr(self, name) is None:
                known = [f.name for f in fields(self) if getattr(self, f.name)]
                raise ConfigError(f"{name}={value}: this workload has {known}")
            if not (0 <= value <= 1 if name == "leave_share" else value >= 1):
                allowed = "0 to 1" if name == "leave_share" else "1 or more"
                raise ConfigError(f"{name}={value}: give {allowed}")
        return replace(self, **given)  # type: ignore[arg-type]


class Sizes:
    """A shape whose numbers are known to be there."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape

    def __getattr__(self, name: str) -> int:  # leave_share is only compared
        value: int | None = getattr(self._shape, name)
        assert value is not None, name
        return value
