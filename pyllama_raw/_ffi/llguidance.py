"""
The C interface of llguidance, which its Python package carries.

Python's own interface to llguidance holds the GIL while it reads a vocabulary: 90 ms for
49,000 tokens, in which no event loop runs. These calls release the GIL.
"""

from __future__ import annotations

import ctypes
import importlib
from array import array
from collections.abc import Callable, Sequence
from typing import Any

MAX_ERROR_BYTES = 1000

_TokenizeFn = ctypes.CFUNCTYPE(
    ctypes.c_size_t,  # how many tokens there are, written or not
    ctypes.c_void_p,  # not used
    ctypes.POINTER(ctypes.c_char),
    ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_uint32),
    ctypes.c_size_t,
)


class _TokenizerInit(ctypes.Structure):
    """llguidance.h: LlgTokenizerInitV2."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("vocab_size", ctypes.c_uint32),
        ("tok_eos", ctypes.c_uint32),
        ("token_lens", ctypes.POINTER(ctypes.c_uint32)),
        ("token_bytes", ctypes.c_char_p),
        ("tokenizer_json", ctypes.c_char_p),
        ("tokenize_assumes_string", ctypes.c_bool),
        ("tokenize_fn", _TokenizeFn),
        ("use_approximate_greedy_tokenize_fn", ctypes.c_bool),
        ("tokenize_user_data", ctypes.c_void_p),
        ("slices", ctypes.c_void_p),
        ("tok_eos_extra", ctypes.POINTER(ctypes.c_uint32)),
        ("tok_eos_extra_count", ctypes.c_uint32),
    )


class _ConstraintInit(ctypes.Structure):
    """llguidance.h: LlgConstraintInit; its end is only set by the library."""

    _fields_ = (
        ("tokenizer", ctypes.c_void_p),
        ("log_buffer_level", ctypes.c_uint32),
        ("log_stderr_level", ctypes.c_uint32),
        ("others", ctypes.c_char * 1024),
    )


_POINTER, _SIZE, _TEXT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p
_FUNCTIONS: dict[str, tuple[Any, ...]] = {  # what they return, and their arguments
    "llg_new_tokenizer_v2": (_POINTER, ctypes.POINTER(_TokenizerInit), _TEXT, _SIZE),
    "llg_free_tokenizer": (None, _POINTER),
    "llg_constraint_init_set_defaults": (
        None,
        ctypes.POINTER(_ConstraintInit),
        _POINTER,
    ),
    "llg_new_matcher": (_POINTER, ctypes.POINTER(_ConstraintInit), _TEXT, _TEXT),
    "llg_clone_matcher": (_POINTER, _POINTER),
    "llg_free_matcher": (None, _POINTER),
    "llg_matcher_get_error": (_TEXT, _POINTER),
    "llg_matcher_compute_mask_into": (ctypes.c_int32, _POINTER, _POINTER, _SIZE),
    "llg_matcher_consume_token": (ctypes.c_int32, _POINTER, ctypes.c_uint32),
}


def load() -> Any:
    """
    The library.

    Raises:
        ImportError: it is not installed, or without this interface; says which.
    """
    lib = ctypes.CDLL(importlib.import_module("llguidance")._lib.__file__)
    for name, (result, *arguments) in _FUNCTIONS.items():
        try:
            function = getattr(lib, name)
        except AttributeError:
            raise ImportError(f"this build of llguidance has no {name}") from None
        function.restype, function.argtypes = result, arguments
    return lib


def new_tokenizer(
    lib: Any,
    pieces: Sequence[bytes],
    end_tokens: Sequence[int],
    tokenize: Callable[[bytes], Sequence[int]],
) -> tuple[int, object]:
    """
    A pointer, and what has to be kept until it is freed, because C calls it till then.

    Raises:
        ValueError: llguidance does not take the vocabulary.
    """

    def write_tokens(_: None, text: Any, n_bytes: int, out: Any, room: int) -> int:
        tokens = tokenize(ctypes.string_at(text, n_bytes))
        for index, token in enumerate(tokens[:room]):
            out[index] = token
        return len(tokens)

    callback = _TokenizeFn(write_tokens)
    first, *others = end_tokens
    lengths = array("I", map(len, pieces))
    init = _TokenizerInit(
        struct_size=ctypes.sizeof(_TokenizerInit),
        vocab_size=len(pieces),
        tok_eos=first,
        token_lens=(ctypes.c_uint32 * len(pieces)).from_buffer(lengths),
        token_bytes=b"".join(pieces),
        tokenize_assumes_string=True,
        tokenize_fn=callback,
        tok_eos_extra=(ctypes.c_uint32 * len(others))(*others),
        tok_eos_extra_count=len(others),
    )
    error = ctypes.create_string_buffer(MAX_ERROR_BYTES)
    pointer = lib.llg_new_tokenizer_v2(ctypes.byref(init), error, len(error))
    if not pointer:
        raise ValueError(error.value.decode(errors="replace"))
    return pointer, callback


def new_matcher(lib: Any, tokenizer: int, kind: str, text: str) -> int:
    """A pointer, never NULL."""
    init = _ConstraintInit()
    lib.llg_constraint_init_set_defaults(ctypes.byref(init), tokenizer)
    init.log_stderr_level = 0
    made: int = lib.llg_new_matcher(ctypes.byref(init), kind.encode(), text.encode())
    return made
