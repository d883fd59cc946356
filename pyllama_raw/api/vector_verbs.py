"""The verbs of an engine whose model makes vectors or ranks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Unpack

from pyllama_raw.api.facts import Facts
from pyllama_raw.options.arguments import checked_serving

if TYPE_CHECKING:  # the rest comes in while a model loads
    from pyllama_raw.api.embedding import Embedder, TextPooling, Told
    from pyllama_raw.api.ranking import Ranked
    from pyllama_raw.api.vectors import Vectors
    from pyllama_raw.options.requests import TextOptions


class VectorVerbs(Facts):
    """An engine as far as texts become vectors and ranks."""

    async def embed(
        self,
        texts: Iterable[str | Sequence[int]],
        dimensions: int | None = None,
        normalize: bool = True,
        pooling: TextPooling | None = None,
        *,
        truncate: bool = False,
        progress: Told | None = None,
        **options: Unpack[TextOptions],
    ) -> Vectors:
        """
        A vector for each text: a row of an array of float32, in the order of *texts*.

        `usage` of the array counts the tokens of the texts. Token ids may stand for a text:
        they are taken as they are, with nothing before or behind them.

        The first call on a model that generates opens a context of its own for this.

        Control tokens that are spelled in *texts* stay text, because a user may have
        written that. In a prompt, and so by tokenize(), they are understood.

        Args:
            dimensions: only the first ones of each vector; None: all.
            normalize: make vectors as long as 1, after they are cut.
            pooling: how the vectors of the tokens of a text become one; None: as the model
                says.
            truncate: a text that is too long loses its end, instead of TextTooLong.
            progress: called with the number of texts that have a vector.

        Raises:
            InvalidRequest: there is no text, one is empty, or an argument is not allowed.
            TextTooLong: a text has too many tokens for the model or for a step.
            Unsupported: the model states no pooling, and none is given.
            EmbeddingFailed: the model makes something of a text that is no number.
            DeadlineExceeded: *deadline_s* was over before every text had its vector.
            QueueFull, ClosedError, EngineStopped, NativeError: as generate().
        """
        async with self._embedding(options) as embedder:
            wanted = embedder.pooling(pooling)
            shape = embedder.shape(dimensions, normalize=normalize)
            (rows,) = await embedder.embed(
                texts,
                wanted,
                shape,
                progress,
                joined=True,
                truncate=truncate,
                **options,
            )
        return rows

    async def embed_tokens(
        self,
        texts: Iterable[str | Sequence[int]],
        dimensions: int | None = None,
        normalize: bool = True,
        *,
        truncate: bool = False,
        progress: Told | None = None,
        **options: Unpack[TextOptions],
    ) -> list[Vectors]:
        """Like embed(), with an array for each text that has a row for each token."""
        from pyllama_raw.engine.model_info import Pooling

        async with self._embedding(options) as embedder:
            shape = embedder.shape(dimensions, normalize=normalize)
            return await embedder.embed(
                texts, Pooling.NONE, shape, progress, truncate=truncate, **options
            )

    async def chunks(
        self, text: str, max_tokens: int | None = None, overlap: int = 0
    ) -> list[str]:
        """
        *text* cut into parts that embed() takes, at white space where there is any.

        Args:
            max_tokens: of a part, control tokens included; None: what the model takes.
            overlap: tokens of the end of a part that the next one begins with, at most half
                of a part.

        Raises:
            InvalidRequest: *text* is empty, or a number is not allowed.
            Unsupported: the model makes no vectors.
        """
        async with self._embedding({}) as embedder:
            return await embedder.chunks(text, max_tokens, overlap)

    async def rank(
        self,
        query: str,
        documents: Iterable[str],
        *,
        progress: Told | None = None,
        **options: Unpack[TextOptions],
    ) -> list[Ranked]:
        """
        *documents* by how well they answer *query*, the best first.

        Scores are as the model gives them, so those of other models differ in range.

        Raises:
            Unsupported: the model is no reranker.
            InvalidRequest, TextTooLong, EmbeddingFailed, DeadlineExceeded: as embed().
            QueueFull, ClosedError, EngineStopped, NativeError: as generate().
        """
        from pyllama_raw.api.ranking import rank
        from pyllama_raw.engine.capabilities import Operation

        async with self._embedding(options) as embedder:
            embedder.parts.capabilities.check(Operation.RANK)
            return await rank(embedder, query, documents, progress, **options)

    @asynccontextmanager
    async def _embedding(self, options: TextOptions) -> AsyncIterator[Embedder]:
        """The maker of the vectors of one call; *options* are not checked yet."""
        limits, began = checked_serving({**options}), self._thread.clock()
        async with self._sessions.session(limits) as session:
            yield session.embedder.after(session.thread.clock() - began)
