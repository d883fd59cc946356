"""
The constraint of a reply: what a request wants of its tools and of its text, as one grammar.

A constraint of the request is about the answer: it begins where the thoughts of the model end, and
a call of a tool may stand instead of it. So everything that a reply may be is written as one grammar
of llguidance. Where nothing stands before or beside the answer, the constraint stays as it is.
"""

from __future__ import annotations

from functools import lru_cache
from logging import getLogger
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel

from pyllama_raw.errors import BadSchema, InvalidRequest
from pyllama_raw.options.constraints import with_ascii_classes
from pyllama_raw.options.sampling import MAX_GRAMMAR

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyllama_raw.api.replying import ReplyPlan
    from pyllama_raw.engine.parts import Reading, TextVocab
    from pyllama_raw.options.sampling import SamplingParams
    from pyllama_raw.replies.constraint import AnswerForm
    from pyllama_raw.replies.tool_schemas import Tool

MAX_AROUND = 2**14  # characters around a grammar of the request
NO_CONSTRAINT = {
    "grammar": None,
    "grammar_triggers": (),
    "json_schema": None,
    "regex": None,
}

_log = getLogger(__name__)


class Constrained(NamedTuple):
    """Parameters that constrain a whole reply, and what its parser has to know of that."""

    params: SamplingParams
    is_formed: bool = False  # the content has a form: delimiters in it are text
    keeps_space: bool = False  # white space that the content begins with belongs to it
    n_relaxed: int = 0  # tools of whose schemas a part is not kept


def constrained(
    params: SamplingParams,
    plan: ReplyPlan,
    vocab: TextVocab,
    reading: Reading,
    *,
    is_loose: bool = False,
) -> Constrained:
    """
    *params* with which a reply is what *plan* and they ask for.

    Args:
        is_loose: of tools that are not strict only the names are kept.

    With the choice "auto" and no constraint in *params* the model is free, unless a tool is strict
    or only one call is allowed; and where no syntax of calls is known, as nothing is a call then.

    Raises:
        BadSchema: a schema or the name of a tool cannot be kept; it says which.
        BadGrammar: a grammar of *params* cannot be read.
        InvalidRequest: *params* ask for what does not go with a call.
        Unsupported: nothing is known of how the model writes calls.
    """
    must = plan.choice not in ("auto", "none")
    kind = params.constraint
    if not must and kind is None and not _limits(plan):
        return Constrained(params)
    if must or kind is None:
        _check(params)
    if must and not plan.tools:
        raise InvalidRequest("tool_choice", plan.choice, "tools that have a name")
    # The request may say itself where its grammar begins, or write all of the reply.
    if params.grammar_triggers or (not must and _has_delimiters(params, plan)):
        return Constrained(params)
    if kind is not None and not must and not _is_around(plan):
        return Constrained(params, is_formed=True, keeps_space=kind != "json_schema")
    return _composed(params, plan, vocab, reading, must=must, is_loose=is_loose)


def _composed(
    params: SamplingParams,
    plan: ReplyPlan,
    vocab: TextVocab,
    reading: Reading,
    *,
    must: bool,
    is_loose: bool,
) -> Constrained:
    from pyllama_raw.replies.constraint import lark_for  # few requests need it

    answer = _answer(params, vocab, reading)
    may_call = must or answer is None or _may_call(plan)
    tools = _tools(plan, is_loose=is_loose) if may_call else []
    lark = lark_for(
        plan.bound.spec,
        {name.decode(): token for token, name in plan.bound.marks.items()},
        tools,
        must=must,
        parallel=plan.is_parallel and plan.choice in ("auto", "required"),
        prefix=plan.prefix,
        answer=answer,
        may_think=plan.may_think,
    )
    most = MAX_GRAMMAR + (len(answer.rule) + MAX_AROUND if answer else 0)
    if len(lark) > most:
        text = (
            f"the grammar of all has {len(lark)} characters, at most {most} are allowed"
        )
        raise BadSchema("tools", text)
    for tool in tools:
        if tool.dropped:
            _tell_dropped(tool.name, tuple(tool.dropped))
    return Constrained(
        # Not the copy of SamplingParams: what a user may write is shorter.
        BaseModel.model_copy(params, update=NO_CONSTRAINT | {"lark": lark}),
        is_formed=answer is not None and not must,
        keeps_space=answer is not None and answer.keeps_space,
        n_relaxed=sum(bool(tool.dropped) for tool in tools),
    )


