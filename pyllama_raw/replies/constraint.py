"""
The grammar of a whole reply: reasoning, then calls of tools or an answer that has a form.

A model that thinks does so before anything else, so what a request asks for begins where the
reasoning ends: where the prompt has begun it, after its end; where the model may begin it, with or
without it; where the prompt has ended it, at once. Calls are in the syntax of the model. Only the
tools that are given are called, with arguments that their schemas allow. The answer is what a
schema, a regular expression or a grammar of the request says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from pyllama_raw.errors import Unsupported
from pyllama_raw.replies.call_rules import CallRules
from pyllama_raw.replies.lark import ANY, Lark, Parts, Rule, Spelled
from pyllama_raw.replies.message_rules import MessageRules
from pyllama_raw.replies.parser import parts_of
from pyllama_raw.replies.parts import Reasoning, text_of
from pyllama_raw.replies.spec import CallsSpec, ReasoningSpec, ReplySpec
from pyllama_raw.replies.tool_schemas import Tool

LINES = r"/\n{1,2}/"  # between reasoning and calls
NO_BRACKET = r"\s*([^\s{\[](?s:.*))?"  # where calls need no delimiter


class AnswerForm(NamedTuple):
    """Form that the content of a reply has to have."""

    rule: str  # the body of a rule of llguidance's Lark
    is_json: bool = False
    keeps_space: bool = False  # white space that it begins with belongs to it


def lark_for(
    spec: ReplySpec,
    ids: Mapping[str, int],
    tools: Sequence[Tool],
    *,
    must: bool,
    parallel: bool,
    prefix: str,
    answer: AnswerForm | None = None,
    may_think: bool = True,
) -> str:
    """
    A grammar for llguidance, which says what a whole reply may be.

    Args:
        spec: bound to the vocabulary.
        ids: tokens of the special names of *spec*; they have no text in the tokenizer.
        must: the reply has a call. Otherwise it is the *answer*, or without one text in which
            calls are as they should be.
        parallel: it may have several calls.
        prefix: the end of the prompt, as the parser takes it.
        answer: what the reply says if it does not call, which it only can if there are *tools*.
        may_think: the model may begin to think by its own choice.

    Raises:
        BadSchema: a schema or a name is not possible in this syntax.
        Unsupported: nothing is known of calls.
    """
    lark = Lark(spec, ids)
    rules: CallRules | None = None
    if spec.calls and (tools or answer is None):
        rules = CallRules(lark, spec.calls, tools, parallel=parallel)
    elif answer is None:
        reason = (
            "how the chat template writes calls is not known: give a ReplySpec as reply"
        )
        raise Unsupported("a call that has to be made", reason)
    if spec.messages:
        messages = MessageRules(lark, spec.messages, rules, may_think=may_think)
        rule = answer and answer.rule
        return lark.grammar(messages.start(prefix, must=must, answer=rule))
    if rules and not must and answer is None:
        return lark.grammar(_free(lark, rules, prefix))
    choices = []
    if rules:
        first = next(iter([*rules.calls.open, *rules.calls.start]), "")
        is_json = answer is not None and answer.is_json
        choices.append(Ending(rules.all(beside_json=is_json), not first[:1].isspace()))
    if answer and not must:
        choices.append(Ending(_wrapped(lark, answer), not answer.keeps_space))
    return lark.grammar(
        _after_thoughts(lark, rules, choices, prefix, may_think=may_think)
    )


class Ending(NamedTuple):
    """A rule for what comes after reasoning."""

    rule: Rule
    has_lines: bool  # lines may stand between reasoning and it


def opens_thoughts(spec: ReplySpec, prefix: str, *, may_think: bool) -> bool:
    """Whether a reply may have something before its content, or headers around it."""
    if spec.messages:
        return True
    return spec.reasoning is not None and _thinks(spec, prefix, may_think) is not False


def _after_thoughts(
    lark: Lark,
    rules: CallRules | None,
    choices: Sequence[Ending],
    prefix: str,
    *,
    may_think: bool,
) -> str:
    """One of *choices*, with reasoning before it where that has begun or may begin."""
    reasoning = lark.spec.reasoning
    thinks = _thinks(lark.spec, prefix, may_think)
    bodies = " | ".join(choice.rule for choice in choices)
    if reasoning is None or thinks is False:
        return bodies
    end = _thought(lark, rules.calls if rules else None, reasoning)
    bodies_after = " | ".join(
        f"{LINES}? {choice.rule}" if choice.has_lines else choice.rule
        for choice in choices
    )
    rest = lark.rule(f"{end} ({bodies_after})")
    if thinks:
        return rest
    return f"{lark.row(lark.first_of(reasoning.start))} {rest} | {bodies}"


def _wrapped(lark: Lark, answer: AnswerForm) -> Rule:
    """The *answer*, perhaps after special tokens that mean nothing, as models put there."""
    found = [lark.delimiter(text) for text in lark.spec.ignored]
    before = [parts for parts in found if isinstance(parts[0], Rule)]
    body = lark.rule(answer.rule)
    return lark.rule(f"{lark.one_of(before)}{{0,2}} {body}") if before else body


def _free(lark: Lark, rules: CallRules, prefix: str) -> str:
    """
    Text with calls, and reasoning before it, perhaps.

    Reasoning without an end is all, and nothing in it is a call.
    """
    reasoning, body = lark.spec.reasoning, FreeText(lark, rules).reply()
    thinks = _thinks(lark.spec, prefix)
    if reasoning is None or thinks is False or reasoning.calls:
        return body
    end = _thought(lark, rules.calls, reasoning)
    unended = lark.terminal(lark.without(lark.plain(reasoning.end)))
    rest = lark.rule(f"{end} {body} | {unended}")
    if thinks:
        return rest
    begin = lark.until(reasoning.start, r"\s*")
    return f"{begin} {rest} | {body}"


def _thought(lark: Lark, calls: CallsSpec | None, reasoning: ReasoningSpec) -> Rule:
    """Reasoning with its end; what begins a call is in it only where that begins none."""
    openings = [*calls.open, *calls.start] if calls and reasoning.calls else []
    never, ends = lark.plain(openings), lark.plain(reasoning.end)
    end = lark.until(reasoning.end, never=never)
    taken = {t for text in (*openings, *reasoning.end) for t in lark.tokens_in(text)}
    others = [token for token in lark.special if token not in taken]
    if not others:
        return end
    text = lark.terminal(lark.without([*ends, *never], "(?s:.+)"))
    return lark.rule(f"({' | '.join([text, *others])})* {end}")


def _thinks(spec: ReplySpec, prefix: str, may_think: bool = True) -> bool | None:
    """Whether the reply goes on with reasoning; None: it may begin some."""
    if text_of(parts_of(spec, "x", prefix=prefix), Reasoning):
        return True
    reasoning = spec.reasoning
    ended = reasoning and any(end.strip() in prefix for end in reasoning.end)
    return False if ended or not may_think else None


class FreeText:
    """Text, and calls from the delimiters on that begin them."""

    def __init__(self, lark: Lark, rules: CallRules) -> None:
        self._lark, self._rules, self._calls = lark, rules, rules.calls
        self._openings = {*self._calls.open, *self._calls.start}
        plain = lark.plain(self._openings)
        # A shorter one is found within a longer one.
        self._texts = [
            text
            for text in sorted(plain)
            if not any(other in text for other in plain if other != text)
        ]
        self._tokens = {t for text in self._openings for t in lark.tokens_in(text)[:1]}

    def reply(self) -> Rule:
        """Text and calls; not parallel: the text after the first call has none."""
        lark, rules = self._lark, self._rules
        text, call = self._text(), lark.one_of([call] for call in self._all_calls())
        more = f"({text} | {call})*" if rules.parallel else f"{text}* ({call} {text}*)?"
        if not self._calls.bare:
            return lark.rule(more)
        bare = rules.section([], is_open=False)
        plain = lark.terminal(lark.without(self._texts, NO_BRACKET))
        rest = more if rules.parallel else f"{text}*"
        choices = [f"{bare} {rest}", f"{plain} {more}", f"{call} {rest}", '""']
        return lark.rule(" | ".join(choices))

    def _text(self) -> Rule:
        """A piece of text, or a token that begins no call."""
        lark = self._lark
        plain = Rule(lark.terminal(lark.without(self._texts, "(?s:.+)")))
        others = ([token] for token in lark.special if token not in self._tokens)
        return lark.one_of([[plain], *others, *self._known()])

    def _known(self) -> list[Parts]:
        """Other delimiters that begin with a token that may begin a call."""
        spec = self._lark.spec
        reasoning = spec.reasoning
        texts = [*reasoning.start, *reasoning.end] if reasoning else []
        found = [
            self._lark.delimiter(text)
            for text in (*spec.ignored, *texts)
            if text not in self._openings
        ]
        return [parts for parts in found if parts[0] in self._tokens and len(parts) > 1]

    def _all_calls(self) -> list[Rule]:
        calls, rules = self._calls, self._rules
        makers = (calls.open, rules.section), (calls.start, rules.started)
        begun = (self._begun(text, make) for texts, make in makers for text in texts)
        return list(dict.fromkeys(begun))

    def _begun(self, text: str, make: Callable[[Parts], Rule]) -> Rule:
        """Calls that *text* begins, with the text before it."""
        lark = self._lark
        trigger = next((t for t in self._texts if t in text), None)
        if trigger is None:
            parts = lark.delimiter(text)
            first = next(n for n, part in enumerate(parts) if isinstance(part, Rule))
            return make(parts[first:])
        before = lark.first(f"{ANY} {lark.row([Spelled(trigger)])}")
        rest = lark.delimiter(text.partition(trigger)[2])
        return lark.rule(f"{before} {make(rest)}")
