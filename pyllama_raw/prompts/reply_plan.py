"""
Replies as requests want them: how outputs are taken apart, and the grammar that holds them.

Rules:
1. The specification of a chat template is found once, because its delimiters are compared with
   the special tokens of the model.
2. A constraint of the request is about the answer: it begins where the thoughts of the model end,
   and a call of a tool may stand instead of it. So everything that a reply may be is written as
   one grammar of llguidance. Where nothing stands before or beside the answer, the constraint
   stays as it is.
3. An output that can be nothing but content has no parser.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from functools import lru_cache, partial
from logging import getLogger
from typing import Any, NamedTuple

from pydantic import BaseModel

from pyllama_raw.engine.guidance import checked_schema
from pyllama_raw.engine.parts import EngineParts, Reading, TextVocab
from pyllama_raw.engine.sampling import may_begin_with_space
from pyllama_raw.errors import BadSchema, InvalidRequest, Unsupported
from pyllama_raw.options.constraints import with_ascii_classes
from pyllama_raw.options.gbnf import to_lark
from pyllama_raw.options.requests import ChatOptions
from pyllama_raw.options.sampling import MAX_GRAMMAR, SamplingParams
from pyllama_raw.prompts.chat import MAX_KNOWN, NO_TOKENS
from pyllama_raw.prompts.messages import plain_value
from pyllama_raw.prompts.prompt import PromptEncoder
from pyllama_raw.prompts.rendering.processes import (
    Exceeded,
    TemplateHere,
    TemplateProcesses,
    TemplateRefused,
    Unreadable,
)
from pyllama_raw.prompts.reply import PlannedReply, ReplyForm
from pyllama_raw.replies.call_rules import regex
from pyllama_raw.replies.constraint import AnswerForm, lark_for, opens_thoughts
from pyllama_raw.replies.derive import spec_for
from pyllama_raw.replies.parser import ReplyParser
from pyllama_raw.replies.schemas import Tool, is_strict_tool, tools_of
from pyllama_raw.replies.spec import ReasoningSpec, ReplySpec

MAX_SPECS = 16  # that are remembered
MAX_TAIL = 1024  # tokens at the end of a prompt that may begin a reply
MAX_AROUND = 2**14  # characters around a grammar of the request
WORDS = ("auto", "none", "required")  # of tool_choice
NO_CONSTRAINT = {
    "grammar": None,
    "grammar_triggers": (),
    "json_schema": None,
    "regex": None,
}

_log = getLogger(__name__)


class BoundSpec(NamedTuple):
    """A specification for one vocabulary."""

    spec: ReplySpec
    marks: Mapping[int, bytes]  # its special tokens, and their names

    @property
    def has_syntax(self) -> bool:
        """Whether a reply without calls may have anything but content."""
        spec = self.spec
        return bool(spec.reasoning or spec.messages or spec.ignored)


class ReplyPlan(NamedTuple):
    """Wishes of a request for its reply."""

    bound: BoundSpec
    tools: list[Any]  # those that have a name; others are the template's business
    choice: str
    is_parallel: bool
    is_parsed: bool
    prefix: str  # the end of the prompt, where the reply may have begun
    may_think: bool = True  # by its own choice

    @property
    def may_call(self) -> bool:
        """Whether the model may call a tool, or answer."""
        return bool(self.tools and self.choice == "auto" and self.bound.spec.calls)


class Constrained(NamedTuple):
    """Parameters that constrain a whole reply, and facts of that for its parser."""

    params: SamplingParams
    is_formed: bool = False  # the content has a form: delimiters in it are text
    keeps_space: bool = False  # white space that the content begins with belongs to it
    n_relaxed: int = 0  # tools of whose schemas a part is not kept


class Replies:
    """Plans the replies of one engine; any thread may call."""

    def __init__(self, parts: EngineParts, encoder: PromptEncoder) -> None:
        self._bound = lru_cache(MAX_SPECS)(partial(_bound, parts, encoder))
        self._parts, self._encoder = parts, encoder

    def reply(
        self,
        params: SamplingParams,
        options: ChatOptions,
        tokens: array[int],
        controls: Mapping[int, bytes],
    ) -> PlannedReply:
        """
        The reply to the chat *tokens*; may take seconds.

        Args:
            tokens: the prompt.
            controls: names of the control tokens.

        Raises:
            InvalidRequest, Unsupported, ClosedError: see plan().
            BadSchema, BadGrammar, InvalidRequest, Unsupported: see constrained().
        """
        is_constrained = params.constraint is not None
        plan = self.plan(options, tokens, controls, is_constrained=is_constrained)
        constraint = Constrained(params)  # of a plain chat: none
        if is_constrained or plan.tools or plan.choice not in ("auto", "none"):
            constraint = self._compiled(params, plan)
        form = _form(plan, constraint)
        strings, ends = params.stop, frozenset(params.stop_token_ids)
        if form is not None and (strings or ends):
            vocab = self._parts.vocab
            ends -= vocab.eog_tokens
            form, strings, ends = form.with_stops(strings, ends, vocab.pieces)
        return PlannedReply(
            constraint.params, form, strings, ends, constraint.n_relaxed
        )

    def plan(
        self,
        options: ChatOptions,
        tokens: array[int],
        controls: Mapping[int, bytes],
        *,
        is_constrained: bool = False,
    ) -> ReplyPlan:
        """
        The plan of the reply by the *options* of a chat that was rendered.

        Args:
            is_constrained: the answer has a form, which thoughts may come before.

        Raises:
            InvalidRequest: they do not fit each other.
            Unsupported: nothing can be found out about the template.
            ClosedError: the engine is closed.
        """
        tools = plain_value("tools", options.get("tools")) or []
        choice = _checked_choice(options.get("tool_choice") or "auto", tools)
        reply = options.get("reply")
        is_parallel = options.get("parallel_tool_calls", True)
        is_parsed = reply is not False
        if reply is None:
            is_parsed = bool(tools) or is_constrained
        # What is neither taken apart nor held to anything needs no specification.
        source: ReplySpec | str | None = None
        if is_parsed or not is_parallel or choice not in ("auto", "none"):
            template = options.get("chat_template") or self._parts.chat_template
            source = reply if isinstance(reply, ReplySpec) else template
        is_wish = reply is not None or bool(tools)
        try:
            bound = self._bound(source or ReplySpec())
        except Unsupported as error:
            if is_wish:
                raise
            _log.warning("a constraint holds from the first token on: %s", error)
            bound = self._bound(ReplySpec())
        if not is_wish and not (bound.spec.reasoning or bound.spec.messages):
            is_parsed = False  # all of it is the answer
        # The reply may have begun at the end of the prompt.
        prefix = ""
        if bound.spec.calls or bound.has_syntax:
            tail = tail_of(tokens, controls)
            prefix = self._encoder.detokenize(tail, special=True)
        variables = options.get("template_kwargs") or {}
        may_think = variables.get("enable_thinking") is not False
        if may_think and bound.spec.reasoning and isinstance(source, str):
            may_think = self._can_think(bound.spec.reasoning, source)
        return ReplyPlan(
            bound=bound,
            tools=[tool for tool in tools if isinstance(_name_of(tool), str)],
            choice=choice,
            is_parallel=is_parallel,
            is_parsed=is_parsed,
            prefix=prefix,
            may_think=may_think,
        )

    def _can_think(self, reasoning: ReasoningSpec, template: str) -> bool:
        """
        Whether the model thinks at all, as far as its *template* and its vocabulary show.

        Models of one syntax of calls think or do not. One that does not would have to choose between
        thoughts and a form of the answer, and might never come to an end of the thoughts.
        """
        names = [text.strip() for text in (*reasoning.start, *reasoning.end)]
        special = self._parts.vocab.special_texts
        return any(name in template or name in special for name in names)

    def _compiled(self, params: SamplingParams, plan: ReplyPlan) -> Constrained:
        """The constraint of a whole reply, which compiles; the engine remembers the latest."""
        vocab, run, make = self._parts.vocab, self._encoder.run, self._parts.make_rules

        def compiled(*, is_loose: bool) -> Constrained:
            constraint = constrained(params, plan, vocab, run, is_loose=is_loose)
            if constraint.params is not params:
                make(constraint.params, run)
            return constraint

        try:
            return compiled(is_loose=False)
        except BadSchema as error:
            # Of what the request has written itself, its own error says most.
            if params.constraint is not None:
                make(params, run)
            # Each schema may be small enough, and all of them together too much.
            with suppress(BadSchema):
                return compiled(is_loose=True)
            if error.name in (params.constraint, "tools"):
                raise
            raise BadSchema(params.constraint or "tools", error.reason) from error


def _form(plan: ReplyPlan, constraint: Constrained) -> ReplyForm | None:
    """The form of each output of *plan*; None: it is plain text."""
    if not plan.is_parsed:
        return None
    spec, marks = plan.bound
    # An answer that has a form, where there are no tools, may spell a call and is none.
    takes_calls = plan.choice != "none" and (plan.tools or not constraint.is_formed)
    takes_calls = bool(spec.calls and takes_calls)
    if not (takes_calls or plan.bound.has_syntax):
        return ReplyForm(None, marks)  # all is content
    make = partial(
        ReplyParser,
        spec,
        tools=plan.tools,
        prefix=plan.prefix,
        calls=takes_calls,
        is_formed=constraint.is_formed,
        keeps_space=constraint.keeps_space,
    )
    return ReplyForm(make, marks, spec.delimiters)


def tail_of(tokens: array[int], controls: Mapping[int, bytes]) -> array[int]:
    """
    The end of a prompt from its last control token on; nothing if it has none near its end.

    No message can write one, so a message is a part of it only if the reply goes on with it.
    The first token only begins the prompt.
    """
    for at in range(len(tokens) - 1, max(len(tokens) - MAX_TAIL, 0), -1):
        if tokens[at] in controls:
            return tokens[at:]
        if tokens[at] < 0:  # a row of an image or a sound
            break
    return array("i")


def _checked_choice(choice: str, tools: Sequence[Any]) -> str:
    names = [_name_of(tool) for tool in tools]
    if choice in ("auto", "none") or (tools and choice == "required"):
        return choice
    if not tools:
        allowed = "auto or none, because there are no tools"
        raise InvalidRequest("tool_choice", choice, allowed)
    if choice not in names:
        allowed = f"{', '.join(WORDS)} or the name of one of tools"
        raise InvalidRequest("tool_choice", choice, allowed)
    return choice


def _name_of(tool: Any) -> object:
    """The name of a tool, which is a function or holds one."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def _bound(
    parts: EngineParts, encoder: PromptEncoder, source: ReplySpec | str
) -> BoundSpec:
    """
    Find the specification of replies, for this vocabulary.

    Args:
        source: a specification, or the template that it is found by.
    """
    if isinstance(source, str):
        try:
            spec = reply_spec(source, parts.template_process) or ReplySpec()
        except (Unreadable, OSError) as error:
            reason = f"the chat template cannot be looked at: {error}"
            raise Unsupported("a reply that is taken apart", reason) from error
    else:
        spec = source
    vocab = parts.vocab
    ids: dict[str, int] = {}

    def is_special(text: str) -> bool:
        if text in vocab.special_texts and text not in ids:
            tokens = vocab.tokenize(text, add_special=False, parse_special=True)
            if len(tokens) == 1:
                ids[text] = tokens[0]
        return text in ids

    bound = encoder.run(partial(spec.bound, is_special))
    return BoundSpec(bound, {ids[name]: name.encode() for name in bound.special})


