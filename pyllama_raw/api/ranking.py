"""
Documents ranked by how well they answer a query, by a model with a head that gives scores.

A query and a document become one text as llama-server makes it: by the template "rerank" of
the file, or with the separators that the vocabulary states.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pyllama_raw.api.embedding import Embedder, Told
from pyllama_raw.engine.model_info import Pooling
from pyllama_raw.options.arguments import checked_text, checked_texts

if TYPE_CHECKING:
    from pyllama_raw.engine.parts import TextVocab

TEMPLATE = "tokenizer.chat_template.rerank"  # key of a model file
QUERY, DOCUMENT = "{query}", "{document}"


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document, and what the model says of it."""

    index: int
    """Its place in the list that was given."""
    score: float
    """The first of its scores: the higher, the better it answers the query."""
    scores: Mapping[str, float]
    """All of them, by the label that the model file has for each, or by its number."""
    n_tokens: int
    """Tokens of the query and the document, as one text."""


async def rank(
    embedder: Embedder,
    query: str,
    documents: Iterable[str],
    progress: Told | None,
    **options: object,
) -> list[Ranked]:
    """See AsyncEngine.rank."""
    import numpy as np

    parts = embedder.parts
    query = checked_text("query", query)
    texts = checked_texts(documents, "documents")
    pair = partial(pair_tokens, parts.vocab, parts.metadata.get(TEMPLATE), query)
    tokens = await embedder.tokens(texts, "documents", pair)
    values = await embedder.compute(
        tokens, "documents", Pooling.RANK, progress, options
    )
    names = [label or str(i) for i, label in enumerate(parts.labels)]
    found = [
        Ranked(
            index, scores[0], dict(zip(names, scores, strict=True)), len(tokens[index])
        )
        for index, value in enumerate(values)
        if (scores := np.frombuffer(value, np.float32).tolist())
    ]
    return sorted(found, key=lambda one: -one.score)


def pair_tokens(
    vocab: TextVocab, template: str | None, query: str, document: str
) -> array[int]:
    """Tokens of *query* and *document* together; neither can hold control tokens."""
    if template is not None:
        return _by_template(vocab, template, {QUERY: query, DOCUMENT: document})

    def text(part: str) -> array[int]:
        return vocab.tokenize(part, add_special=False, parse_special=False)

    def special(token: int | None, wanted: bool) -> array[int]:
        return array("i", [token] if wanted and token is not None else [])

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
    import re

    return re.split(f"({re.escape(QUERY)}|{re.escape(DOCUMENT)})", template)
