"""
Prompts to token ids: text, chat messages, or ids that are only checked.

Text is tokenized as llama-server does: special tokens are added and control tokens
written in it are understood. What is written inside a chat message is only text: a
message cannot end its own turn.
"""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Condition
from typing import TYPE_CHECKING, Any, Self, TypeGuard, TypeVar

from pyllama_raw.chat import ChatTemplate, Message
from pyllama_raw.errors import ClosedError, InvalidRequest, PromptTooLong

if TYPE_CHECKING:
    from pyllama_raw.engine.parts import EngineParts, TextVocab

T = TypeVar("T")

Prompt = str | Sequence[int] | Sequence[Message]

LONG_PROMPT = 4096  # characters that an event loop may wait for


class PromptEncoder:
    """Checks prompts and makes tokens of them; any thread may call it."""

    def __init__(
        self, vocab: TextVocab, chat_template: str | None, n_ctx_slot: int
    ) -> None:
        self._vocab = vocab
        self._n_ctx_slot = n_ctx_slot
        self._bos_text = _text_of(vocab, vocab.bos)
        self._chat = ChatTemplate(
            chat_template,
            bos_token=self._bos_text,
            eos_token=_text_of(vocab, vocab.eos),
        )
        self._idle = Condition()
        self._n_users = 0
        self._closed = False

    @classmethod
    def of(cls, parts: EngineParts) -> Self:
        """The encoder for the model of *parts*."""
        limits = parts.scheduler.limits
        return cls(parts.vocab, parts.chat_template, limits.n_ctx_slot)

    def takes_long(self, prompt: Prompt) -> bool:
        """Whether encode() is not for an event loop; the first chat imports Jinja."""
        if _is_chat(prompt):
            n_characters = sum(len(str(message)) for message in prompt)
            return n_characters > LONG_PROMPT or not self._chat.is_compiled
        return isinstance(prompt, str) and len(prompt) > LONG_PROMPT

    def encode(self, prompt: Prompt) -> array[int]:
        """
        Tokens of *prompt*, never empty, that leave room for an output token.

        Raises:
            InvalidRequest: not text, not token ids of this model, or not messages.
            PromptTooLong: it does not fit a slot.
            Unsupported: messages, but the model has no chat template.
        """
        with self._using_vocab():
            tokens = self._tokens(prompt)
        if not tokens:
            raise InvalidRequest("prompt", prompt, "at least one token")
        if len(tokens) >= self._n_ctx_slot:
            raise PromptTooLong(len(tokens), self._n_ctx_slot)
        return tokens

    def run(self, function: Callable[[], T]) -> T:
        """Call *function*, which may use the vocabulary."""
        with self._using_vocab():
            return function()

    def close(self) -> None:
        """Wait until nobody uses the vocabulary; later calls raise ClosedError."""
        with self._idle:
            self._closed = True
            self._idle.wait_for(lambda: self._n_users == 0)

    @contextmanager
    def _using_vocab(self) -> Iterator[None]:
        with self._idle:
            if self._closed:
                raise ClosedError("the engine is closed")
            self._n_users += 1
        try:
            yield
        finally:
            with self._idle:
                self._n_users -= 1
                self._idle.notify_all()

    def _tokens(self, prompt: Prompt) -> array[int]:
        if isinstance(prompt, str):
            return self._tokenize(prompt, add_special=True, parse_special=True)
        if not _is_sequence(prompt):
            raise InvalidRequest("prompt", prompt, "text, token ids or chat messages")
        if _is_chat(prompt):
            return self._chat_tokens(prompt)
        return self._checked_ids(prompt)

    def _checked_ids(self, prompt: Sequence[int]) -> array[int]:
        n_tokens = self._vocab.n_tokens
        allowed = f"token ids from 0 to {n_tokens - 1}"
        try:
            tokens = array("i", prompt)
        except (TypeError, OverflowError) as error:
            kind = type(prompt).__name__
            raise InvalidRequest("prompt", f"{kind}: {error}", allowed) from error
        if tokens and not 0 <= min(tokens) <= max(tokens) < n_tokens:
            wrong = next(token for token in tokens if not 0 <= token < n_tokens)
            raise InvalidRequest("prompt", wrong, allowed)
        return tokens

    def _chat_tokens(self, messages: Sequence[Message]) -> array[int]:
        for message in messages:
            _check_message(message)
        quoted = _Quoted(self)
        text = self._chat.render([quoted.hide(message) for message in messages])
        if self._vocab.add_bos and self._bos_text:
            text = text.removeprefix(self._bos_text)  # add_special brings it
        tokens = array("i")
        for part, is_template in quoted.split(text):
            tokens += self._tokenize(
                part, add_special=not tokens, parse_special=is_template
            )
        return tokens

    def _tokenize(
        self, text: str, *, add_special: bool, parse_special: bool
    ) -> array[int]:
        _check_text(text)
        return self._vocab.tokenize(
            text, add_special=add_special, parse_special=parse_special
        )

    def control_texts(self, text: str) -> set[str]:
        """Spellings of control tokens that occur in *text*."""
        tokens = set(self._tokenize(text, add_special=False, parse_special=True))
        control = [t for t in tokens if not self._vocab.piece(t)]
        spelled = {_text_of(self._vocab, token) for token in control}
        return {spelling for spelling in spelled if spelling and spelling in text}


class _Quoted:
    """Takes control tokens out of messages and puts them back as plain text."""

    def __init__(self, encoder: PromptEncoder) -> None:
        self._encoder = encoder
        self._nonce = os.urandom(8).hex()
        self._hidden: list[str] = []

    def hide(self, value: Any) -> Any:
        """A copy of *value* with marks in place of control tokens."""
        if isinstance(value, str):
            return self._hide_text(value)
        if isinstance(value, Mapping):
            return {key: self.hide(item) for key, item in value.items()}
        if _is_sequence(value):
            return [self.hide(item) for item in value]
        return value

    def split(self, text: str) -> Iterator[tuple[str, bool]]:
        """Parts of *text* in order, and whether the template may speak in them."""
        for index, part in enumerate(
            re.split(f"\ue000{self._nonce}(\\d+)\ue001", text)
        ):
            if index % 2:
                yield self._hidden[int(part)], False
            elif part:
                yield part, True

    def _hide_text(self, text: str) -> str:
        spellings = self._encoder.control_texts(text)
        if not spellings:
            return text
        longest_first = sorted(spellings, key=len, reverse=True)
        return re.sub("|".join(map(re.escape, longest_first)), self._mark, text)

    def _mark(self, match: re.Match[str]) -> str:
        self._hidden.append(match[0])
        return f"\ue000{self._nonce}{len(self._hidden) - 1}\ue001"


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        wrong = text[error.start : error.end]
        raise InvalidRequest("prompt", wrong, "text without lone surrogates") from error


def _check_message(message: object) -> None:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest(
            "prompt", message, 'messages with a "role" and a "content"'
        )
    content = message.get("content")
    if (
        content is not None
        and not isinstance(content, str)
        and not _is_sequence(content)
    ):
        raise InvalidRequest("content", content, "text, a list of parts, or None")


def _is_chat(prompt: object) -> TypeGuard[Sequence[Message]]:
    return _is_sequence(prompt) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _is_sequence(value: object) -> TypeGuard[Sequence[Any]]:
    if isinstance(value, str | bytes | bytearray | Mapping):
        return False
    return hasattr(value, "__len__") and hasattr(value, "__getitem__")


def _text_of(vocab: TextVocab, token: int | None) -> str:
    return (
        ""
        if token is None
        else vocab.piece(token, special=True).decode(errors="replace")
    )