def _limits(plan: ReplyPlan) -> bool:
    """Whether calls that the model may make have to be of some kind."""
    from pyllama_raw.replies.tool_schemas import is_strict_tool

    return _may_call(plan) and (
        not plan.is_parallel or any(map(is_strict_tool, plan.tools))
    )


def _may_call(plan: ReplyPlan) -> bool:
    """Whether the model may call a tool, or answer."""
    return bool(plan.tools and plan.choice == "auto" and plan.bound.spec.calls)


def _is_around(plan: ReplyPlan) -> bool:
    """Whether a reply may have something else before or beside its answer."""
    from pyllama_raw.replies.constraint import opens_thoughts

    spec, prefix = plan.bound.spec, plan.prefix
    return _may_call(plan) or opens_thoughts(spec, prefix, may_think=plan.may_think)


def _has_delimiters(params: SamplingParams, plan: ReplyPlan) -> bool:
    """Whether a grammar or an expression of *params* has a delimiter of the model in it."""
    text = params.regex or params.lark or params.grammar or ""
    tokens = (f"<[{token}]>" for token in plan.bound.marks)
    return any(mark in text for mark in (*plan.bound.spec.delimiters, *tokens))


def _check(params: SamplingParams) -> None:
    for name in ("ignore_eos", "min_tokens", "grammar_triggers"):
        if getattr(params, name):
            allowed = (
                "none beside a tool_choice, strict tools or parallel_tool_calls=False"
            )
            raise InvalidRequest(name, getattr(params, name), allowed)


def _tools(plan: ReplyPlan, *, is_loose: bool) -> list[Tool]:
    from pyllama_raw.engine.guidance import checked_schema
    from pyllama_raw.replies.tool_schemas import tools_of

    called = [
        tool
        for tool in plan.tools
        if plan.choice in ("auto", "required", _function(tool)["name"])
    ]
    return tools_of(called, checked_schema, is_loose=is_loose)


def _function(tool: Any) -> Any:
    return tool.get("function", tool)


@lru_cache(maxsize=256)
def _tell_dropped(name: str, places: Sequence[str]) -> None:
    """Once for each, because an agent sends its tools with each request."""
    text = "tools: %r is not strict; no grammar holds, so nothing does: %s"
    _log.warning(text, name, ", ".join(dict.fromkeys(places)))


def _answer(
    params: SamplingParams, vocab: TextVocab, reading: Reading
) -> AnswerForm | None:
    """The form that *params* want the text of a reply to have, as a rule of Lark."""
    from pyllama_raw.engine.constraint import may_begin_with_space
    from pyllama_raw.engine.guidance import checked_schema
    from pyllama_raw.replies.constraint import AnswerForm
    from pyllama_raw.replies.lark import regex

    if params.json_schema is not None:
        return AnswerForm(f"%json {checked_schema(params.json_schema)}", is_json=True)
    if params.regex is not None:
        rule = regex(with_ascii_classes(params.regex))
    elif params.lark is not None:
        rule = f"%lark {{\n{params.lark}\n}}"
    elif params.grammar is not None:
        rule = f"%lark {{\n{_lark_of_gbnf(params, vocab, reading)}\n}}"
    else:
        return None
    return AnswerForm(rule, keeps_space=may_begin_with_space(rule))


def _lark_of_gbnf(params: SamplingParams, vocab: TextVocab, reading: Reading) -> str:
    """The grammar in GBNF as one of Lark; tokens without text are no text."""
    from pyllama_raw.options.gbnf import to_lark

    def find_token(name: int | str) -> int | None:
        if isinstance(name, int):
            return name if name < vocab.n_tokens else None
        tokens = reading(
            lambda: vocab.tokenize(f"<{name}>", add_special=False, parse_special=True)
        )
        return tokens[0] if len(tokens) == 1 else None

    silent = {token for token, piece in enumerate(vocab.pieces) if not piece}
    assert params.grammar is not None
    ends = vocab.eog_tokens
    return to_lark(params.grammar, params.grammar_root, find_token, silent | ends)