@lru_cache(MAX_KNOWN)
def reply_spec(source: str, is_apart: bool = True) -> ReplySpec | None:
    """
    Specification for replies of the model of the template *source*, found once.

    The first call may take a second, and some for a template that exceeds its limits.

    Args:
        is_apart: whether it runs in a process of its own.

    Returns:
        None if a reply is only content.

    Raises:
        Unreadable: the template cannot be compiled.
        OSError: no process can be started.
    """

    def render(
        messages: list[Any],
        tools: list[Any],
        *,
        add_generation_prompt: bool,
        **variables: Any,
    ) -> str | None:
        chat = {"tools": tools, "kwargs": variables, "asks": add_generation_prompt}
        try:
            return runner.render(messages, chat)[0]
        except (Exceeded, TemplateRefused):
            return None

    make = TemplateProcesses if is_apart else TemplateHere
    with closing(make(source, NO_TOKENS)) as runner:
        return spec_for(source, render)


# -- the grammar of a reply -------------------------------------------------------------


def constrained(
    params: SamplingParams,
    plan: ReplyPlan,
    vocab: TextVocab,
    run: Reading,
    *,
    is_loose: bool = False,
) -> Constrained:
    """
    *params* with which a reply is as *plan* and they ask for.

    Args:
        is_loose: of tools that are not strict only the names are kept.

    Raises:
        BadSchema: a schema or the name of a tool cannot be kept; it says which.
        BadGrammar: a grammar of *params* cannot be read.
        InvalidRequest: *params* ask for something that does not go with a call.
        Unsupported: nothing is known of how the model writes calls.
    """
    must = plan.choice not in ("auto", "none")
    kind = params.constraint
    # The model is free, unless a tool is strict or only one call is allowed. It is free, too,
    # where no syntax of calls is known, because nothing is a call then.
    if not must and kind is None:
        is_strict = any(map(is_strict_tool, plan.tools))
        if not (plan.may_call and (is_strict or not plan.is_parallel)):
            return Constrained(params)
    # A grammar of ours takes the place of these fields.
    if must or kind is None:
        for name in ("ignore_eos", "min_tokens", "grammar_triggers"):
            if getattr(params, name):
                allowed = "none beside a tool_choice, strict tools or parallel_tool_calls=False"
                raise InvalidRequest(name, getattr(params, name), allowed)
    if must and not plan.tools:
        raise InvalidRequest("tool_choice", plan.choice, "tools that have a name")
    # The request says itself where its grammar begins, or writes all of the reply.
    if params.grammar_triggers or (not must and _has_delimiters(params, plan)):
        return Constrained(params)
    # Nothing stands before or beside the answer: the constraint stays as it is.
    spec, prefix = plan.bound.spec, plan.prefix
    is_around = plan.may_call or opens_thoughts(spec, prefix, may_think=plan.may_think)
    if kind is not None and not must and not is_around:
        return Constrained(params, is_formed=True, keeps_space=kind != "json_schema")
    # All other cases: thoughts, calls and the answer in one grammar.
    return _composed(params, plan, vocab, run, must=must, is_loose=is_loose)


