"""The constraint that makes a model call tools as a request asks it to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyllama_raw.errors import Unsupported

if TYPE_CHECKING:
    from pyllama_raw.options.sampling import SamplingParams
    from pyllama_raw.replies.spec import ReplySpec


def constrained(
    params: SamplingParams,
    spec: ReplySpec,  # noqa: ARG001
    tools: Sequence[Mapping[str, Any]],
    choice: str,
    is_parallel: bool,
) -> SamplingParams:
    """
    *params* with which the model calls *tools* as it is asked to.

    Args:
        choice: auto, none, required, or the name of a tool.

    Raises:
        Unsupported: the output cannot be made to.
    """
    if choice not in ("auto", "none"):
        raise Unsupported(f"tool_choice={choice!r}", "outputs are not made to call yet")
    if tools and choice == "auto" and not is_parallel:
        raise Unsupported("parallel_tool_calls=False", "calls are not counted yet")
    return params
