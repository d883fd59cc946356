"""
A loaded projector: it makes rows of embeddings of images and sounds, for a model.

A bitmap is an image or a sound, decoded; or only its size, which is enough to count its cells. It
is cut into runs: tokens that the projector writes around and between, and rows that an encode
fills. A row takes a cell, as a token does. Positions have rules of their own: with M-RoPE the rows
of an image have a place in it, and the text behind goes on as if the image were as long as its
longer side.

Files that mtmd would end the process with are refused before it opens them: clip.cpp asks for
most tensors only where a file has them, and its graphs then read some without a look. Types are
another matter: `_ffi/media/node_fault.h` sees what is computed.
"""

from __future__ import annotations

import math
import os
import re
from array import array
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Self

from pyllama_raw.errors import BadMedia, EncodeFailed, ProjectorLoadFailed, Unsupported
from pyllama_raw.native import libllama
from pyllama_raw.native.context import ComputeThread, compute_thread
from pyllama_raw.native.gguf import Header, Scalar, check_gguf, n_bytes
from pyllama_raw.native.libllama import (
    EXCEPTION,
    FLOAT32,
    UINT8,
    Array,
    Handle,
    device_pointers,
    devices,
    ffi,
    last_error,
    lib,
    need,
    pointer,
    zeros,
)
from pyllama_raw.native.memory import available_bytes
from pyllama_raw.native.model import Model
from pyllama_raw.native.params import INT32_MAX, check_threads

