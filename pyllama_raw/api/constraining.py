"""The constraint that makes a model call tools as a request asks it to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from pyllama_raw.errors import BadSchema, InvalidRequest
from pyllama_raw.options.sampling import MAX_GRAMMAR

if TYPE_CHECKING:
    from pyllama_raw.api.replying import ReplyPlan
    from pyllama_raw.options.sampling import SamplingParams
    from pyllama_raw.replies.tool_schemas import Tool


def constrained(params: SamplingParams, plan: ReplyPlan) -> SamplingParams:
    """
    *params* with which the model calls tools as *plan* asks it to.

    With the choice "auto" the model is free, unless a tool is strict or only one call is allowed.

    Raises:
        BadSchema: a schema or the name of a tool cannot be kept; it says which.
        InvalidRequest: *params* ask for something else.
        Unsupported: nothing is known of how the model writes calls.
    """
    must = plan.choice not in ("auto", "none")
    is_strict = any(map(_is_strict, plan.tools))
    if plan.choice == "none" or not (
        must or (plan.tools and (is_strict or not plan.is_parallel))
    ):
        return params
    _check(params)
    if not plan.tools:
        raise InvalidRequest("tool_choice", plan.choice, "tools that have a name")
    from pyllama_raw.replies.constraint import lark_for  # few requests need it

    is_named = plan.choice not in ("auto", "required")
    lark = lark_for(
        plan.bound.spec,
        {name.decode(): token for token, name in plan.bound.marks.items()},
        _tools(plan),
        must=must,
        parallel=plan.is_parallel and not is_named,
        prefix=plan.prefix,
    )
    if len(lark) > MAX_GRAMMAR:
        text = f"the grammar of all has {len(lark)} characters, at most {MAX_GRAMMAR} are allowed"
        raise BadSchema("tools", text)
    # Not the copy of SamplingParams: what a user may write is shorter.
    return BaseModel.model_copy(params, update={"lark": lark})


def _check(params: SamplingParams) -> None:
    given = [params.constraint or "", "ignore_eos", "min_tokens"]
    for name in given:
        if not name or not getattr(params, name):
            continue
        allowed = "none beside a tool_choice, strict tools or parallel_tool_calls=False"
        raise InvalidRequest(name, getattr(params, name), allowed)


def _tools(plan: ReplyPlan) -> list[Tool]:
    from pyllama_raw.engine.guidance import checked_schema
    from pyllama_raw.replies.tool_schemas import tools_of

    called = [
        tool
        for tool in plan.tools
        if plan.choice in ("auto", "required", _function(tool)["name"])
    ]
    return tools_of(called, checked_schema)


def _function(tool: Any) -> Any:
    return tool.get("function", tool)


def _is_strict(tool: Any) -> bool:
    return _function(tool).get("strict") is True
