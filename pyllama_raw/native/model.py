"""
A loaded model: weights, metadata and vocabulary, shared by its contexts; its file in another type;
and adapters, which a context computes with besides the weights.

Files of adapters are checked before libllama opens them. A LoRA is pairs of thin matrices A and B,
named after the product that they change; libllama compares half of their shapes, and others end the
process at the next decode. A control vector is a direction for each layer but the first; libllama
reads no such file, so this does.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self, get_args

from pyllama_raw.errors import (
    AdapterLoadFailed,
    ConfigError,
    ModelLoadFailed,
    QuantizeFailed,
)
from pyllama_raw.native import libllama
from pyllama_raw.native.gguf import (
    NO_OVERRIDES,
    DamagedFile,
    Header,
    TensorInfo,
    check_gguf,
    check_tensors,
    header_of,
    n_bytes,
)
from pyllama_raw.native.kernels import weaves
from pyllama_raw.native.libllama import Handle, ffi, lib, text
from pyllama_raw.native.params import INT32_MAX, model_params
from pyllama_raw.native.vocab import Vocab


class LoadProgress(Handle):
    """Progress of the loading of a model; any thread may look at it, and cancel."""

    def __init__(self) -> None:
        super().__init__(lib.plr_progress_new(), lib.plr_progress_free)
        self.cancelled = False

    @property
    def fraction(self) -> float:
        """The loaded part, 0 to 1."""
        return float(lib.plr_progress_get(self.ptr))

    def cancel(self) -> None:
        """End the loading soon; safe to call too early or too late."""
        self.cancelled = True
        lib.plr_progress_cancel(self.ptr)


class Model(Handle):
    """One model file. Make it with load(); contexts keep it alive after close()."""

    def __init__(
        self, pointer: Any, *, path: str, header: Header, vocab_only: bool
    ) -> None:
        super().__init__(pointer, lib.llama_model_free)
        self.path = path
        self.header = header  # with the overrides
        self.vocab_only = vocab_only
        # Facts, which stay when it is closed.
        self.n_ctx_train = int(lib.llama_model_n_ctx_train(pointer))
        self.n_layer = int(lib.llama_model_n_layer(pointer))
        self.n_embd = int(lib.llama_model_n_embd(pointer))
        # width of a row in place of a token
        self.n_embd_inp = int(lib.llama_model_n_embd_inp(pointer))
        # width of the vector of a text
        self.n_embd_out = int(lib.llama_model_n_embd_out(pointer))
        # layers at its end that predict further tokens
        self.n_layer_nextn = int(lib.llama_model_n_layer_nextn(pointer))
        self.n_cls_out = int(lib.llama_model_n_cls_out(pointer))  # scores of a text
        # tokens of its window; 0: none
        self.n_swa = int(lib.llama_model_n_swa(pointer))
        self.n_params = int(lib.llama_model_n_params(pointer))
        self.size_bytes = int(lib.llama_model_size(pointer))  # of all tensors
        # the type of most tensors
        self.ftype = text(lib.llama_ftype_name(lib.llama_model_ftype(pointer)))
        self.has_encoder = bool(lib.llama_model_has_encoder(pointer))
        # an encoder reads prompts for its decoder
        self.reads_sources = self.has_encoder and bool(
            lib.llama_model_has_decoder(pointer)
        )
        start = int(lib.llama_model_decoder_start_token(pointer))
        # begins what a decoder beside an encoder writes
        self.decoder_start = None if start < 0 else start
        self.is_recurrent = bool(lib.llama_model_is_recurrent(pointer))
        self.is_hybrid = bool(lib.llama_model_is_hybrid(pointer))
        splitting = str(header.values.get("tokenizer.ggml.pre", ""))
        self.vocab = Vocab(self, self.n_ctx_train, splitting)
        self.n_vocab = self.vocab.n_tokens

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        progress: LoadProgress | None = None,
        vocab_only: bool = False,
        **fields: Any,
    ) -> Self:
        """
        Load a GGUF file.

        Args:
            progress: for other threads, which may look and cancel meanwhile.
            fields: of ModelConfig, all optional.

        Raises:
            ModelLoadFailed: the file is missing or damaged, or the load was cancelled.
            ConfigError: a field is out of range.
        """
        # The file is checked first, because libllama ends the process on a bad one.
        name = os.fspath(path)
        header = check_gguf(name, fields.get("kv_overrides", NO_OVERRIDES))
        # Weights that libllama puts in another order are lost to our kernels.
        if fields.get("use_extra_bufts") is None:
            fields["use_extra_bufts"] = not weaves(header)
        params, keep_alive = model_params(fields, vocab_only=vocab_only)
        # libllama says in its log only why it failed.
        since = libllama.mark()
        watched = ffi.NULL if progress is None else progress.ptr
        pointer = lib.plr_model_load(os.fsencode(name), params, watched)
        del keep_alive  # llama.cpp copies what it needs of the params
        if pointer == ffi.NULL:
            is_cancelled = progress is not None and progress.cancelled
            reason = "it was cancelled" if is_cancelled else libllama.reason(since)
            raise ModelLoadFailed(name, reason)
        model = cls(pointer, path=name, header=header, vocab_only=vocab_only)
        # With vocab_only libllama reads no numbers of layers.
        if not vocab_only:
            model._check_numbers()
        return model

    def _check_numbers(self) -> None:
        """
        Close and refuse the model if a number that others count on is out of range.

        Files have 32 bits without a sign, libllama reports them with one.
        """
        arch = self.meta.get("general.architecture", "")
        # The last ones may be 0, but a number of 2**31 or more comes out negative.
        for read, key, least in _NUMBERS:
            value = read(self)
            if value < least:
                self.close()
                raise ModelLoadFailed(
                    self.path,
                    f"{arch}.{key}={value % 2**32} is not allowed: "
                    f"the file, or kv_overrides, must give {least} to {INT32_MAX}",
                )

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the classes that scores are of; empty texts where the file has none."""
        labels = (lib.llama_model_cls_label(self.ptr, i) for i in range(self.n_cls_out))
        return tuple(text(label) if label else "" for label in labels)

    # Without a layer libllama ends the process where these are read.
    @property
    def n_head(self) -> int:
        return int(lib.llama_model_n_head(self.ptr))

    @property
    def n_head_kv(self) -> int:
        return int(lib.llama_model_n_head_kv(self.ptr))

    @property
    def desc(self) -> str:
        """Architecture, size class and file type in words."""
        buffer = ffi.new("char[]", 256)
        lib.llama_model_desc(self.ptr, buffer, len(buffer))
        return text(buffer)

    @cached_property
    def meta(self) -> dict[str, str]:
        """GGUF metadata without arrays, values as text."""
        count = lib.llama_model_meta_count(self.ptr)
        keys = lib.llama_model_meta_key_by_index
        values = lib.llama_model_meta_val_str_by_index
        return {self._meta(keys, i): self._meta(values, i) for i in range(count)}

    def _meta(self, read: Callable[..., int], index: int) -> str:
        # Most values are short. libllama tells the length of longer ones.
        buffer = ffi.new("char[]", 256)
        length = read(self.ptr, index, buffer, len(buffer))
        if length >= len(buffer):
            buffer = ffi.new("char[]", length + 1)
            read(self.ptr, index, buffer, len(buffer))
        return text(buffer)

    def chat_template(self) -> str | None:
        """The Jinja source of the default chat template, if there is one."""
        template = lib.llama_model_chat_template(self.ptr, ffi.NULL)
        return text(template) if template else None


