"""The constraint that makes a model call tools as a request asks it to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllama_raw.errors import Unsupported

if TYPE_CHECKING:
    from pyllama_raw.api.replying import ReplyPlan
    from pyllama_raw.options.sampling import SamplingParams


def constrained(params: SamplingParams, plan: ReplyPlan) -> SamplingParams:
    """
    *params* with which the model calls tools as *plan* asks it to.

    Raises:
        Unsupported: the output cannot be made to.
    """
    choice = plan.choice
    if choice not in ("auto", "none"):
        raise Unsupported(f"tool_choice={choice!r}", "outputs are not made to call yet")
    if plan.tools and choice == "auto" and not plan.is_parallel:
        raise Unsupported("parallel_tool_calls=False", "calls are not counted yet")
    return params
