"""
Prompts to token ids: text, chat messages, images and sounds, or ids that are only checked.

Text is tokenized as llama-server does: special tokens are added and control tokens written in it
are understood. What is written inside a chat message is only text: a message cannot end its own
turn, whatever the template does with it.
"""

from __future__ import annotations

import sys
from array import array
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from threading import Condition
from typing import TYPE_CHECKING, Any, Literal, Self, TypeGuard, TypeVar

from pyllama_raw.errors import (
    ClosedError,
    InvalidRequest,
    PromptTooLong,
    TextTooLong,
    Unsupported,
    reading,
)
from pyllama_raw.prompts.chat import (
    NOTHING,
    PIECE,
    ChatSettings,
    ChatTemplates,
    Markers,
    Rendered,
)
from pyllama_raw.prompts.messages import Message, is_chat, is_sequence

if TYPE_CHECKING:
    from pyllama_raw.core.request import Namespace, Span
    from pyllama_raw.engine.media_desk import MediaDesk
    from pyllama_raw.engine.parts import EngineParts, TextVocab
    from pyllama_raw.media import Audio, Image
    from pyllama_raw.media.content import Media

T = TypeVar("T")

Prompt = str | Sequence[int] | Sequence[Message] | Sequence["str | Image | Audio"]

MAX_IDS = 2**20  # that detokenize() takes
MAX_COUNTED = 2**20  # tokens of a prompt that is only counted
LONG_PROMPT = 4096  # characters that an event loop may wait for
MANY_IDS = 2**14  # token ids, likewise
LONG_TOKEN = 8  # characters of a token; most texts have about four
LONG_PIECE = 2**20  # characters that are looked at in one call of C
SHORTEN = "shorten it"
PROMPTS = (
    "text, token ids or chat messages, which are mappings; complete_many() takes a list "
    "of prompts"
)
NO_PROJECTOR = "the engine has no projector: give MediaConfig(mmproj=FILE)"
SEAM = 16  # tokens that a text may have more if it is cut in two


