"""
The grammar of a whole reply: reasoning, then calls of tools or an answer that has a form.

A model that thinks does so before anything else, so what a request asks for begins where the
reasoning ends: where the prompt has begun it, after its end; where the model may begin it, with or
without it; where the prompt has ended it, at once. Calls are in the syntax of the model. Only the
tools that are given are called, with arguments that their schemas allow. The answer is what a
schema, a regular expression or a grammar of the request says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from pyllama_raw.errors import Unsupported
from pyllama_raw.replies.call_rules import ANY, CallRules, Lark, Parts, Rule, Spelled
from pyllama_raw.replies.parser import Content, Reasoning, parts_of, text_of
from pyllama_raw.replies.schemas import Tool
from pyllama_raw.replies.spec import (
    CallsSpec,
    MessageRule,
    MessagesSpec,
    ReasoningSpec,
    ReplySpec,
)

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
    # Calls, if their syntax is known. Text without a form may have calls of no tool at all.
    rules: CallRules | None = None
    if spec.calls and (tools or answer is None):
        rules = CallRules(lark, spec.calls, tools, parallel=parallel)
    elif answer is None:
        reason = (
            "how the chat template writes calls is not known: give a ReplySpec as reply"
        )
        raise Unsupported("a call that has to be made", reason)
    # Messages with headers have rules of their own.
    if spec.messages:
        messages = MessageRules(lark, spec.messages, rules, may_think=may_think)
        rule = answer and answer.rule
        return lark.grammar(messages.start(prefix, must=must, answer=rule))
    # Free text, in which calls are as they should be.
    if rules and not must and answer is None:
        return lark.grammar(_free(lark, rules, prefix))
    # Calls, the answer, or one of both, behind thoughts.
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
    after = lark.rule(f"{end} ({bodies_after})")
    # The prompt has begun to think, so the reply ends that.
    if thinks:
        return after
    # The model may begin to think by its own choice.
    return f"{lark.row(lark.first_of(reasoning.start))} {after} | {bodies}"


def _wrapped(lark: Lark, answer: AnswerForm) -> Rule:
    """The *answer*, perhaps after special tokens that mean nothing, as models put there."""
    delimiters = [lark.delimiter(text) for text in lark.spec.ignored]
    before = [parts for parts in delimiters if isinstance(parts[0], Rule)]
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
    # Reasoning that never ends is all of the reply.
    end = _thought(lark, rules.calls, reasoning)
    unended = lark.terminal(lark.without(lark.plain(reasoning.end)))
    after = lark.rule(f"{end} {body} | {unended}")
    if thinks:
        return after
    begin = lark.until(reasoning.start, r"\s*")
    return f"{begin} {after} | {body}"


def _thought(lark: Lark, calls: CallsSpec | None, reasoning: ReasoningSpec) -> Rule:
    """Reasoning with its end; what begins a call is in it only where that begins none."""
    openings = [*calls.open, *calls.start] if calls and reasoning.calls else []
    never, ends = lark.plain(openings), lark.plain(reasoning.end)
    end = lark.until(reasoning.end, never=never)
    own = {t for text in (*openings, *reasoning.end) for t in lark.tokens_in(text)}
    tokens = [token for token in lark.special if token not in own]
    if not tokens:
        return end
    text = lark.terminal(lark.without([*ends, *never], "(?s:.+)"))
    return lark.rule(f"({' | '.join([text, *tokens])})* {end}")


def _thinks(spec: ReplySpec, prefix: str, may_think: bool = True) -> bool | None:
    """Whether the reply goes on with reasoning; None: it may begin some."""
    # The parser knows best whether the prompt ends within thoughts.
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
        pieces = (
            f"({text} | {call})*" if rules.parallel else f"{text}* ({call} {text}*)?"
        )
        if not self._calls.bare:
            return lark.rule(pieces)
        # Calls without a delimiter come first, or text that begins with no bracket.
        bare = rules.section([], is_open=False)
        plain = lark.terminal(lark.without(self._texts, NO_BRACKET))
        after = pieces if rules.parallel else f"{text}*"
        choices = [f"{bare} {after}", f"{plain} {pieces}", f"{call} {after}", '""']
        return lark.rule(" | ".join(choices))

    def _text(self) -> Rule:
        """A piece of text, or a token that begins no call."""
        lark = self._lark
        plain = Rule(lark.terminal(lark.without(self._texts, "(?s:.+)")))
        tokens = ([token] for token in lark.special if token not in self._tokens)
        return lark.one_of([[plain], *tokens, *self._known()])

    def _known(self) -> list[Parts]:
        """Other delimiters that begin with a token that may begin a call."""
        spec = self._lark.spec
        reasoning = spec.reasoning
        texts = [*reasoning.start, *reasoning.end] if reasoning else []
        delimiters = [
            self._lark.delimiter(text)
            for text in (*spec.ignored, *texts)
            if text not in self._openings
        ]
        return [
            parts for parts in delimiters if parts[0] in self._tokens and len(parts) > 1
        ]

    def _all_calls(self) -> list[Rule]:
        calls, rules = self._calls, self._rules
        makers = (calls.open, rules.section), (calls.start, rules.started)
        openings = ((text, make) for texts, make in makers for text in texts)
        return list(dict.fromkeys(self._begun(*opening) for opening in openings))

    def _begun(self, text: str, make: Callable[[Parts], Rule]) -> Rule:
        """Calls that *text* begins, with the text before it."""
        lark = self._lark
        trigger = next((t for t in self._texts if t in text), None)
        # A special token begins the calls: the lexer needs no text before it.
        if trigger is None:
            parts = lark.delimiter(text)
            first = next(n for n, part in enumerate(parts) if isinstance(part, Rule))
            return make(parts[first:])
        before = lark.first(f"{ANY} {lark.row([Spelled(trigger)])}")
        tail = lark.delimiter(text.partition(trigger)[2])
        return lark.rule(f"{before} {make(tail)}")


# -- replies of several messages ---------------------------------------------------------

SPACE = re.compile(r"(?= )")


class MessageRules:
    """
    Messages with written headers; those of a call have calls of the tools of *calls*.

    Args:
        calls: None: there are no calls.
        may_think: there may be messages of reasoning.
    """

    def __init__(
        self,
        lark: Lark,
        messages: MessagesSpec,
        calls: CallRules | None,
        *,
        may_think: bool = True,
    ) -> None:
        self._lark, self._messages, self._calls = lark, messages, calls
        self._may_think = may_think
        between = "".join([*messages.end[:1], messages.start[0]])
        self._between = lark.row(lark.delimiter(between))
        self._until = lark.until([between])
        self._last = lark.terminal(lark.without(lark.plain([between])))

    def start(self, prefix: str, *, must: bool, answer: str | None = None) -> str:
        """
        Rule of what follows *prefix*, the end of the prompt.

        Args:
            must: the last messages are calls.
            answer: the body of a rule for the content, where it has to have a form.
        """
        lark, between = self._lark, self._between
        place = self._place(prefix)
        # Messages of any kind.
        if not must and answer is None:
            reply = self._free()
            if place != "reasoning":
                return reply
            return f"{self._until} {reply} | {self._last}"
        # The last messages are calls, or the answer; thoughts may come before.
        last: list[str] = []
        if self._calls:
            call = lark.one_of(self._called())
            again = f"({between} {call})*" if self._calls.parallel else ""
            last.append(f"{call} {again}")
        if answer is not None and not must:
            body, [header, *_] = lark.rule(answer), self._headers("content")
            if place == "content":
                return body
            last.append(f"{lark.row(header)} {body}")
        thoughts = self._headers("reasoning") if self._may_think else ()
        before = f"({lark.one_of(thoughts)} {self._until})*" if thoughts else ""
        reply = lark.rule(f"{before} ({' | '.join(last)})")
        return reply if place != "reasoning" else f"{self._until} {reply}"

    def _free(self) -> Rule:
        """Messages of any kind, with calls among them."""
        lark, calls = self._lark, self._calls
        assert calls is not None
        call = lark.one_of(self._called())
        free = lark.one_of(self._headers("reasoning", "content"))
        piece = f"{free} {self._until}"
        again = f" | {call} {self._between}" if calls.parallel else ""
        return lark.rule(f"({piece}{again})* ({free} {self._last} | {call})")

    def _headers(self, *kinds: str) -> Sequence[Parts]:
        lark, middle = self._lark, self._messages.middle
        return [
            [*lark.delimiter(rule.written), *lark.first_of(middle)]
            for rule in self._messages.rules
            if rule.kind in kinds
        ]

    def _called(self) -> Sequence[Parts]:
        """Messages that are calls."""
        messages: list[Parts] = []
        calls = self._calls
        assert calls is not None
        for rule in self._messages.rules:
            for tool in calls.tools if rule.kind == "call" else ():
                is_named = "(?P<name>" in rule.header
                body = calls.arguments(tool) if is_named else calls.all()
                for written in self._spellings(rule, tool):
                    header = self._lark.form(written, {"name": Spelled(tool.name)})
                    middle = self._lark.first_of(self._messages.middle)
                    messages.append([*header, *middle, body])
        return messages

    def _spellings(self, rule: MessageRule, tool: Tool) -> Sequence[str]:
        """Headers of a call: its recipient may stand after what it is, where that is read."""
        # The part from the first token on may come first.
        first, *tail = rule.written.split("<", 1)
        kind, *behind = SPACE.split("<" + tail[0], maxsplit=1) if tail else ("",)
        moved = kind + first + "".join(behind)
        written = [
            text
            for text in dict.fromkeys([rule.written, moved])
            if self._is_read(rule, text, tool)
        ]
        if not written:
            text = f"the format of the model has no place for the name {tool.name!r}"
            raise tool.bad(text)
        return written

    def _is_read(self, rule: MessageRule, written: str, tool: Tool) -> bool:
        """Whether the first rule for a header is *rule*, with the name of *tool*."""
        match = self._messages.rule_of(written.replace("{name}", tool.name))
        if match is None or match[0] is not rule:
            return False
        delimiters = [*self._messages.middle, *self._lark.spec.special]
        is_whole = not any(text in tool.name for text in delimiters)
        return is_whole and match[1].groupdict().get("name", tool.name) == tool.name

    def _place(self, prefix: str) -> Literal["", "reasoning", "content"]:
        """The kind of the message in which the prompt ends, after its header; empty: in none."""
        spec, middle = self._lark.spec, self._messages.middle[0]
        # Where a header of content is read as one, the prompt ends in no message.
        for rule in self._messages.rules:
            if rule.kind == "content":
                parts = parts_of(spec, f"{rule.written}{middle}x", prefix=prefix)
                if text_of(parts, Content) + text_of(parts, Reasoning) == "x":
                    return ""
        parts = parts_of(spec, "x", prefix=prefix)
        return "reasoning" if text_of(parts, Reasoning) else "content"
