"""
Codes of libllama, turned into exceptions.

llama.h, llama_decode:

    Upon fatal-error or abort, the ubatches that managed to be been processed will remain
    in the memory state of the context
    Upon other return values, the memory state is restored to the state before this call
     0 - success
     1 - could not find a KV slot for the batch
     2 - aborted     (processed ubatches will remain in the context's memory)
    -1 - invalid input batch
    < -1 - fatal error (processed ubatches will remain in the context's memory)
"""

from __future__ import annotations

from pyllama_raw.errors import (
    DecodeAborted,
    DecodeFailed,
    InvalidBatch,
    NativeError,
    NoKVSpace,
)

EXCEPTION = -1000  # errors.h: PLR_EXCEPTION

DECODE_ERRORS: dict[int, tuple[type[NativeError], str]] = {
    1: (NoKVSpace, "no room in the KV memory; nothing has changed"),
    2: (DecodeAborted, "stopped by the abort flag; some micro-batches were applied"),
    -1: (InvalidBatch, "the batch was refused; nothing has changed"),
    -2: (DecodeFailed, "memory for the graph could not be had"),
    -3: (DecodeFailed, "the computation failed"),
    EXCEPTION: (DecodeFailed, "a C++ exception"),
}


def decode_error(
    code: int, message: str = "", function: str = "llama_decode"
) -> NativeError:
    """The exception for *code*, which is not 0; *message* says more than its default."""
    kind, text = DECODE_ERRORS.get(code, (DecodeFailed, "unknown code"))
    return kind(function, code, f"{text}: {message}" if message else text)


def check_decode(code: int, message: str = "") -> None:
    """Raise what *code* stands for; 0 is success."""
    if code != 0:
        raise decode_error(code, message)