class PromptEncoder:
    """Checks prompts and makes tokens of them; any thread may call it."""

    def __init__(
        self,
        vocab: TextVocab,
        chat_template: str | None,
        n_ctx_slot: int,
        media: MediaDesk | None = None,
        n_source: int = 0,
        *,
        is_apart: bool = True,
    ) -> None:
        """
        Args:
            is_apart: whether chat templates run in processes of their own.
            media: None: prompts are text.
            n_source: tokens that an encoder can read; 0: prompts go into slots.
        """
        self._n_source = n_source
        self._vocab = vocab
        self._media = media
        # A prompt has fewer tokens.
        self._n_ctx_slot = n_source + 1 if n_source else n_ctx_slot
        self._bos_text = _text_of(vocab, vocab.bos)
        self._chat_template = chat_template
        self._chat = ChatTemplates(
            chat_template,
            bos_token=self._bos_text,
            eos_token=_text_of(vocab, vocab.eos),
            is_apart=is_apart,
        )
        self._idle = Condition()
        self._users = _Users()

    @classmethod
    def of(cls, parts: EngineParts) -> Self:
        """The encoder for the model of *parts*."""
        limits = parts.scheduler.limits
        return cls(
            parts.vocab,
            parts.chat_template,
            limits.n_ctx_slot,
            parts.media,
            limits.n_source,
            is_apart=parts.template_process,
        )

    @property
    def n_mended(self) -> int:
        """Chats that their template took only changed."""
        return self._chat.n_mended

    def counting(self) -> Self:
        """This encoder with another limit: prompts have at most MAX_COUNTED tokens."""
        encoder = copy(self)  # both have the same users, so close() waits for both
        encoder._n_ctx_slot = MAX_COUNTED + 1
        return encoder

    def takes_long(
        self, prompt: Prompt, settings: ChatSettings = NOTHING
    ) -> Literal["text", "chat", "template", "media"] | None:
        """The workers that read() is for; None: an event loop may call it, too."""
        if is_chat(prompt):
            # It waits for a process. A template of the caller keeps no other chats waiting.
            return "chat" if settings.chat_template is None else "template"
        if isinstance(prompt, str):
            return "text" if len(prompt) > LONG_PROMPT else None
        if has_media(prompt):
            return "media"
        return "text" if is_sequence(prompt) and len(prompt) > MANY_IDS else None

    def read(
        self,
        prompt: Prompt,
        settings: ChatSettings = NOTHING,
        namespace: Namespace = None,
    ) -> MediaPrompt:
        """
        Tokens of *prompt*, never empty, that leave room for an output token; and its media.

        Args:
            namespace: the requests that share the rows of its media.

        Raises:
            InvalidRequest: not text, not token ids of this model, or not messages.
            PromptTooLong: it does not fit a slot; n_prompt is what was counted of it.
            BadMedia: an image or a sound cannot be used.
            Unsupported: messages, but the model has no chat template; images or sounds, but
                no projector that takes them.
        """
        read = MediaPrompt(self._media, namespace)
        with self._using_vocab():
            if is_chat(prompt):
                self._read_chat(read, prompt, settings)
            elif settings != NOTHING:
                wrong = (
                    item for item in settings._asdict().items() if item[1] is not None
                )
                name, value = next(wrong)
                raise InvalidRequest(name, value, "it with chat messages only")
            elif has_media(prompt):
                self._read_list(read, prompt)
            elif isinstance(prompt, str):
                read.tokens = self._tokenize(
                    prompt, add_special=True, parse_special=True
                )
            elif is_sequence(prompt) and not _is_of_lists(prompt):
                read.tokens = self._ids(prompt)
            else:
                raise InvalidRequest("prompt", prompt, PROMPTS)
        if not read.tokens:
            raise InvalidRequest("prompt", prompt, "at least one token")
        self._check_fits(len(read.tokens))
        if read.spans and read.spans[-1].stop == len(read.tokens):
            end = "an image or a sound at the end"
            raise InvalidRequest("prompt", end, "text behind it, to go on from")
        return read

    def encode_texts(
        self,
        texts: Sequence[str | Sequence[int]],
        first: int,
        name: str,
        encode: Callable[[str], array[int]],
    ) -> list[array[int]]:
        """
        The tokens that *encode* makes of each of *texts*, which are data; ids are checked.

        Args:
            first: the index of texts[0] in the argument *name*.

        Raises:
            InvalidRequest, TextTooLong: which text it is.
        """

        def tokens_of(where: str, text: str | Sequence[int]) -> array[int]:
            try:
                with reading(where, text, "text or token ids"):
                    if isinstance(text, str):
                        tokens = encode(self._checked(text))
                    else:
                        tokens = self._ids(text)
            except PromptTooLong as error:
                raise TextTooLong(
                    where,
                    error.n_prompt,
                    self._n_ctx_slot,
                    SHORTEN,
                    is_part=error.is_part,
                ) from None
            except InvalidRequest as error:
                raise InvalidRequest(where, error.value, error.allowed) from None
            if not tokens:
                raise InvalidRequest(where, text, "a text of at least one token")
            return tokens

        with self._using_vocab():
            return [
                tokens_of(f"{name}[{index}]", text)
                for index, text in enumerate(texts, first)
            ]

    def render(self, messages: Sequence[Message], settings: ChatSettings) -> str:
        """The text that read() makes tokens of; raises like it."""
        if not is_chat(messages):
            raise InvalidRequest("messages", messages, "chat messages")
        with self._using_vocab():
            if self._media is not None:
                messages = self._media.take_chat(messages).messages
            return self._render(messages, settings).text

    def encode_text(self, text: str, *, adds: bool, parses: bool) -> array[int]:
        """
        Tokens of *text*, perhaps none. Raises InvalidRequest, PromptTooLong, ClosedError.

        Args:
            adds: it gets the tokens that begin and end prompts.
            parses: control tokens that are spelled in it are understood.
        """
        with self._using_vocab():
            tokens = self._tokenize(text, add_special=adds, parse_special=parses)
        self._check_fits(len(tokens))
        return tokens

    def detokenize(self, token_ids: Sequence[int], special: bool) -> str:
        """The pieces of *token_ids* as text. Raises InvalidRequest, ClosedError."""
        decoder = getincrementaldecoder("utf-8")(errors="replace")
        pieces = self.pieces(token_ids, special)
        texts = [
            decoder.decode(b"".join(pieces[at : at + MANY_IDS]))
            for at in range(0, len(pieces), MANY_IDS)
        ]
        return "".join([*texts, decoder.decode(b"", final=True)])

    def pieces(self, token_ids: Sequence[int], special: bool) -> list[bytes]:
        """The bytes of each token. Raises InvalidRequest, ClosedError."""
        if not is_sequence(token_ids) or len(token_ids) > MAX_IDS:
            raise InvalidRequest("token_ids", token_ids, f"at most {MAX_IDS} token ids")
        by_token: dict[int, bytes] = {}
        pieces: list[bytes] = []
        with self._using_vocab():
            for part in self._parts(token_ids, "token_ids"):
                for token in {*part} - by_token.keys():
                    by_token[token] = self._vocab.piece(token, special)
                pieces += map(by_token.__getitem__, part)
        return pieces

    def control_names(self) -> dict[int, bytes]:
        """Names of the control tokens, which have no piece; may take a tenth of a second."""
        with self._using_vocab():
            # Not by tokenize(), which looks for each control token in turn: a file may have many.
            names = {
                token: self._vocab.piece(token, special=True)
                for token, piece in enumerate(self._vocab.pieces)
                if not piece
            }
        return {token: name for token, name in names.items() if name}

    def run(self, function: Callable[[], T]) -> T:
        """Call *function*, which may use the vocabulary."""
        with self._using_vocab():
            return function()

    def close(self) -> None:
        """
        Wait until nobody uses the vocabulary; later calls raise ClosedError.

        Templates that are being rendered are ended.
        """
        with self._idle:
            self._users.are_refused = True
        self._chat.close()
        with self._idle:
            self._idle.wait_for(lambda: self._users.n_now == 0)

    @contextmanager
    def _using_vocab(self) -> Iterator[None]:
        with self._idle:
            if self._users.are_refused:
                raise ClosedError("the engine is closed")
            self._users.n_now += 1
        try:
            yield
        finally:
            with self._idle:
                self._users.n_now -= 1
                self._idle.notify_all()

    def _read_list(self, read: MediaPrompt, prompt: Sequence[object]) -> None:
        if self._media is None:
            raise Unsupported("images and sounds", NO_PROJECTOR)
        pieces, media = self._media.take_list(prompt)
        self._add_pieces(read, self._markers, pieces, media)

    def _ids(self, token_ids: Sequence[int]) -> array[int]:
        """A checked copy of token ids. Raises InvalidRequest, PromptTooLong."""
        if len(token_ids) > self._n_ctx_slot:  # before a copy: range(10**9) is small
            raise self._too_long(len(token_ids))
        tokens = array("i")
        for part in self._parts(token_ids, "prompt"):
            tokens += part
        return tokens

    def _parts(self, token_ids: Sequence[int], name: str) -> Iterator[array[int]]:
        """Checked ids of the argument *name*, in parts, because no other thread runs while one is made."""
        n_tokens = self._vocab.n_tokens
        allowed = f"token ids from 0 to {n_tokens - 1}"
        ids = islice(token_ids, len(token_ids))
        while True:
            try:
                part = array("i", islice(ids, MANY_IDS))
            except (TypeError, OverflowError) as error:
                kind = type(token_ids).__name__
                raise InvalidRequest(name, f"{kind}: {error}", allowed) from error
            if not part:
                return
            if not 0 <= min(part) <= max(part) < n_tokens:
                wrong = next(token for token in part if not 0 <= token < n_tokens)
                raise InvalidRequest(name, wrong, allowed)
            yield part

    def _render(self, messages: Sequence[Message], settings: ChatSettings) -> Rendered:
        if self._n_source:
            reason = "the model reads one text with an encoder and writes another"
            raise Unsupported("chat messages", f"{reason}: give a text prompt")
        return self._chat.render(messages, settings)

    def _read_chat(
        self, read: MediaPrompt, messages: Sequence[Message], settings: ChatSettings
    ) -> None:
        chat = None if self._media is None else self._media.take_chat(messages)
        if chat is not None:
            messages = chat.messages
        text, origins = self._render(messages, settings)
        bos = self._bos_text
        if self._vocab.add_bos and bos and text.startswith(bos):  # add_special adds it
            n_own = len(bos) if set(origins[: len(bos)]) == {"t"} else 0
            text, origins = text[n_own:], origins[n_own:]
        markers = self._markers
        if settings.chat_template is not None:
            markers = Markers(self._vocab.special_texts, settings.chat_template)
        if chat is not None and chat.media:
            pieces = chat.pieces(text, origins)
            self._add_pieces(read, markers, pieces, chat.media)
        elif list(markers.parts(text, origins)) == [(text, True)]:
            read.tokens = self._tokenize(text, add_special=True, parse_special=True)
        else:
            self._add_pieces(read, markers, [(text, origins, None)], [])

    def _add_pieces(
        self,
        read: MediaPrompt,
        markers: Markers,
        pieces: Iterable[tuple[str, str, int | None]],
        media: Sequence[Media],
    ) -> None:
        """Add what begins and ends a prompt, and between them the texts and media."""
        around = self._tokenize("", add_special=True, parse_special=False)
        n_before = 1 if self._vocab.add_bos else 0
        read.tokens += around[:n_before]
        for text, origins, index in pieces:
            for part, may_be_special in markers.parts(self._checked(text), origins):
                read.tokens += self._tokenize(
                    part, add_special=False, parse_special=may_be_special
                )
                self._check_fits(len(read.tokens), is_part=True)
            if index is not None:
                read.add_media(media[index])
                self._check_fits(len(read.tokens), is_part=True)
        read.tokens += around[n_before:]

    @cached_property
    def _markers(self) -> Markers:
        return Markers(self._vocab.special_texts, self._chat_template)

    def _tokenize(
        self, text: str, *, add_special: bool, parse_special: bool
    ) -> array[int]:
        return self._vocab.tokenize(
            self._checked(text), add_special=add_special, parse_special=parse_special
        )

    def _checked(self, text: str) -> str:
        """
        *text*. Raises InvalidRequest, or PromptTooLong without tokenizing all of it.

        Nothing can stop the tokenizer, which may take a minute, and close() waits for
        it. So a long text is first counted piece by piece. A seam makes few tokens more.
        """
        # Part by part, because no other thread runs while one is encoded.
        for at in range(0, len(text), LONG_PIECE):
            part = text[at : at + LONG_PIECE]
            try:
                part.encode()
            except UnicodeEncodeError as error:
                wrong = part[error.start : error.end]
                allowed = "text without lone surrogates"
                raise InvalidRequest("prompt", wrong, allowed) from error
        if len(text) > LONG_TOKEN * self._n_ctx_slot:
            encode = partial(
                self._vocab.tokenize, add_special=False, parse_special=True
            )
            n_tokens = 0
            for at in range(0, len(text), PIECE):
                n_tokens += len(encode(text[at : at + PIECE])) - SEAM
                self._check_fits(n_tokens, is_part=True)
        return text

    def _check_fits(self, n_tokens: int, *, is_part: bool = False) -> None:
        """Raise PromptTooLong; *is_part*: there may be more tokens to come."""
        if self._users.are_refused:
            raise ClosedError("the engine is closed")
        if n_tokens >= self._n_ctx_slot:
            raise self._too_long(n_tokens, is_part=is_part)

    def _too_long(self, n_tokens: int, *, is_part: bool = False) -> PromptTooLong:
        limit = self._n_source or self._n_ctx_slot
        return PromptTooLong(n_tokens, limit, self._n_source, is_part=is_part)


