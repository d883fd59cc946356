"""Projectors, images and sounds for the native tests of media."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyllama_raw.native.batch import Batch, RowBatch
from pyllama_raw.native.context import Context
from pyllama_raw.native.libllama import ffi, lib
from pyllama_raw.native.model import Model
from pyllama_raw.native.projector import Bitmap, Cut, Projector, RowRun, TokenRun
from tests.media.files import pixels, tone
from tests.support.tiny import tiny_projector

BEFORE, AFTER = "hello ", " there"


@contextmanager
def loaded(name: str, **options: Any) -> Iterator[Projector]:
    """The tiny projector *name*, on its text model."""
    path, model_path = tiny_projector(name)
    with (
        Model.load(model_path, n_gpu_layers=0) as model,
        Projector.load(path, model, use_gpu=False, **options) as projector,
    ):
        yield projector


N_SAMPLES = 16000  # of a sound


def sample(projector: Projector, seed: int = 0) -> Bitmap:
    """An image of 100 x 60 pixels, or a second of sound."""
    if projector.sees:
        return Bitmap.image(100, 60, pixels(100, 60, seed).reshape(-1))
    return Bitmap.sound(N_SAMPLES, tone(N_SAMPLES) * (1 + seed))


def rows_of(projector: Projector, cut: Cut) -> dict[int, array[float]]:
    """The rows of each run of rows."""
    rows = {}
    for index, run in enumerate(cut.runs):
        if isinstance(run, RowRun):
            encoded = projector.encode(cut, index)
            assert encoded is not None
            rows[index] = encoded
    return rows


def text_tokens(model: Model, text: str, *, add_special: bool = False) -> array[int]:
    return model.vocab.tokenize(text, add_special=add_special, parse_special=True)


def evaluate(
    context: Context, projector: Projector, cut: Cut, *, slot: int = 0, most: int = 64
) -> NDArray[np.float32]:
    """Logits after text, *cut*, and text; causal rows in decodes of at most *most*."""
    model = context.model
    rows, pos = rows_of(projector, cut), 0
    tokens = text_tokens(model, BEFORE, add_special=True)
    # Texts that meet are one decode, because a product of one column has other last digits on some CPUs.
    for index, run in enumerate(cut.runs):
        if isinstance(run, TokenRun):
            tokens += run.tokens
            continue
        if tokens:
            decode_tokens(context, tokens, pos, slot)
        pos += len(tokens)
        tokens = array("i")
        decode_rows(context, projector, run, rows[index], pos=pos, slot=slot, most=most)
        pos += run.n_pos
    tokens += text_tokens(model, AFTER)
    decode_tokens(context, tokens, pos, slot)
    return np.asarray(context.logits(len(tokens) - 1))


def decode_tokens(context: Context, tokens: array[int], pos: int, slot: int) -> None:
    """Compute *tokens*; the last one has logits."""
    batch = Batch(context.n_batch)
    batch.add(tokens, pos, slot, True)
    context.decode(batch)


def decode_rows(
    context: Context,
    projector: Projector,
    run: RowRun,
    rows: array[float],
    *,
    pos: int,
    slot: int,
    most: int,
) -> None:
    width, n_sections = projector.n_embd, len(run.positions)
    places = run.positions_at(pos)
    step = most if run.is_causal else run.n_cells
    for start in range(0, run.n_cells, step):
        end = min(start + step, run.n_cells)
        part = array("i")
        for section in range(n_sections):
            offset = section * run.n_cells
            part += places[offset + start : offset + end]
        batch = RowBatch(width, n_sections, is_causal=run.is_causal)
        batch.add(rows[start * width : end * width], part, slot)
        context.decode(batch)


def helper_logits(
    context: Context, projector: Projector, bitmap: Bitmap, *, n_batch: int = 64
) -> NDArray[np.float32]:
    """The same by mtmd's own helper, in slot 0 of a fresh context."""
    text = f"{BEFORE}<__media__>{AFTER}".encode()
    held = ffi.new("char[]", text)
    given = ffi.new("struct mtmd_input_text *", [held, len(text), True, True])
    chunks = ffi.gc(lib.mtmd_input_chunks_init(), lib.mtmd_input_chunks_free)
    bitmaps = ffi.new("const struct mtmd_bitmap *[]", [bitmap.ptr])
    ctx = lib.plr_projector_ctx(projector.ptr)
    assert lib.mtmd_tokenize(ctx, chunks, given, bitmaps, 1) == 0
    n_past = ffi.new("llama_pos *")
    code = lib.mtmd_helper_eval_chunks(
        ctx, context.ptr, chunks, 0, 0, n_batch, True, n_past
    )
    assert code == 0
    found = lib.llama_get_logits_ith(context.ptr, -1)
    return np.frombuffer(
        ffi.buffer(found, 4 * context.model.n_vocab), np.float32
    ).copy()
