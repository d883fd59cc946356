"""A loaded model: weights, metadata and vocabulary; shared by its contexts."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property
from typing import Any, Self

from pyllama_raw.errors import ModelLoadFailed
from pyllama_raw.native import log
from pyllama_raw.native.gguf_check import check_gguf
from pyllama_raw.native.gguf_header import NO_OVERRIDES, Header
from pyllama_raw.native.handle import Handle
from pyllama_raw.native.libllama import ffi, lib, text
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
        self.vocab = Vocab(self, self.n_ctx_train)

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
        name = os.fspath(path)
        header = check_gguf(name, fields.get("kv_overrides", NO_OVERRIDES))
        params, keep_alive = model_params(fields, vocab_only=vocab_only)
        since = log.mark()
        watched = ffi.NULL if progress is None else progress.ptr
        pointer = lib.plr_model_load(os.fsencode(name), params, watched)
        del keep_alive  # llama.cpp copies what it needs of the params
        if pointer == ffi.NULL:
            is_cancelled = progress is not None and progress.cancelled
            said = "it was cancelled" if is_cancelled else log.reason(since)
            raise ModelLoadFailed(name, said)
        model = cls(pointer, path=name, header=header, vocab_only=vocab_only)
        if not vocab_only:
            model._check_numbers()
        return model

    def _check_numbers(self) -> None:
        """
        Close and refuse the model if a number that others count on is out of range.

        Files have 32 bits without a sign, libllama reports them with one.
        """
        arch = self.meta.get("general.architecture", "")
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
    def n_vocab(self) -> int:
        return int(lib.llama_vocab_n_tokens(self.vocab.ptr))

    @property
    def n_ctx_train(self) -> int:
        return int(lib.llama_model_n_ctx_train(self.ptr))

    @property
    def n_embd(self) -> int:
        return int(lib.llama_model_n_embd(self.ptr))

    @property
    def n_embd_inp(self) -> int:
        """Width of a row of embeddings in place of a token."""
        return int(lib.llama_model_n_embd_inp(self.ptr))

    @property
    def n_embd_out(self) -> int:
        """Floats of a vector that is made of a text."""
        return int(lib.llama_model_n_embd_out(self.ptr))

    @property
    def n_cls_out(self) -> int:
        """Scores that are made of a text."""
        return int(lib.llama_model_n_cls_out(self.ptr))

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the classes that scores are of; empty texts where the file has none."""
        found = (lib.llama_model_cls_label(self.ptr, i) for i in range(self.n_cls_out))
        return tuple(text(label) if label else "" for label in found)

    @property
    def n_layer(self) -> int:
        return int(lib.llama_model_n_layer(self.ptr))

    @property
    def n_head(self) -> int:
        return int(lib.llama_model_n_head(self.ptr))

    @property
    def n_head_kv(self) -> int:
        return int(lib.llama_model_n_head_kv(self.ptr))

    @property
    def n_swa(self) -> int:
        """Width of the sliding attention window in tokens; 0: none."""
        return int(lib.llama_model_n_swa(self.ptr))

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return int(lib.llama_model_size(self.ptr))

    @property
    def n_params(self) -> int:
        return int(lib.llama_model_n_params(self.ptr))

    @property
    def desc(self) -> str:
        """Architecture, size class and file type in words."""
        buffer = ffi.new("char[]", 256)
        lib.llama_model_desc(self.ptr, buffer, len(buffer))
        return text(buffer)

    @property
    def ftype(self) -> str:
        """The quantisation of most tensors, as llama.cpp names it."""
        return text(lib.llama_ftype_name(lib.llama_model_ftype(self.ptr)))

    @property
    def has_encoder(self) -> bool:
        return bool(lib.llama_model_has_encoder(self.ptr))

    @property
    def is_recurrent(self) -> bool:
        return bool(lib.llama_model_is_recurrent(self.ptr))

    @property
    def is_hybrid(self) -> bool:
        return bool(lib.llama_model_is_hybrid(self.ptr))

    @cached_property
    def meta(self) -> dict[str, str]:
        """GGUF metadata without arrays, values as text."""
        count = lib.llama_model_meta_count(self.ptr)
        keys = lib.llama_model_meta_key_by_index
        values = lib.llama_model_meta_val_str_by_index
        return {self._meta(keys, i): self._meta(values, i) for i in range(count)}

    def _meta(self, read: Callable[..., int], index: int) -> str:
        buffer = ffi.new("char[]", 256)
        length = read(self.ptr, index, buffer, len(buffer))
        if length >= len(buffer):
            buffer = ffi.new("char[]", length + 1)
            read(self.ptr, index, buffer, len(buffer))
        return text(buffer)

    def chat_template(self) -> str | None:
        """The Jinja source of the default chat template, if there is one."""
        found = lib.llama_model_chat_template(self.ptr, ffi.NULL)
        return text(found) if found else None


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
