"""
Texts to vectors and ranks: what a caller asks for is checked here, before the engine hears of it.

Rules:
1. Vectors come in the order of the texts, whatever was computed beside them.
2. A vector is cut to its first dimensions, then made as long as 1. One of zeros stays so.
3. Leaving the call, or cancelling it, ends its request.
4. To rank, a query and a document become one text as llama-server makes it: by the template
   "rerank" of the file, or with the separators that the vocabulary states.

A long text can be cut into chunks of so many tokens, as for an index of documents:
1. Each chunk is a part of the text, character for character, with at most *max_tokens* tokens
   as embed() counts them, its first and last control tokens included.
2. A chunk ends behind white space if there is any in its last third.
3. A chunk begins with up to *overlap* tokens of the end of the one before it.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Literal

from anyio.lowlevel import checkpoint

from pyllama_raw.api.results import Ranked
from pyllama_raw.core.request import Embedded, EmbedRequest, Finished, FinishReason, Lot
from pyllama_raw.engine.info import Operation, Pooling
from pyllama_raw.engine.mailbox import Refused, Stream, Workers
from pyllama_raw.engine.thread import EngineThread
from pyllama_raw.errors import (
    ClosedError,
    DeadlineExceeded,
    EmbeddingFailed,
    InvalidRequest,
    TextTooLong,
    Unsupported,
    reading,
)
from pyllama_raw.options.arguments import (
    check_progress,
    checked_flag,
    checked_number,
    checked_serving,
    checked_text,
    checked_texts,
    checked_texts_or_ids,
    checked_word,
)
from pyllama_raw.prompts.prompt import LONG_PROMPT, PromptEncoder

if TYPE_CHECKING:
    from pyllama_raw.api.vectors import Vectors
    from pyllama_raw.engine.embed_executor import EmbedExecutor
    from pyllama_raw.engine.parts import EngineParts, TextVocab


CHARS_OF_TOKEN = 4  # a first guess
LAST_THIRD = 2 / 3


def chunks(
    text: str, max_tokens: int, overlap: int, count: Callable[[str], int]
) -> Iterator[str]:
    """
    The chunks of *text*, which is not empty.

    Args:
        count: tokens of a text; called about ten times a chunk, with texts of its length.
    """
    start = 0
    while True:
        stop = _longest_end(text, start, max_tokens, count)
        if stop < len(text):
            stop = _behind_space(text, start, stop)
        yield text[start:stop]
        if stop == len(text):
            return
        if not overlap:
            start = stop
            continue
        # The overlap begins at a word, too, and the next chunk is never where this one was.
        begin = _earliest_start(text, start, stop, overlap, count)
        start = max(begin, start + 1)


def _longest_end(
    text: str, start: int, max_tokens: int, count: Callable[[str], int]
) -> int:
    """The largest end of a part that begins at *start* and fits; one character always does."""
    fits, n_chars = start + 1, max_tokens * CHARS_OF_TOKEN
    while True:  # double, until a part does not fit
        end = min(start + n_chars, len(text))
        if count(text[start:end]) > max_tokens:
            break
        if end == len(text):
            return end
        fits, n_chars = end, 2 * n_chars
    while end - fits > 1:  # then halve what is between
        middle = (fits + end) // 2
        if count(text[start:middle]) > max_tokens:
            end = middle
        else:
            fits = middle
    return fits


def _earliest_start(
    text: str, start: int, stop: int, overlap: int, count: Callable[[str], int]
) -> int:
    """The first place behind *start* from which a part to *stop* has at most *overlap* tokens."""
    n_special = count("")
    low, high = start, stop
    while high - low > 1:
        middle = (low + high) // 2
        if count(text[middle:stop]) - n_special > overlap:
            low = middle
        else:
            high = middle
    for at in range(high, stop):
        if text[at].isspace():
            return at + 1
    return high


def _behind_space(text: str, start: int, stop: int) -> int:
    for at in range(stop, start + int(LAST_THIRD * (stop - start)), -1):
        if text[at - 1].isspace():
            return at
    return stop


SMALL_BYTES = 2**16  # of vectors that an event loop may copy
MANY_TEXTS = 64  # that are made tokens in one go: closing waits for it
MANY_CHUNKS = 8  # that are cut in one go, each by counting about ten texts
MANY_EVENTS = 256  # an event loop may wait while so many are taken in
POOLINGS = (Pooling.MEAN, Pooling.CLS, Pooling.LAST)
CHOOSE = "give pooling='mean', 'cls' or 'last' (--pooling)"
ALLOWED = (
    "'mean', 'cls', 'last', or None for that of the model; embed_tokens() gives a vector "
    "for each token"
)
TextPooling = Literal["mean", "cls", "last"]
VectorProgress = Callable[[int], object]  # gets how many texts have a vector
TEMPLATE = "tokenizer.chat_template.rerank"  # key of a model file
PLACES = QUERY, DOCUMENT = "{query}", "{document}"
MAX_PLACES = 4  # of each text in a template


@dataclass(frozen=True, slots=True)
class VectorShape:
    """The wanted form of vectors."""

    width: int  # of what the model makes
    dimensions: int | None
    normalize: bool


class Embedder:
    """Makes vectors on one engine thread."""

    def __init__(
        self,
        parts: EngineParts,
        encoder: PromptEncoder,
        thread: EngineThread,
        workers: Workers,
        request_ids: Iterator[int],
    ) -> None:
        """
        Args:
            request_ids: gives every request of the engine another id.
        """
        self.parts = parts
        self._thread = thread
        self._workers = workers
        self._encoder = encoder
        self._request_ids = request_ids
        self._waited_s = 0.0

    def after(self, waited_s: float) -> Embedder:
        """One for a caller that has waited so long for it."""
        waited = copy(self)
        waited._waited_s = waited_s
        return waited

    def shape(self, dimensions: object, *, normalize: object) -> VectorShape:
        """Raises InvalidRequest, Unsupported."""
        self._contexts()
        width = self.parts.capabilities.model.n_embd
        if dimensions is not None:
            dimensions = checked_number("dimensions", dimensions, 1, width)
        return VectorShape(width, dimensions, checked_flag("normalize", normalize))

    def pooling(self, pooling: object) -> Pooling:
        """The pooling *pooling*; None: the model's own. Raises InvalidRequest, Unsupported."""
        self.parts.capabilities.check(Operation.EMBED)
        of_model = self.parts.capabilities.model.pooling
        if pooling is None:
            pooling = of_model
            if pooling is Pooling.RANK:
                raise Unsupported("embed", f"the model ranks: use rank(), or {CHOOSE}")
            if pooling in (None, Pooling.NONE):
                raise Unsupported("embed", f"the model states no pooling: {CHOOSE}")
        return Pooling(checked_word("pooling", pooling, POOLINGS, ALLOWED))

    async def embed(
        self,
        texts: Iterable[str | Sequence[int]],
        pooling: Pooling | None,
        shape: VectorShape,
        progress: VectorProgress | None,
        *,
        joined: bool = False,
        truncate: object = False,
        **options: object,
    ) -> list[Vectors]:
        """
        An array for each of *texts*, or *joined* into one of all.

        Args:
            pooling: None: none, so each token has a row.
        """
        cuts = checked_flag("truncate", truncate)
        tokens = await self.tokens(
            checked_texts_or_ids(texts), "texts", self._encode, counts_only=cuts
        )
        if cuts:
            n_most, _ = self._longest()
            tokens = [self._cut(part, n_most) for part in tokens]
        values = await self.compute(
            tokens, "texts", pooling or Pooling.NONE, progress, options
        )
        counts = list(map(len, tokens))
        make = partial(_shaped, values, counts, shape, joined=joined)
        if sum(map(len, values)) <= SMALL_BYTES:
            return make()
        try:
            return await self._workers.run("text", make)
        except ClosedError:  # just now: what was computed before is the caller's
            return make()

    async def tokens(
        self,
        texts: Sequence[str | Sequence[int]],
        name: str,
        encode: Callable[[str], array[int]],
        *,
        n_beside: int = 0,
        counts_only: bool = False,
    ) -> list[array[int]]:
        """
        Tokens of each of *texts*: of a few short ones here, of others in a worker.

        Args:
            name: of the argument that has them.
            encode: makes the tokens of one.
            n_beside: characters that *encode* reads beside each of them.
            counts_only: a text may be longer than what the model reads.

        Raises:
            InvalidRequest, TextTooLong, Unsupported, ClosedError.
        """
        tokens: list[array[int]] = []
        encoder = self._encoder.counting() if counts_only else self._encoder
        with reading(name, texts, "texts or token ids"):
            n_all = sum(map(len, texts)) + n_beside * len(texts)
        if n_all <= LONG_PROMPT:
            return encoder.encode_texts(texts, 0, name, encode)
        # A few at a time, because closing waits for those that are read.
        for at in range(0, len(texts), MANY_TEXTS):
            part = texts[at : at + MANY_TEXTS]
            make = partial(encoder.encode_texts, part, at, name, encode)
            tokens += await self._workers.run("text", make)
        return tokens

    async def compute(
        self,
        texts: Sequence[array[int]],
        name: str,
        pooling: Pooling,
        progress: VectorProgress | None,
        options: dict[str, object],
    ) -> list[bytes]:
        """The values that the model makes of each of *texts*."""
        check_progress(progress)
        self._thread.check_for_waiting()
        request = self._request(texts, name, pooling, options)
        contexts = self._contexts()
        if not contexts.is_ready(pooling):
            await self._workers.run("embedder", partial(contexts.prepare, pooling))
        stream, values = Stream(), list[bytes]()
        stream.eager = progress is not None
        self._thread.submit_all((request,), stream, self._waited_s)
        end: Finished | Refused | None = None
        try:
            while end is None:
                await stream.wait()
                n_before = len(values)
                # Other tasks of the event loop have a turn after so many events.
                for _ in range(min(len(stream.events), MANY_EVENTS)):
                    event = stream.events.popleft()
                    if isinstance(event, Embedded):
                        assert event.index == len(values)
                        values.append(event.values)
                    else:
                        assert isinstance(event, Finished | Refused)
                        end = event
                if end is None:
                    if progress is not None and len(values) > n_before:
                        progress(len(values))
                    await checkpoint()
        except BaseException:  # the caller leaves
            self._thread.cancel(request.request_id)
            raise
        # All texts have their vectors, or the end says why not.
        if isinstance(end, Refused):
            raise end.error
        if isinstance(end.error, EmbeddingFailed):
            raise EmbeddingFailed(len(values)) from end.error
        if end.error is not None:
            raise end.error
        if end.reason is FinishReason.DEADLINE:
            raise DeadlineExceeded(len(values), len(texts), "texts had a vector")
        if end.reason is not FinishReason.STOP:
            raise ClosedError("the engine was closed before all texts had a vector")
        if progress is not None:
            progress(len(values))
        return values

    def _contexts(self) -> EmbedExecutor:
        """Raises Unsupported."""
        if self.parts.texts is None:
            self.parts.capabilities.check(Operation.EMBED)
            raise Unsupported("embed", "this engine has no model")
        return self.parts.texts

    def _request(
        self,
        texts: Sequence[array[int]],
        name: str,
        pooling: Pooling,
        options: dict[str, object],
    ) -> EmbedRequest:
        """Raises TextTooLong, InvalidRequest."""
        checked = checked_serving(options)
        n_most, advice = self._longest()
        for index, tokens in enumerate(texts):
            if len(tokens) > n_most:
                raise TextTooLong(f"{name}[{index}]", len(tokens), n_most, advice)
        started = self._thread.clock() - self._waited_s
        deadline_s = checked.get("deadline_s")
        joined = array("i")
        for tokens in texts:
            joined += tokens
        return EmbedRequest(
            next(self._request_ids),
            joined,
            priority=checked.get("priority", 0),
            deadline=None if deadline_s is None else started + deadline_s,
            max_wait_s=checked.get("max_wait_s"),
            lot=Lot(pooling.value, makes_vectors=True),
            ends=tuple(accumulate(map(len, texts))),
            # A step may compute a part of a text if nothing of it looks at what comes later.
            may_cut=self.parts.capabilities.model.is_causal,
        )

    def _longest(self) -> tuple[int, str]:
        """The most tokens of a text, and what to do about a longer one."""
        limits = self._contexts().limits
        n_most, advice = limits.n_ctx_slot, "shorten it, or raise n_ctx"
        if not self.parts.capabilities.model.is_causal and limits.n_batch < n_most:
            n_most = limits.n_batch
            advice = "shorten it, or raise max_step_tokens and max_step_bytes of EmbeddingConfig"
        if n_most == self.parts.capabilities.model.n_ctx_train:
            advice = "shorten it, because the model was made for no more"
        return (
            n_most,
            f"{advice}; embed() takes truncate=True (--truncate), chunks() cuts a text",
        )

    def _encode(self, text: str) -> array[int]:
        return self.parts.vocab.tokenize(text, add_special=True, parse_special=False)

    def _cut(self, tokens: array[int], n_most: int) -> array[int]:
        """The first *n_most* of *tokens*; a text that ends with control tokens still does."""
        if len(tokens) <= n_most:
            return tokens
        ends = self._encode("")[1 if self.parts.vocab.add_bos else 0 :]
        if not ends or tokens[-len(ends) :] != ends or len(ends) >= n_most:
            return tokens[:n_most]
        return tokens[: n_most - len(ends)] + ends

    async def rank(
        self,
        query: str,
        documents: Iterable[str],
        progress: VectorProgress | None,
        **options: object,
    ) -> list[Ranked]:
        """See AsyncEngine.rank."""
        import numpy as np

        parts = self.parts
        parts.capabilities.check(Operation.RANK)
        query = checked_text("query", query)
        texts = checked_texts(documents, "documents")
        await self._check_query(query)
        template = parts.metadata.get(TEMPLATE)
        if template is not None and max(map(template.count, PLACES)) > MAX_PLACES:
            reason = (
                f"{TEMPLATE} of the file has a text more than {MAX_PLACES} times in it"
            )
            raise Unsupported("rank", reason)
        pair = partial(pair_tokens, parts.vocab, template, query)
        tokens = await self.tokens(texts, "documents", pair, n_beside=len(query))
        values = await self.compute(
            tokens, "documents", Pooling.RANK, progress, options
        )
        names = [label or str(i) for i, label in enumerate(parts.labels)]
        ranking = [
            Ranked(
                index,
                scores[0],
                dict(zip(names, scores, strict=True)),
                len(tokens[index]),
            )
            for index, value in enumerate(values)
            if (scores := np.frombuffer(value, np.float32).tolist())
        ]
        return sorted(ranking, key=lambda ranked: -ranked.score)

    async def _check_query(self, query: str) -> None:
        """Raise unless *query* fits alone: it becomes tokens with each document."""
        n_most, advice = self._longest()
        try:
            [tokens] = await self.tokens([query], "query", self._encode)
        except TextTooLong as error:
            n_tokens, is_part = error.n_tokens, error.is_part
            raise TextTooLong(
                "query", n_tokens, n_most, advice, is_part=is_part
            ) from error
        except InvalidRequest as error:
            raise InvalidRequest("query", query, error.allowed) from error
        if len(tokens) > n_most:
            raise TextTooLong("query", len(tokens), n_most, advice)

    async def chunks(
        self, text: object, max_tokens: object, overlap: object
    ) -> list[str]:
        """See AsyncEngine.chunks."""
        n_own = len(self._encode(""))
        n_most, _ = self._longest()
        n_tokens = n_most
        if max_tokens is not None:
            n_tokens = checked_number("max_tokens", max_tokens, n_own + 1, n_most)
        n_shared = checked_number("overlap", overlap, 0, (n_tokens - n_own) // 2)
        document = checked_text("text", text)

        def count(part: str) -> int:
            return len(self._encode(part))

        # A few at a time: whoever leaves, or closes, does not leave a worker with the others.
        cut = chunks(document, n_tokens, n_shared, count)
        parts: list[str] = []
        while True:
            take = partial(list[str], islice(cut, MANY_CHUNKS))
            some = await self._workers.run("text", partial(self._encoder.run, take))
            if not some:
                return parts
            parts += some


def _shaped(
    values: list[bytes], counts: list[int], shape: VectorShape, *, joined: bool
) -> list[Vectors]:
    """Arrays of *values*, made of so many tokens each. Thread: a worker."""
    import numpy as np

    from pyllama_raw.api.vectors import vectors_of

    if joined:
        values, counts = [b"".join(values)], [sum(counts)]
    all_rows = (np.frombuffer(v, np.float32).reshape(-1, shape.width) for v in values)
    return [
        vectors_of(rows[:, : shape.dimensions], n_tokens, normalize=shape.normalize)
        for rows, n_tokens in zip(all_rows, counts, strict=True)
    ]


def pair_tokens(
    vocab: TextVocab, template: str | None, query: str, document: str
) -> array[int]:
    """Tokens of *query* and *document* together; neither can hold control tokens."""
    if template is not None:
        return _by_template(vocab, template, {QUERY: query, DOCUMENT: document})

    def text(part: str) -> array[int]:
        return vocab.tokenize(part, add_special=False, parse_special=False)

    def special(token: int | None, is_used: bool) -> array[int]:
        return array("i", [token] if is_used and token is not None else [])

    end = special(vocab.sep if vocab.eos is None else vocab.eos, vocab.add_eos)
    begin = special(vocab.bos, vocab.add_bos)
    between = special(vocab.sep, vocab.add_sep)
    return begin + text(query) + end + between + text(document) + end


def _by_template(
    vocab: TextVocab, template: str, texts: Mapping[str, str]
) -> array[int]:
    """
    As one text, because that is how models are trained.

    A text with the name of a control token is a text of its own, so it stays text.
    """
    names = [name for name, is_control in vocab.special_texts.items() if is_control]
    is_plain = not any(name in text for text in texts.values() for name in names)
    tokenize: Callable[..., array[int]] = partial(vocab.tokenize, add_special=False)
    if is_plain:
        for name, text in texts.items():
            template = template.replace(name, text)
        return tokenize(template, parse_special=True)
    tokens = array("i")
    for part in _parts(template):
        tokens += tokenize(texts.get(part, part), parse_special=part not in texts)
    return tokens


def _parts(template: str) -> list[str]:
    """*template*, cut before and behind each of its places for texts."""
    return re.split(f"({re.escape(QUERY)}|{re.escape(DOCUMENT)})", template)