def _has_delimiters(params: SamplingParams, plan: ReplyPlan) -> bool:
    """Whether a grammar or an expression of *params* has a delimiter of the model in it."""
    text = params.regex or params.lark or params.grammar or ""
    tokens = (f"<[{token}]>" for token in plan.bound.marks)
    return any(mark in text for mark in (*plan.bound.spec.delimiters, *tokens))


def _composed(
    params: SamplingParams,
    plan: ReplyPlan,
    vocab: TextVocab,
    run: Reading,
    *,
    must: bool,
    is_loose: bool,
) -> Constrained:
    """*params* with one grammar of all that a reply may be."""
    # This and engine.constraint load the library of C, which a plain chat does not need.
    answer = _answer(params, vocab, run)
    tools: list[Tool] = []
    if must or answer is None or plan.may_call:
        choice = plan.choice
        allowed = [
            tool
            for tool in plan.tools
            if choice in ("auto", "required", _name_of(tool))
        ]
        tools = tools_of(allowed, checked_schema, is_loose=is_loose)
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
    limit = MAX_GRAMMAR + (len(answer.rule) + MAX_AROUND if answer else 0)
    if len(lark) > limit:
        text = f"the grammar of all has {len(lark)} characters, at most {limit} are allowed"
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


@lru_cache(maxsize=256)
def _tell_dropped(name: str, places: Sequence[str]) -> None:
    """Once for each, because an agent sends its tools with each request."""
    text = "tools: %r is not strict; no grammar holds, so nothing does: %s"
    _log.warning(text, name, ", ".join(dict.fromkeys(places)))


