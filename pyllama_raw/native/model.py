"""A loaded model: weights, metadata and vocabulary, shared by its contexts; and its file in another type."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self, get_args

from pyllama_raw.errors import ConfigError, ModelLoadFailed, QuantizeFailed
from pyllama_raw.native import libllama
from pyllama_raw.native.gguf import NO_OVERRIDES, Header, check_gguf
from pyllama_raw.native.kernels import weaves
from pyllama_raw.native.libllama import ffi, lib, text
from pyllama_raw.native.params import INT32_MAX, model_params
from pyllama_raw.native.pointers import Handle
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
