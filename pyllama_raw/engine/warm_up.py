"""
Requests that only warm an engine up.

Their `policy_data` says so. Logs have it, and what is fitted or replayed leaves them out.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pyllama_raw.core.request import Value

WARM_UP: Mapping[str, Value] = MappingProxyType({"warm_up": True})


def warms_up(policy_data: Mapping[str, Value] | None) -> bool:
    """Whether the request that has *policy_data* does not count."""
    return policy_data is not None and policy_data.get("warm_up") is True
