"""
Writing a model file in another type.

libllama computes here in the calling thread only: what it asserts in a worker of its own
would end the process.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, get_args

from pyllama_raw.errors import ConfigError, QuantizeFailed
from pyllama_raw.native import log
from pyllama_raw.native.libllama import ffi, lib
from pyllama_raw.native.model import Model

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
    if target.exists():
        raise ConfigError(f"{target} exists: it is not replaced, name another file")
    if "\0" in str(target):
        raise ConfigError(f"{str(target)!r}: the path contains a NUL")
    Model.load(source, vocab_only=True).close()
    try:
        target.touch(exist_ok=False)  # nobody else writes it from here on
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}") from error
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
    since = log.mark()
    code = lib.plr_quantize(os.fsencode(source), os.fsencode(written), params)
    if code:
        raise QuantizeFailed(str(source), code, log.reason(since))
