"""A loaded projector: it makes rows of embeddings for a model of images and sounds."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from typing import Any, Self

from pyllama_raw.errors import BadMedia, EncodeFailed, ProjectorLoadFailed, Unsupported
from pyllama_raw.native import log
from pyllama_raw.native.arrays import FLOAT32, pointer, zeros
from pyllama_raw.native.bitmap import Bitmap
from pyllama_raw.native.check import EXCEPTION
from pyllama_raw.native.compute_thread import ComputeThread, compute_thread
from pyllama_raw.native.cut import Cut, RowRun, Run, TokenRun
from pyllama_raw.native.demand import available_bytes
from pyllama_raw.native.encode import EncodeCall
from pyllama_raw.native.handle import Handle
from pyllama_raw.native.libllama import devices, ffi, last_error, lib
from pyllama_raw.native.model import Model
from pyllama_raw.native.params import check_threads
from pyllama_raw.native.projector_check import check_projector

_LARGE = (2000, 1000)  # an image that projectors with slices cut


class Projector(Handle):
    """
    One projector file, for one model. Make it with load().

    Encodes are computed by the thread that computes steps. They give way to steps at the
    border of each layer.

    Thread:
        Any; encodes wait for each other.
    """

    def __init__(
        self,
        pointer: Any,
        *,
        path: str,
        model: Model,
        thread: ComputeThread,
        n_bytes: int,
    ) -> None:
        super().__init__(pointer, lib.plr_projector_free, parents=[model, thread])
        self._thread = thread  # contexts share it as long as somebody holds it
        self.path, self.model = path, model
        self.n_embd = model.n_embd_inp  # width of a row
        self.n_bytes = n_bytes  # weights and compute buffers; 0: it cannot be told
        self._n_vocab = model.n_vocab
        ctx = lib.plr_projector_ctx(pointer)
        self.sees = bool(lib.mtmd_support_vision(ctx))
        self.hears = bool(lib.mtmd_support_audio(ctx))
        rate = int(lib.mtmd_get_audio_sample_rate(ctx))
        self.sample_rate = rate if self.hears else None  # of samples, a second
        self.uses_mrope = bool(lib.mtmd_decode_use_mrope(ctx))

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: Model,
        *,
        n_threads: int = 1,
        use_gpu: bool = True,
        min_tokens: int | None = None,
        max_tokens: int | None = None,
    ) -> Self:
        """
        Load the projector file at *path*.

        Args:
            model: takes the rows; kept alive.
            min_tokens, max_tokens: rows of an image, for projectors that can choose.

        Raises:
            ModelLoadFailed: there is no such file, or it is damaged.
            ProjectorLoadFailed: it is no projector, or one for another model; or it needs
                more memory than there is.
            Unsupported: a kind that needs more than the image.
        """
        name = os.fspath(path)
        on_device = use_gpu and any(device.kind == "gpu" for device in devices())
        check_projector(name, on_host=not on_device)
        params = projector_params(n_threads, use_gpu, min_tokens, max_tokens)
        n_bytes = _memory(name, params, on_host=not on_device)
        thread = compute_thread()
        since = log.mark()
        raw = lib.plr_projector_new(thread.ptr, os.fsencode(name), model.ptr, params)
        if raw == ffi.NULL:
            raise ProjectorLoadFailed(name, log.reason(since))
        projector = cls(raw, path=name, model=model, thread=thread, n_bytes=n_bytes)
        projector._check_words()
        return projector

    def cut(self, bitmap: Bitmap) -> Cut:
        """
        The runs that encode() will make of *bitmap*, with their sizes and positions.

        A bitmap without content has the same runs as one of the same size.

        Raises:
            Unsupported: the projector does not see, or does not hear.
            BadMedia: the size cannot be handled.
        """
        self.check_support(is_sound=bitmap.is_sound)
        since = log.mark()
        raw = lib.plr_bitmap_cut(self.ptr, bitmap.ptr)
        if raw == ffi.NULL:
            raise BadMedia(f"it cannot be cut for the projector: {log.reason(since)}")
        cut = Cut(raw, self)
        try:
            cut.runs = tuple(self._runs(raw))
        except BaseException:
            cut.close()
            raise
        return cut

    def check_support(self, *, is_sound: bool) -> None:
        """Raise Unsupported for a sound if it does not hear, for an image if it does not see."""
        if not (self.hears if is_sound else self.sees):
            what, verb = ("sounds", "hear") if is_sound else ("images", "see")
            raise Unsupported(what, f"this projector does not {verb}")

    def encode(
        self, cut: Cut, index: int, control: EncodeCall | None = None
    ) -> array[float] | None:
        """
        The rows of cut.runs[index], n_cells x n_embd; None if it was cancelled.

        Raises:
            EncodeFailed: the computation failed, or a value is not a number.

        Thread:
            Any, without the GIL. Takes seconds for a large projector.
        """
        run = cut.runs[index]
        assert isinstance(run, RowRun)
        assert cut.projector is self
        chunk = lib.mtmd_input_chunks_get(cut.ptr, index)
        rows = zeros(FLOAT32, run.n_cells * self.n_embd)
        address = pointer(rows, FLOAT32, writable=True)
        since = log.mark()
        control = control or EncodeCall()
        code = lib.plr_projector_encode(
            self.ptr, control.ptr, chunk, address, len(rows)
        )
        if code == lib.PLR_CANCELLED:
            return None
        if code:
            said = last_error() if code == EXCEPTION else log.last_errors(since)
            raise EncodeFailed("mtmd_encode_chunk", code, said or "no reason given")
        if not lib.plr_all_finite(address, len(rows)):
            # Such rows would spread to other sequences of the context.
            raise EncodeFailed("mtmd_encode_chunk", 0, "a value is not a number")
        return rows

    def _check_words(self) -> None:
        """Refuse a model that lacks the tokens which the projector writes."""
        samples = [Bitmap.image(*_LARGE)] if self.sees else []
        samples += [Bitmap.sound(2)] if self.hears else []
        for sample in samples:
            with sample, self.cut(sample) as cut:
                tokens = [
                    t
                    for run in cut.runs
                    if isinstance(run, TokenRun)
                    for t in run.tokens
                ]
            if not all(0 <= token < self._n_vocab for token in tokens):
                self.close()
                raise ProjectorLoadFailed(
                    self.path, "the model has no tokens for words that it writes"
                )

    def _runs(self, chunks: Any) -> Iterator[Run]:
        count = ffi.new("size_t *")
        for index in range(lib.mtmd_input_chunks_size(chunks)):
            chunk = lib.mtmd_input_chunks_get(chunks, index)
            kind = lib.mtmd_input_chunk_get_type(chunk)
            if kind == lib.MTMD_INPUT_CHUNK_TYPE_TEXT:
                tokens = lib.mtmd_input_chunk_get_tokens_text(chunk, count)
                yield TokenRun(array("i", ffi.unpack(tokens, count[0])))
            else:
                yield self._row_run(chunk)

    def _row_run(self, chunk: Any) -> RowRun:
        n_cells = int(lib.mtmd_input_chunk_get_n_tokens(chunk))
        image = lib.mtmd_input_chunk_get_tokens_image(chunk)
        sections: tuple[array[int], ...] = (array("i", range(n_cells)),)
        if self.uses_mrope:
            sections *= 4
            if image != ffi.NULL:
                sections = _image_positions(image, n_cells)
        moves = tuple(True for _ in sections)
        if self.uses_mrope and image != ffi.NULL:
            moves = (True, True, True, False)
        return RowRun(
            n_cells,
            int(lib.mtmd_input_chunk_get_n_pos(chunk)),
            bool(lib.plr_chunk_is_causal(self.ptr, chunk)),
            sections,
            moves,
        )


def _memory(path: str, params: Any, *, on_host: bool) -> int:
    """
    Bytes that a projector needs; weights are not read, and no buffer is touched.

    Raises:
        ProjectorLoadFailed: there is less: Linux would end the process in an encode.
    """
    needed = int(lib.plr_projector_bytes(os.fsencode(path), params, ffi.NULL))
    available = available_bytes()
    if on_host and available is not None and needed > available:
        raise ProjectorLoadFailed(
            path, f"it needs {needed} bytes, available are {available}"
        )
    return needed


def _image_positions(image: Any, n_cells: int) -> tuple[array[int], ...]:
    """Time, row, column and 0, in the order that libllama reads them."""
    get = lib.mtmd_image_tokens_get_decoder_pos
    places = [get(image, 0, index) for index in range(n_cells)]
    return (
        array("i", [place.t for place in places]),
        array("i", [place.y for place in places]),
        array("i", [place.x for place in places]),
        array("i", [place.z for place in places]),
    )


def projector_params(
    n_threads: int, use_gpu: bool, min_tokens: int | None, max_tokens: int | None
) -> Any:
    params = ffi.new("struct mtmd_context_params *")
    params[0] = lib.mtmd_context_params_default()
    params.n_threads = check_threads("n_threads", n_threads)
    params.use_gpu = use_gpu
    params.print_timings = False
    params.image_min_tokens = -1 if min_tokens is None else min_tokens
    params.image_max_tokens = -1 if max_tokens is None else max_tokens
    return params