_LARGE = (2000, 1000)  # an image that projectors with slices cut
MAX_SIDE = 2**14  # pixels; mtmd computes sizes in 32 bits
MAX_PIXELS = 2**26
MAX_SAMPLES = 2**27


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
            Unsupported: a kind that needs more than the image, or an older llama.cpp.
        """
        need("images and sounds", "mtmd_tokenize_from_parts")
        # mtmd ends the process on a bad file, and Linux does where memory is short.
        name = os.fspath(path)
        on_device = use_gpu and any(device.kind == "gpu" for device in devices())
        check_projector(name, on_host=not on_device)
        params = projector_params(n_threads, use_gpu, min_tokens, max_tokens)
        n_bytes = _memory(name, params, on_host=not on_device)
        # Encodes share the thread of steps, so that they do not slow each other.
        thread = compute_thread()
        since = libllama.mark()
        raw = lib.plr_projector_new(thread.ptr, os.fsencode(name), model.ptr, params)
        if raw == ffi.NULL:
            raise ProjectorLoadFailed(name, libllama.reason(since))
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
        since = libllama.mark()
        raw = lib.plr_bitmap_cut(self.ptr, bitmap.ptr)
        if raw == ffi.NULL:
            raise BadMedia(
                f"it cannot be cut for the projector: {libllama.reason(since)}"
            )
        # The runs are read at once, since callers count cells before anything is encoded.
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
            media, verb = ("sounds", "hear") if is_sound else ("images", "see")
            raise Unsupported(media, f"this projector does not {verb}")

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
        # Tokens of a run need no encode, and a cut is known to its projector only.
        run = cut.runs[index]
        assert isinstance(run, RowRun)
        assert cut.projector is self
        # C writes the rows to an array of Python, and gives way to steps in between.
        chunk = lib.mtmd_input_chunks_get(cut.ptr, index)
        rows = zeros(FLOAT32, run.n_cells * self.n_embd)
        address = pointer(rows, FLOAT32, writable=True)
        since = libllama.mark()
        control = control or EncodeCall()
        code = lib.plr_projector_encode(
            self.ptr, control.ptr, chunk, address, len(rows)
        )
        if code == lib.PLR_CANCELLED:
            return None
        if code:
            reason = last_error() if code == EXCEPTION else libllama.last_errors(since)
            raise EncodeFailed("mtmd_encode_chunk", code, reason or "no reason given")
        if not lib.plr_all_finite(address, len(rows)):
            # Such rows would spread to other sequences of the context.
            raise EncodeFailed("mtmd_encode_chunk", 0, "a value is not a number")
        return rows

    def _check_words(self) -> None:
        """Refuse a model that lacks the tokens which the projector writes."""
        # The size alone tells which tokens are written around and between.
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
            # Words that the model was trained to see around an image, or between its slices.
            if kind == lib.MTMD_INPUT_CHUNK_TYPE_TEXT:
                tokens = lib.mtmd_input_chunk_get_tokens_text(chunk, count)
                yield TokenRun(array("i", ffi.unpack(tokens, count[0])))
            else:
                yield self._row_run(chunk)

    def _row_run(self, chunk: Any) -> RowRun:
        n_cells = int(lib.mtmd_input_chunk_get_n_tokens(chunk))
        image = lib.mtmd_input_chunk_get_tokens_image(chunk)
        # Without M-RoPE rows stand one behind the other, as tokens do. With it a position has
        # four sections, and rows of an image have their place in it.
        sections: tuple[array[int], ...] = (array("i", range(n_cells)),)
        if self.uses_mrope:
            sections *= 4
            if image != ffi.NULL:
                sections = _image_positions(image, n_cells)
        # The last section of an image does not count from the beginning.
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


def projector_bytes(
    path: str | os.PathLike[str],
    *,
    use_gpu: bool,
    min_tokens: int | None = None,
    max_tokens: int | None = None,
) -> dict[str, int]:
    """
    Memory of the projector at *path*, by device.

    Raises:
        ModelLoadFailed, ProjectorLoadFailed, Unsupported: it cannot be used.
    """
    name = os.fspath(path)
    check_projector(name, on_host=False)
    params = projector_params(1, use_gpu, min_tokens, max_tokens)
    sizes = {
        device: int(lib.plr_projector_bytes(os.fsencode(name), params, pointer))
        for device, pointer in device_pointers().items()
    }
    return {device: n_bytes for device, n_bytes in sizes.items() if n_bytes}


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


class Bitmap(Handle):
    """
    Pixels or samples for Projector.cut().

    Thread:
        Any.
    """

    def __init__(self, pointer: Any) -> None:
        super().__init__(pointer, lib.mtmd_bitmap_free)
        self.is_sound = bool(lib.mtmd_bitmap_is_audio(pointer))

    @classmethod
    def image(cls, n_x: int, n_y: int, pixels: Array | bytes | None = None) -> Self:
        """
        An image of *pixels*, red, green and blue; without them, only its size.

        Raises:
            BadMedia: a side is 0 or too long, or the number of pixels is another one.
        """
        fits = 0 < n_x <= MAX_SIDE and 0 < n_y <= MAX_SIDE and n_x * n_y <= MAX_PIXELS
        if not fits:
            raise BadMedia(
                f"{n_x} x {n_y} pixels: sides of 1 to {MAX_SIDE} are allowed, and "
                f"{MAX_PIXELS} pixels in all"
            )
        data = ffi.NULL
        if pixels is not None:
            if len(pixels) != 3 * n_x * n_y:
                raise BadMedia(
                    f"{n_x} x {n_y} pixels take {3 * n_x * n_y} bytes, not {len(pixels)}"
                )
            data = pointer(pixels, UINT8)
        return cls(lib.plr_bitmap_image(n_x, n_y, data))

    @classmethod
    def sound(cls, n_samples: int, samples: Array | None = None) -> Self:
        """
        A sound of *samples* at the rate of the projector; without them, only its length.

        Raises:
            BadMedia: too few samples, or too many.
        """
        if not 2 <= n_samples <= MAX_SAMPLES:  # mtmd aborts on a single sample
            raise BadMedia(f"{n_samples} samples: 2 to {MAX_SAMPLES} are allowed")
        # Without samples there is the length only, as of a sound that is just counted.
        data = ffi.NULL
        if samples is not None:
            data = pointer(samples, FLOAT32, min_size=n_samples)
        return cls(lib.plr_bitmap_sound(n_samples, data))


class TokenRun(NamedTuple):
    """Tokens that the projector writes."""

    tokens: array[int]

    @property
    def n_cells(self) -> int:
        return len(self.tokens)

    @property
    def n_pos(self) -> int:
        return len(self.tokens)


class RowRun(NamedTuple):
    """Rows of embeddings: a whole image or sound, or a slice of one."""

    n_cells: int
    n_pos: int  # positions until what stands behind
    is_causal: bool  # if not, all rows see each other: they are computed in one decode
    positions: tuple[array[int], ...]  # of the rows if they begin at 0: 1 section or 4
    moves: tuple[bool, ...]  # whether positions of a section count from the beginning

    def positions_at(
        self, pos: int, start: int = 0, stop: int | None = None
    ) -> array[int]:
        """Positions of rows [start, stop), section by section, if the run begins at *pos*."""
        # Section by section, as libllama reads them.
        placed = array("i")
        for section, moves in zip(self.positions, self.moves, strict=True):
            part = section[start:stop]
            placed += array("i", [at + pos for at in part]) if moves else part
        return placed


Run = TokenRun | RowRun


class Cut(Handle):
    """Runs of one image or sound; it keeps the pixels or the spectrum for the encodes."""

    def __init__(self, pointer: Any, projector: Handle) -> None:
        super().__init__(pointer, lib.mtmd_input_chunks_free, parents=[projector])
        self.runs: tuple[Run, ...] = ()  # read from the chunks by Projector.cut()
        self.projector = projector  # no other one knows the content


class EncodeCall(Handle):
    """
    One call of Projector.encode(), which a cancel ends at the next border of a layer.

    Thread:
        Any.
    """

    def __init__(self) -> None:
        super().__init__(lib.plr_encode_new(), lib.plr_encode_free)
        self.cancelled = False

    def cancel(self) -> None:
        """For good, also if it has not begun."""
        self.cancelled = True
        lib.plr_encode_cancel(self.ptr)

    @property
    def n_borders(self) -> int:
        """Borders that were reached: the beginning, each layer, the end."""
        return int(lib.plr_encode_n_borders(self.ptr))


# Numbers of each part of a file, with the largest one: clip.cpp divides by some of them.
_HEADS = "attention.head_count"
_SIZES = {_HEADS: INT32_MAX, "embedding_length": INT32_MAX}
_VISION_SIZES = {"image_size": MAX_SIDE, "patch_size": INT32_MAX}
# Kinds whose graph has no attention, or counts heads itself: head_count may be anything.
_HEADLESS = ("gemma3nv", "gemma4ua", "gemma4uv", "qwen3tts_spkenc", "yasa2")
_EPSILON = "attention.layer_norm_epsilon"
# Their rows depend on what stands before them in the prompt: not on the image alone.
_DEPENDENT = ("deepseek4v", "hunyuanvl")
# Kinds whose graph reads a tensor without a look whether it is there.
_NO_PATCHES = ("gemma3nv", "deepseekocr", "deepseekocr2")
_LLAVA = ("mlp", "ldp", "ldpv2", "adapter")
_RESIZED = ("lfm2", "phi4", "kimivl", "kimik25", "ling3vl", "paddleocr", "muse-glimmer")
_PLACED = (*_LLAVA, *_RESIZED, "resampler", "minicpmv4_6")
_WHISPER = ("ultravox", "voxtral", "qwen2a", "qwen2.5o", "qwen3a", "glma", "meralion")
_HEARD = (*_WHISPER, "musicflamingo")
_BIASED = ("qwen2vl_merger", "qwen2.5vl_merger", "qwen2.5o")
_LAYER = re.compile(r"([av]\.blk\.\d+\.)attn_out\.weight")


def check_projector(path: str, *, on_host: bool) -> None:
    """
    Args:
        on_host: whether mtmd copies the weights to host memory.

    Raises:
        ModelLoadFailed: there is no such file, or it is damaged.
        ProjectorLoadFailed: it is no projector, or mtmd would end the process with it.
        Unsupported: a kind that needs more than the image.
    """
    header = check_gguf(path)
    values = header.values
    arch = values.get("general.architecture")
    if arch != "clip":
        raise ProjectorLoadFailed(path, f"this is a file of {arch!r}, not a projector")
    # A file may have a part that sees and one that hears, each of a kind of its own.
    kinds = {str(v) for k, v in values.items() if k.endswith("projector_type")}
    if dependent := kinds.intersection(_DEPENDENT):
        raise Unsupported(
            f"the projector {dependent.pop()}",
            "its rows depend on what stands before the image, which a cache cannot know",
        )
    for part in ("vision", "audio"):
        if values.get(f"clip.has_{part}_encoder"):
            _check_numbers(path, header, part)
    names = {tensor.name for tensor in header.tensors}
    for name in _needed(kinds, names, values):
        if name not in names:
            raise ProjectorLoadFailed(path, f"tensor {name!r} is missing")
    # On the host mtmd copies all weights, and does not look whether there is room.
    needed, available = sum(map(n_bytes, header.tensors)), available_bytes()
    if on_host and available is not None and needed > available:
        raise ProjectorLoadFailed(
            path,
            f"its weights have {needed / 2**30:.1f} GiB, "
            f"available are {available / 2**30:.1f} GiB",
        )


def _check_numbers(path: str, header: Header, part: str) -> None:
    sizes = _SIZES | (_VISION_SIZES if part == "vision" else {})
    of_all = header.values.get("clip.projector_type")
    kind = header.values.get(f"clip.{part}.projector_type", of_all)
    for name, limit in sizes.items():
        if name == _HEADS and kind in _HEADLESS:
            continue
        value = header.values.get(f"clip.{part}.{name}", 1)
        if not (isinstance(value, int) and 0 < value <= limit):
            raise ProjectorLoadFailed(
                path, f"clip.{part}.{name}={value!r} is not allowed: give 1 to {limit}"
            )
    epsilon = header.values.get(f"clip.{part}.{_EPSILON}", 0.0)
    if not (isinstance(epsilon, float) and 0 <= epsilon < math.inf):
        raise ProjectorLoadFailed(
            path, f"clip.{part}.{_EPSILON}={epsilon!r} is not allowed: give 0 or more"
        )


def _needed(
    kinds: set[str], names: set[str], values: Mapping[str, Scalar]
) -> Iterator[str]:
    """Tensors that a graph of *kinds* reads, of those that mtmd does not ask for."""
    if values.get("clip.has_vision_encoder") and not kinds.intersection(_NO_PATCHES):
        yield "v.patch_embd.weight"
    for part, placed in (("vision", _PLACED), ("audio", _HEARD)):
        if values.get(f"clip.has_{part}_encoder") and kinds.intersection(placed):
            yield f"{part[0]}.position_embd.weight"
    if "mlp" in kinds:
        normed = "mm.3.weight" in names
        for number in "0134" if normed else "02" if "mm.2.weight" in names else "0":
            yield f"mm.{number}.weight"
            yield f"mm.{number}.bias"
    # Attention has one tensor for all three, or three of its own.
    biased = bool(kinds.intersection(_BIASED))
    for layer in filter(None, map(_LAYER.fullmatch, names)):
        if f"{layer[1]}attn_qkv.weight" not in names:
            yield from _attention(layer[1], biased=biased and layer[1][0] == "v")


def _attention(layer: str, *, biased: bool) -> Iterator[str]:
    for which in "qkv":
        yield f"{layer}attn_{which}.weight"
        if biased:
            yield f"{layer}attn_{which}.bias"
