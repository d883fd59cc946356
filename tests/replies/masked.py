"""Replies drawn at random from what a constraint allows, in a vocabulary of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

from pyllama_raw.engine.guidance import checked_schema
from pyllama_raw.native.sampler import MaskTokenizer, Matcher
from pyllama_raw.replies.constraint import AnswerForm, lark_for
from pyllama_raw.replies.parser import (
    Content,
    Part,
    Reasoning,
    ReplyParser,
    calls_of,
    text_of,
)
from pyllama_raw.replies.schemas import tools_of
from pyllama_raw.replies.spec import ReplySpec
from tests.replies.written import is_special

CLOSING = '<"}]),\n:>'  # drawn often, so that replies end


class Drawn(NamedTuple):
    """A reply, and what the parser makes of it."""

    text: str
    has_ended: bool
    content: str
    calls: list[tuple[str, str]]
    reasoning: str


class Masked:
    """Draws replies to *tools* in the syntax of *spec*."""

    def __init__(
        self,
        spec: ReplySpec,
        tools: Sequence[dict[str, Any]],
        prefix: str = "",
        answer: AnswerForm | None = None,
        **how: bool,
    ) -> None:
        self._spec, self._tools, self._prefix = spec.bound(is_special), tools, prefix
        self._marks = sorted(self._spec.special)
        ids = {name: 256 + index for index, name in enumerate(self._marks)}
        made = tools_of(tools, checked_schema)
        lark = lark_for(self._spec, ids, made, prefix=prefix, answer=answer, **how)
        self._answer = answer
        names = [b"\xff" + name.encode() for name in [*self._marks, "end"]]
        self._end = 255 + len(names)
        pieces = [*(bytes([byte]) for byte in range(256)), *names]
        self._tokenizer = MaskTokenizer(pieces, [self._end], None)
        self._lark = lark

    def draw(self, seed: int, begin: str = "", limit: int = 600) -> Drawn:
        """A reply that begins with *begin*, if that is allowed."""
        random = Random(seed)  # noqa: S311
        matcher = Matcher.compile(self._tokenizer, "lark", self._lark)
        tokens: list[int] = []
        for token in self.tokens_of(begin):
            assert token in self._allowed(matcher), (begin, bytes(tokens))
            matcher.accept(token)
            tokens.append(token)
        while len(tokens) < limit:
            allowed = self._allowed(matcher)
            if self._end in allowed and (len(allowed) == 1 or random.random() < 0.3):
                return self._parsed(tokens, has_ended=True)
            rest = [token for token in allowed if token != self._end]
            easy = [t for t in rest if 32 < t < 127 or t > 255] or rest
            closing = [t for t in easy if t > 255 or chr(t) in CLOSING]
            often = closing and random.random() < 0.5
            tokens.append(random.choice(closing if often else easy))
            matcher.accept(tokens[-1])
        return self._parsed(tokens, has_ended=False)

    def tokens_of(self, text: str) -> list[int]:
        return [
            token
            for piece, special in self._spec.pieces(text)
            for token in (
                [256 + self._marks.index(piece)] if special else piece.encode()
            )
        ]

    def _allowed(self, matcher: Matcher) -> list[int]:
        matcher.compute_mask()
        assert not matcher.error
        mask = matcher.mask
        found = [t for t in range(self._end + 1) if mask[t // 32] >> t % 32 & 1]
        assert found
        return found

    def _parsed(self, tokens: Sequence[int], *, has_ended: bool) -> Drawn:
        answer = self._answer
        parser = ReplyParser(
            self._spec,
            tools=self._tools,
            prefix=self._prefix,
            calls=answer is None or bool(self._tools),
            is_formed=answer is not None,
            keeps_space=answer is not None and answer.keeps_space,
        )
        parts: list[Part] = []
        text, held = "", b""
        for token in [*tokens, None]:
            if token is not None and token < 256:
                held += bytes([token])
                continue
            parts += parser.feed(held.decode(errors="replace"))
            text, held = text + held.decode(errors="replace"), b""
            if token is not None:
                parts += parser.feed(self._marks[token - 256], special=True)
                text += self._marks[token - 256]
        parts += parser.finish()
        calls = [(call.name, call.arguments) for call in calls_of(parts)]
        said, thought = text_of(parts, Content), text_of(parts, Reasoning)
        return Drawn(text, has_ended, said, calls, thought)