def _answer(
    params: SamplingParams, vocab: TextVocab, run: Reading
) -> AnswerForm | None:
    """The form that *params* want the text of a reply to have, as a rule of Lark."""
    if params.json_schema is not None:
        return AnswerForm(f"%json {checked_schema(params.json_schema)}", is_json=True)
    if params.regex is not None:
        rule = regex(with_ascii_classes(params.regex))
    elif params.lark is not None:
        rule = f"%lark {{\n{params.lark}\n}}"
    elif params.grammar is not None:
        rule = f"%lark {{\n{_lark_of_gbnf(params, vocab, run)}\n}}"
    else:
        return None
    return AnswerForm(rule, keeps_space=may_begin_with_space(rule))


def _lark_of_gbnf(params: SamplingParams, vocab: TextVocab, run: Reading) -> str:
    """The grammar in GBNF as one of Lark; tokens without text are no text."""

    def find_token(name: int | str) -> int | None:
        if isinstance(name, int):
            return name if name < vocab.n_tokens else None
        tokens = run(
            lambda: vocab.tokenize(f"<{name}>", add_special=False, parse_special=True)
        )
        return tokens[0] if len(tokens) == 1 else None

    silent = {token for token, piece in enumerate(vocab.pieces) if not piece}
    assert params.grammar is not None
    ends = vocab.eog_tokens
    return to_lark(params.grammar, params.grammar_root, find_token, silent | ends)
