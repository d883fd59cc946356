"""
The grammar by which a model calls tools, in its own syntax.

Only the tools that are given are called, with arguments that their schemas allow. Reasoning comes
before, where the prompt does not end it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyllama_raw.errors import Unsupported
from pyllama_raw.replies.call_rules import CallRules
from pyllama_raw.replies.free_text import FreeText
from pyllama_raw.replies.lark import Lark, Rule
from pyllama_raw.replies.message_rules import MessageRules
from pyllama_raw.replies.parser import parts_of
from pyllama_raw.replies.parts import Reasoning, text_of
from pyllama_raw.replies.spec import CallsSpec, ReasoningSpec, ReplySpec
from pyllama_raw.replies.tool_schemas import Tool

LINES = r"/\n{1,2}/"  # between reasoning and calls


def lark_for(
    spec: ReplySpec,
    ids: Mapping[str, int],
    tools: Sequence[Tool],
    *,
    must: bool,
    parallel: bool,
    prefix: str,
) -> str:
    """
    A grammar for llguidance, which says what a whole reply may be.

    Args:
        spec: bound to the vocabulary.
        ids: tokens of the special names of *spec*; they have no text in the tokenizer.
        must: the reply has a call. Otherwise it is text in which calls are as they should be.
        parallel: it may have several calls.
        prefix: the end of the prompt, as the parser takes it.

    Raises:
        BadSchema: a schema or a name is not possible in this syntax.
        Unsupported: nothing is known of calls.
    """
    if spec.calls is None:
        reason = (
            "how the chat template writes calls is not known: give a ReplySpec as reply"
        )
        raise Unsupported("a call that has to be made", reason)
    lark = Lark(spec, ids)
    rules = CallRules(lark, spec.calls, tools, parallel=parallel)
    if spec.messages:
        messages = MessageRules(lark, spec.messages, rules)
        return lark.grammar(messages.start(prefix, must=must))
    body = rules.all() if must else FreeText(lark, rules).reply()
    thinks = _thinks(spec, prefix)
    if spec.reasoning is None or thinks is False:
        return lark.grammar(body)
    then = _called if must else _free
    return lark.grammar(then(lark, spec.calls, spec.reasoning, body, thinks))


def _called(
    lark: Lark,
    calls: CallsSpec,
    reasoning: ReasoningSpec,
    body: Rule,
    thinks: bool | None,
) -> str:
    """Calls, with reasoning before them."""
    first = next(iter([*calls.open, *calls.start]), "")
    lines = "" if first[:1].isspace() else f" {LINES}?"
    thought = f"{_thought(lark, calls, reasoning)}{lines}"
    if thinks:
        return f"{thought} {body}"
    begin = lark.row(lark.first_of(reasoning.start))
    return f"({begin} {thought})? {body}"


def _free(
    lark: Lark,
    calls: CallsSpec,
    reasoning: ReasoningSpec,
    body: Rule,
    thinks: bool | None,
) -> str:
    """Text with calls in it, perhaps with reasoning before it in which nothing is a call."""
    if reasoning.calls:
        return body
    end = _thought(lark, calls, reasoning)
    plain, _ = lark.split(reasoning.end)
    rest = lark.rule(f"{end} {body} | {lark.terminal(lark.without(plain))}")
    if thinks:
        return rest
    begin = lark.until(reasoning.start, r"\s*")
    return f"{begin} {rest} | {body}"


def _thought(lark: Lark, calls: CallsSpec, reasoning: ReasoningSpec) -> Rule:
    """Reasoning with its end; what begins a call is in it only where that begins none."""
    openings = [*calls.open, *calls.start] if reasoning.calls else []
    never, _ = lark.split(openings)
    ends, _ = lark.split(reasoning.end)
    end = lark.until(reasoning.end, never=never)
    taken = {t for text in (*openings, *reasoning.end) for t in lark.tokens_in(text)}
    others = [token for token in lark.special if token not in taken]
    if not others:
        return end
    text = lark.terminal(lark.without([*ends, *never], "(?s:.+)"))
    return lark.rule(f"({' | '.join([text, *others])})* {end}")


def _thinks(spec: ReplySpec, prefix: str) -> bool | None:
    """Whether the reply goes on with reasoning; None: it may begin some."""
    if text_of(parts_of(spec, "x", prefix=prefix), Reasoning):
        return True
    reasoning = spec.reasoning
    ended = reasoning and any(end.strip() in prefix for end in reasoning.end)
    return False if ended else None
