"""Rules for text in which whatever begins a call is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pyllama_raw.replies.call_rules import CallRules
from pyllama_raw.replies.lark import ANY, Lark, Parts, Rule
from pyllama_raw.replies.spec import CallsSpec, ReplySpec

NO_BRACKET = r"\s*([^\s{\[](?s:.*))?"  # where calls need no delimiter


class FreeText:
    """Text, and calls from the delimiters on that begin them."""

    def __init__(
        self, lark: Lark, spec: ReplySpec, calls: CallsSpec, rules: CallRules
    ) -> None:
        self._lark, self._spec, self._calls, self._rules = lark, spec, calls, rules
        texts = {*calls.open, *calls.start}
        plain, _ = lark.split(texts)
        # A shorter one is found within a longer one.
        self._texts = [
            text
            for text in sorted(plain)
            if not any(other in text for other in plain if other != text)
        ]
        self._tokens = sorted(
            {token for text in texts - set(plain) for token in self._first_token(text)}
        )

    def reply(self, *, parallel: bool) -> Rule:
        """Text and calls; not *parallel*: the text after the first call has none."""
        lark = self._lark
        text, call = self.text(), lark.one_of([[call] for call in self._all_calls()])
        more = f"({text} | {call})*" if parallel else f"{text}* ({call} {text}*)?"
        if not self._calls.bare:
            return lark.rule(more)
        bare = self._rules.section([], is_open=False)
        plain = lark.terminal(self._plain(NO_BRACKET))
        rest = more if parallel else f"{text}*"
        choices = [f"{bare} {rest}", f"{plain} {more}", f"{call} {rest}", '""']
        return lark.rule(" | ".join(choices))

    def text(self) -> Rule:
        """A piece of text, or a token that begins no call."""
        lark = self._lark
        others = [t for t in lark.tokens(self._spec.special) if t not in self._tokens]
        known = [rest for text in self._known() for rest in [lark.delimiter(text)]]
        plain = Rule(lark.terminal(self._plain("(?s:.+)")))
        return lark.one_of([[plain], *([token] for token in others), *known])

    def _plain(self, pattern: str) -> str:
        return self._lark.without(self._texts, pattern)

    def _all_calls(self) -> list[Rule]:
        calls, rules = self._calls, self._rules
        makers = (calls.open, rules.section), (calls.start, rules.started)
        begun = (self._begun(text, make) for texts, make in makers for text in texts)
        return list(dict.fromkeys(begun))

    def _begun(self, text: str, make: Callable[[Parts], Rule]) -> Rule:
        """Calls that *text* begins, with the text before it."""
        lark = self._lark
        trigger = next((t for t in self._texts if t in text), None)
        parts = lark.delimiter(text)
        if trigger is None:
            first = next(n for n, part in enumerate(parts) if isinstance(part, Rule))
            return make(parts[first:])
        before = lark.first(f"{ANY} {lark.row([type(parts[0])(trigger)])}")
        rest = text[text.index(trigger) + len(trigger) :]
        return lark.rule(f"{before} {make(lark.delimiter(rest))}")

    def _first_token(self, text: str) -> Sequence[Rule]:
        return [part for part in self._lark.delimiter(text) if isinstance(part, Rule)][
            :1
        ]

    def _known(self) -> list[str]:
        """Other delimiters that begin with a token that may begin a call."""
        spec = self._spec
        reasoning = (
            [*spec.reasoning.start, *spec.reasoning.end] if spec.reasoning else []
        )
        opening = {*self._calls.open, *self._calls.start}
        return [
            text
            for text in (*spec.ignored, *reasoning)
            if text not in opening
            and (parts := self._lark.delimiter(text))[0] in self._tokens
            and len(parts) > 1
        ]