# What reads a number of a model, its key in the file without the architecture, its minimum.
_NUMBERS: tuple[tuple[Callable[[Model], int], str, int], ...] = (
    (lambda model: model.n_ctx_train, "context_length", 2),  # a prompt, and one token
    (lambda model: model.n_vocab, "vocab_size", 1),
    (lambda model: model.n_embd, "embedding_length", 1),
    (lambda model: model.n_layer, "block_count", 1),
    (lambda model: model.n_head, "attention.head_count", 0),
    (lambda model: model.n_head_kv, "attention.head_count_kv", 0),
    (lambda model: model.n_swa, "attention.sliding_window", 0),
)


# Those that need no importance matrix.
FileType = Literal[
    "f16",
    "bf16",
    "q8_0",
    "q6_k",
    "q5_k_m",
    "q5_1",
    "q5_0",
    "q4_k_m",
    "q4_1",
    "q4_0",
    "iq4_nl",
    "iq4_xs",
    "q3_k_m",
    "q2_k",
]
FILE_TYPES: tuple[str, ...] = get_args(FileType)


def quantize(source: Path, target: Path, file_type: FileType) -> None:
    """
    Write the model *source* to *target* with most tensors in *file_type*.

    Lossy: what *source* has lost already is not got back. *source* is only read; *target*
    is empty until it is complete.

    Raises:
        ConfigError: *target* exists, its folder cannot be written, or the type is unknown.
        ModelLoadFailed: *source* is no model that libllama knows.
        QuantizeFailed: libllama refused, or the disk is full.
    """
    if file_type not in FILE_TYPES:
        raise ConfigError(
            f"file_type={file_type!r}: give one of {', '.join(FILE_TYPES)}"
        )
    # What would fail late fails now: quantising takes minutes.
    if target.exists():
        raise ConfigError(f"{target} exists: it is not replaced, name another file")
    if "\0" in str(target):
        raise ConfigError(f"{str(target)!r}: the path contains a NUL")
    # Loading refuses a file that would end the process.
    Model.load(source, vocab_only=True).close()
    try:
        target.touch(exist_ok=False)  # nobody else writes it from here on
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}") from error
    # A run that fails leaves neither the target nor a part of it.
    unfinished = target.with_name(f".{target.name}.unfinished")
    try:
        _run(source, unfinished, file_type)
        unfinished.replace(target)
    except BaseException:
        target.unlink()
        raise
    finally:
        unfinished.unlink(missing_ok=True)


