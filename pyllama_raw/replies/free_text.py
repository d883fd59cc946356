"""Rules for text in which whatever begins a call is one."""

from __future__ import annotations

from collections.abc import Callable

from pyllama_raw.replies.call_rules import CallRules
from pyllama_raw.replies.lark import ANY, Lark, Parts, Rule, Spelled

NO_BRACKET = r"\s*([^\s{\[](?s:.*))?"  # where calls need no delimiter


class FreeText:
    """Text, and calls from the delimiters on that begin them."""

    def __init__(self, lark: Lark, rules: CallRules) -> None:
        self._lark, self._rules, self._calls = lark, rules, rules.calls
        self._openings = {*self._calls.open, *self._calls.start}
        plain, marked = lark.split(self._openings)
        # A shorter one is found within a longer one.
        self._texts = [
            text
            for text in sorted(plain)
            if not any(other in text for other in plain if other != text)
        ]
        self._tokens = {token for text in marked for token in lark.tokens_in(text)[:1]}

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
