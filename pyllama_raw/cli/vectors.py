"""`embed` and `rank`: texts in, vectors or scores out."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from pyllama_raw.cli.inputs import lines_of
from pyllama_raw.cli.running import Terminal, opened
from pyllama_raw.errors import ConfigError, InvalidRequest
from pyllama_raw.options.profile import check_writable, replacing

if TYPE_CHECKING:
    from pyllama_raw.api.vectors import Vectors


def embed(options: Namespace) -> int:
    """Run the command; return its exit status."""
    texts = _texts(options)
    if options.tokens and (options.npy or options.pooling):
        raise ConfigError("--tokens is not allowed with --npy or --pooling")
    if options.npy is not None:
        check_writable(options.npy)

    with opened(options, "embed") as (engine, terminal):
        progress = _progress(terminal, len(texts))
        shape = options.dimensions, not options.raw
        how: dict[str, Any] = {"truncate": options.truncate, "progress": progress}
        if options.tokens:
            _tell(engine.embed_tokens(texts, *shape, **how))
            return 0
        vectors = engine.embed(texts, *shape, options.pooling, **how)
        if options.npy is None:
            _tell(vectors)
        else:
            _save(options.npy, vectors)
    return 0


def rank(options: Namespace) -> int:
    """Run the command; return its exit status."""
    documents = _texts(options)

    with opened(options, "rank") as (engine, terminal):
        progress = _progress(terminal, len(documents))
        ranked = engine.rank(options.query, documents, progress=progress)
        _write(
            {
                "index": document.index,
                "score": document.score,
                "document": documents[document.index],
            }
            for document in ranked
        )
    return 0


def _progress(terminal: Terminal, n_texts: int) -> Callable[[int], None]:
    return lambda n_done: terminal.status(f"{n_done}/{n_texts} done")


def _texts(options: Namespace) -> list[str]:
    if bool(options.texts) == bool(options.input):
        raise ConfigError("give texts or --input FILE, one of them")
    if options.texts:
        return list(options.texts)
    lines = enumerate(lines_of(options.input), 1)
    return [_text(number, line) for number, line in lines if line.strip()]


def _text(number: int, line: bytes) -> str:
    """
    The text of one line.

    A line that begins as JSON does must be a JSON string, or an object with "text". Any other
    line is itself the text, because files of plain lines are what people have.
    """
    text = line.decode("utf-8", "replace").strip()
    if text[0] not in '"{':
        return text
    allowed = 'a JSON string, an object with "text", or plain text'
    try:
        value = json.loads(line)
    except ValueError as error:
        raise InvalidRequest(f"line {number}", text, allowed) from error
    if isinstance(value, dict):
        value = value.get("text")
    if not isinstance(value, str):
        raise InvalidRequest(f"line {number}", text, allowed)
    return value


def _tell(vectors: Iterable[Any]) -> None:
    _write({"index": i, "embedding": v.tolist()} for i, v in enumerate(vectors))


def _write(lines: Iterable[dict[str, Any]]) -> None:
    for line in lines:
        sys.stdout.write(f"{json.dumps(line)}\n")


def _save(path: Path, vectors: Vectors) -> None:
    import numpy as np

    with replacing(path) as file:
        np.save(cast(TextIO, file).buffer, vectors)