def _run(source: Path, written: Path, file_type: FileType) -> None:
    params = ffi.new("struct llama_model_quantize_params *")
    params[0] = lib.llama_model_quantize_default_params()
    params.nthread = 1
    params.ftype = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{file_type.upper()}")
    params.allow_requantize = True
    since = libllama.mark()
    code = lib.plr_quantize(os.fsencode(source), os.fsencode(written), params)
    if code:
        raise QuantizeFailed(str(source), code, libllama.reason(since))


A, B = ".lora_a", ".lora_b"
TABLE = "token_embd.weight"  # rows of it are looked up, so its pair lies the other way
DIRECTION = "direction."
F32 = 0  # ggml.h: enum ggml_type
MAX_ALPHA = 1e4  # products with it stay far from infinity
Dims = tuple[int, ...]


class Lora(Handle):
    """A LoRA. It must be set on no context when it is closed; the model is freed after it."""

    def __init__(self, model: Model, path: str, *, digest: str, n_bytes: int) -> None:
        """Use load_adapter()."""
        # Its file was checked by read_adapter(): libllama looks at half of the shapes.
        since = libllama.mark()
        pointer = lib.plr_adapter_load(model.ptr, os.fsencode(path))
        if pointer == ffi.NULL:
            raise AdapterLoadFailed(path, libllama.reason(since))
        super().__init__(pointer, lib.plr_adapter_free, parents=[model])
        self.digest, self.n_bytes = digest, n_bytes
        # Its effect would begin inside of a prompt, which no cache of prefixes knows.
        if lib.llama_adapter_get_alora_n_invocation_tokens(pointer):
            self.close()
            reason = (
                "it is an aLoRA, which is at work on a part of a prompt: use a LoRA"
            )
            raise AdapterLoadFailed(path, reason)


class ControlVector:
    """Directions that are added to what each layer but the first gives."""

    def __init__(self, values: array[float], *, digest: str, n_bytes: int) -> None:
        self.values = values  # of layers 1, 2, ...
        self.digest, self.n_bytes = digest, n_bytes

    def close(self) -> None:
        """There is nothing to free."""


Adapter = Lora | ControlVector


def load_adapter(model: Model, path: str | os.PathLike[str]) -> Adapter:
    """
    Load a LoRA or a control vector, as the file says; decodes wait while libllama reads it.

    Raises:
        AdapterLoadFailed: there is no such file, it is damaged, or does not fit the model.

    Thread:
        Any.
    """
    name = os.fspath(path)
    # A control vector is in Python's memory: nothing of it is in libllama until it is set.
    file = read_adapter(name, model.header)
    if file.directions is not None:
        return ControlVector(file.directions, digest=file.digest, n_bytes=file.n_bytes)
    return Lora(model, name, digest=file.digest, n_bytes=file.n_bytes)


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """The content of a file that fits the model."""

    digest: str  # of all of it
    n_bytes: int  # of its tensors
    # of a control vector: of layers 1, 2, ...; of a LoRA None
    directions: array[float] | None