@dataclass(slots=True)
class _Users:
    """The callers that use a vocabulary now; copies of an encoder share one of these."""

    n_now: int = 0
    are_refused: bool = False  # the engine closes


def _text_of(vocab: TextVocab, token: int | None) -> str:
    if token is None:
        return ""
    return vocab.piece(token, special=True).decode(errors="replace")


@dataclass(slots=True)
class MediaPrompt:
    """
    A prompt while it is put together, and when that is done.

    Args:
        desk: None: only text can be added.
        namespace: the requests that share the rows of its media.
    """

    _desk: MediaDesk | None = None
    _namespace: Namespace = None
    _n_parts: int = 0
    tokens: array[int] = field(default_factory=partial(array, "i"))
    spans: tuple[Span, ...] = ()
    payloads: tuple[object, ...] = ()  # one a span

    def add_media(self, part: Media) -> None:
        """
        Raises:
            BadMedia: its size cannot be handled.
            Unsupported: the projector does not see, or does not hear.
        """
        assert self._desk is not None
        placed = self._desk.place(part, self._n_parts, self._namespace)
        self._n_parts += 1
        start = len(self.tokens)
        self.spans += tuple(
            span._replace(start=start + span.start, stop=start + span.stop)
            for span in placed.spans
        )
        self.payloads += placed.payloads
        self.tokens += placed.tokens


def _is_of_lists(prompt: Sequence[Any]) -> bool:
    """Whether it begins with a text or a list: these are several prompts, or ("user", "Hi")."""
    return len(prompt) > 0 and isinstance(prompt[0], str | bytes | list | tuple)


def has_media(prompt: Any) -> TypeGuard[Sequence[object]]:
    """Whether *prompt* is a list with an image or a sound in it."""
    media = sys.modules.get("pyllama_raw.media")
    if media is None or not is_sequence(prompt) or not len(prompt):  # nobody has any
        return False
    kinds = media.Image, media.Audio
    if not isinstance(prompt[0], (str, *kinds)):
        return False
    return any(isinstance(part, kinds) for part in prompt)
