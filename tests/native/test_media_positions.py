"""libllama is given the positions that mtmd's own helper gives it, number by number."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pyllama_raw import Image, SamplingParams, _ffi
from pyllama_raw.engine.media_desk import MediaDesk
from pyllama_raw.media import Audio
from pyllama_raw.native.context import Context
from pyllama_raw.native.libllama import ffi, lib
from pyllama_raw.native.model import Model
from tests.api.media_engines import opened, picture
from tests.media.files import wav_file
from tests.native.support import make_context
from tests.support.tiny import PROJECTORS

pytestmark = pytest.mark.native

N_OUTPUT = 4
Place = tuple[int, ...]  # of a row: one number, or one of each section of M-RoPE

IMAGES = {
    "first": [picture(0, 100, 60), "what is this?"],
    "between": ["see ", picture(0, 100, 60), " and say"],
    "last": ["what is this: ", picture(0, 60, 100), "?"],
    "two": ["a", picture(0, 28, 28), "b", picture(1, 300, 40), "c"],
    "side by side": [picture(0, 200, 200), picture(1, 40, 300), "c"],
    "equal": ["a", picture(0, 90, 30), "b", picture(0, 90, 30), "c"],
}
SOUNDS = {"between": ["hear ", Audio(wav_file(4000)), " and say"]}
CASES = [
    (name, prompt)
    for name, projector in PROJECTORS.items()
    for prompt in (IMAGES if projector.size else SOUNDS)
]


@pytest.fixture
def given(monkeypatch) -> list[Place]:
    """The positions of all rows that libllama is given, in order."""
    places: list[Place] = []
    step = Context.step

    def watched(context: Context, batch: Any, samplers: Any, **options: Any) -> Any:
        raw = batch.raw
        n_sections = 1 if raw.embd == ffi.NULL else batch.n_sections
        places.extend(rows(ffi.unpack(raw.pos, raw.n_tokens * n_sections), n_sections))
        return step(context, batch, samplers, **options)

    monkeypatch.setattr(Context, "step", watched)
    return places


def rows(numbers: list[int], n_sections: int) -> Iterator[Place]:
    """The numbers of each row, which are given section by section."""
    n_rows = len(numbers) // n_sections
    sections = [numbers[i * n_rows : (i + 1) * n_rows] for i in range(n_sections)]
    return zip(*sections, strict=True)


@pytest.mark.parametrize(("name", "prompt"), CASES)
def test_positions_are_those_of_the_helper(given, name, prompt):
    """
    Of text, of rows, and of the output behind, wherever images stand and chunks end.
    """
    parts = (IMAGES if PROJECTORS[name].size else SOUNDS)[prompt]
    params = SamplingParams(max_tokens=N_OUTPUT, temperature=0, ignore_eos=True)
    with opened(name, context={"n_batch": 64, "n_ubatch": 64}) as engine:
        engine.complete(parts, params)

        desk = engine._parts.media
        assert isinstance(desk, MediaDesk)
        model = engine._parts.executor.context.model
        expected = helper_places(desk, model, parts)

    n_past = max(max(place) for place in expected) + 1
    output = [(n_past + i,) for i in range(N_OUTPUT - 1)]
    assert given == [*expected, *output]


class EmbdBatch(ctypes.Structure):
    """mtmd-helper.h: struct mtmd_helper_embd_batch."""

    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("embd", ctypes.c_void_p),
        ("n_embd", ctypes.c_int32),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_pos", ctypes.c_int32),
        ("seq_id", ctypes.c_int32),
    )


AfterDecode = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.POINTER(EmbdBatch), ctypes.c_void_p
)


def helper_places(
    desk: MediaDesk, model: Model, parts: list[str | Image | Audio]
) -> list[Place]:
    """What mtmd_helper_eval_chunks() gives libllama for *parts*."""
    projector = desk.projector
    ctx = lib.plr_projector_ctx(projector.ptr)
    chunks = helper_chunks(desk, parts)
    [library] = (Path(_ffi.__file__).parent / "lib").glob("libmtmd.*")
    decode = ctypes.CDLL(str(library)).mtmd_helper_decode_image_chunk
    places: list[Place] = []

    def note(batch: Any, _: Any) -> int:
        got = batch.contents
        places.extend(rows(got.pos[: got.n_tokens * got.n_pos], got.n_pos))
        return 0

    callback = AfterDecode(note)
    n_past = ctypes.c_int32(0)
    with make_context(model, n_ctx=4096, n_batch=512, n_ubatch=512) as context:
        for index in range(lib.mtmd_input_chunks_size(chunks)):
            chunk = lib.mtmd_input_chunks_get(chunks, index)
            n_tokens = lib.mtmd_input_chunk_get_n_tokens(chunk)
            if lib.mtmd_input_chunk_get_type(chunk) == lib.MTMD_INPUT_CHUNK_TYPE_TEXT:
                # mtmd-helper.cpp: text_batch.pos[j] = n_past++
                places.extend((n_past.value + i,) for i in range(n_tokens))
                n_past.value += n_tokens
                continue
            context.clear()  # its tokens are not computed here
            zeros = (ctypes.c_float * (n_tokens * projector.n_embd))()
            code = decode(
                address(ctx),
                address(context.ptr),
                address(chunk),
                zeros,
                n_past,
                0,
                512,
                ctypes.byref(n_past),
                callback,
                None,
            )
            assert code == 0
    return places


def helper_chunks(desk: MediaDesk, parts: list[str | Image | Audio]) -> Any:
    marked = "".join(p if isinstance(p, str) else "<__media__>" for p in parts)
    media = [part for part in parts if not isinstance(part, str)]
    text = marked.encode()
    held = ffi.new("char[]", text)
    given_text = ffi.new("struct mtmd_input_text *", [held, len(text), True, True])
    chunks = ffi.gc(lib.mtmd_input_chunks_init(), lib.mtmd_input_chunks_free)
    bitmaps = [desk._reader.decode(part) for part in media]
    pointers = ffi.new("const struct mtmd_bitmap *[]", [b.ptr for b in bitmaps])
    ctx = lib.plr_projector_ctx(desk.projector.ptr)
    assert lib.mtmd_tokenize(ctx, chunks, given_text, pointers, len(media)) == 0
    return chunks


def address(pointer: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(int(ffi.cast("uintptr_t", pointer)))