def read_adapter(path: str, model: Header) -> AdapterFile:
    """
    Read the adapter at *path*, which is for the model with the header *model*.

    Raises:
        AdapterLoadFailed: there is no such file, it is damaged, or of another model.
    """
    try:
        header = header_of(path)
        check_tensors(header)
        # The file says which of the two it is.
        is_control = header.values.get("general.architecture") == "controlvector"
        (_check_control if is_control else _check_lora)(header, model)
        with (
            Path(path).open("rb") as stream,
            mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            # Reading all of it once checks its numbers and gives it a name for caches.
            _check_numbers(header, content)
            digest = hashlib.sha256(content).hexdigest()
            directions = _directions(header, model, content) if is_control else None
    except (DamagedFile, OSError) as error:
        raise AdapterLoadFailed(path, str(error)) from None
    return AdapterFile(digest, sum(map(n_bytes, header.tensors)), directions)


def _check_lora(header: Header, model: Header) -> None:
    for key, expected in (
        ("general.type", "adapter"),
        ("adapter.type", "lora"),
        ("general.architecture", model.values.get("general.architecture")),
    ):
        if (value := header.values.get(key)) != expected:
            raise DamagedFile(
                f"{key} is {value!r}, an adapter of this model has {expected!r}"
            )
    alpha = header.values.get("adapter.lora.alpha", 0.0)
    if type(alpha) is not float or not abs(alpha) <= MAX_ALPHA:
        raise DamagedFile(
            f"adapter.lora.alpha={alpha!r} is not allowed: 0 to {MAX_ALPHA:g} is"
        )
    _check_pairs(header, model)


def _check_pairs(header: Header, model: Header) -> None:
    products = {tensor.name: tensor.dims for tensor in model.tensors}
    parts = {tensor.name: tensor.dims for tensor in header.tensors}
    for name, dims in parts.items():
        base, end = name[: -len(A)], name[-len(A) :]
        # Every tensor is one of a pair, of a product that the model has.
        if end not in (A, B) or base + A not in parts or base + B not in parts:
            raise DamagedFile(f"tensor {name!r} is not of a pair {A} and {B}")
        if base not in products:
            raise DamagedFile(f"the model has no tensor {base!r}, which it changes")
        # Tied weights are looked up and multiplied, and a pair fits one of these only.
        if base == TABLE and "output.weight" not in products:
            raise DamagedFile(
                f"{TABLE!r} is the output of this model, too: it cannot be changed"
            )
        if end == A:
            _check_pair(base, products[base], dims, parts[base + B])


def _check_pair(name: str, product: Dims, a: Dims, b: Dims) -> None:
    """The first dimension is the one that a product sums over; the third counts experts."""
    if len(product) > 1:
        n_in, n_out, *experts = product
        # A maps inputs to the rank, B the rank to outputs; of a table both lie the other way.
        rank = a[0] if name == TABLE else (*a, 1)[1]
        fitting = [n_in, rank, *experts], [rank, n_out, *experts]
        if name == TABLE:
            fitting = [rank, n_out], [rank, n_in]
        if (_least(a), _least(b)) == tuple(map(_least, fitting)):
            return
    raise DamagedFile(
        f"{name!r} is {list(product)} in the model, which {list(a)} and {list(b)} do not fit"
    )


def _least(dims: Dims | list[int]) -> list[int]:
    """Dimensions without the last ones that are 1: those need not be written."""
    sizes = list(dims)
    while len(sizes) > 1 and sizes[-1] == 1:
        sizes.pop()
    return sizes


def _check_control(header: Header, model: Header) -> None:
    arch = str(model.values.get("general.architecture"))
    # The hint is optional; the sizes of tensors must fit anyway.
    hint = header.values.get("controlvector.model_hint", arch)
    if hint != arch:
        raise DamagedFile(f"it is made for {hint!r}, the model is {arch!r}")
    n_layer, n_embd = _sizes(model)
    for tensor in header.tensors:
        if tensor.name not in (f"{DIRECTION}{layer}" for layer in range(1, n_layer)):
            last = f"{DIRECTION}{n_layer - 1}"
            raise DamagedFile(f"tensor {tensor.name!r} is not {DIRECTION}1 to {last}")
        if tensor.type != F32 or _least(tensor.dims) != [n_embd]:
            raise DamagedFile(
                f"tensor {tensor.name!r} is not {n_embd} floats, as layers give"
            )


def _sizes(model: Header) -> tuple[int, int]:
    """Layers, and floats that each gives."""
    arch = model.values.get("general.architecture")
    n_layer = model.values.get(f"{arch}.block_count")
    n_embd = model.values.get(f"{arch}.embedding_length")
    assert isinstance(n_layer, int)
    assert isinstance(n_embd, int)
    return n_layer, n_embd


def _check_numbers(header: Header, content: mmap.mmap) -> None:
    """After a number that is not finite nothing else is."""
    if not header.tensors:
        raise DamagedFile("it has no tensors")
    with ffi.from_buffer("uint8_t[]", content) as data:
        for tensor in header.tensors:
            at = data + _start(header, content, tensor)
            if not lib.ggml_validate_row_data(tensor.type, at, n_bytes(tensor)):
                raise DamagedFile(
                    f"tensor {tensor.name!r} has a number that is not finite"
                )


def _directions(header: Header, model: Header, content: mmap.mmap) -> array[float]:
    n_layer, n_embd = _sizes(model)
    directions = array("f", bytes(4 * n_embd * (n_layer - 1)))
    for tensor in header.tensors:
        # Layers that the file leaves out get zeros, which change nothing.
        start = _start(header, content, tensor)
        first = n_embd * (int(tensor.name.removeprefix(DIRECTION)) - 1)
        directions[first : first + n_embd] = array(
            "f", content[start : start + 4 * n_embd]
        )
    return directions


def _start(header: Header, content: mmap.mmap, tensor: TensorInfo) -> int:
    return len(content) - header.n_left + tensor.offset
