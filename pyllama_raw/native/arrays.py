"""The one way from numpy arrays to C pointers: check dtype, layout and size first."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyllama_raw.native.libllama import ffi

INT32 = np.dtype(np.int32)
UINT8 = np.dtype(np.uint8)
UINT32 = np.dtype(np.uint32)
FLOAT32 = np.dtype(np.float32)

_C_NAMES = {
    INT32: "int32_t[]",
    UINT8: "uint8_t[]",
    UINT32: "uint32_t[]",
    FLOAT32: "float[]",
}


def pointer(
    array: NDArray[Any],
    dtype: np.dtype[Any],
    *,
    min_size: int = 0,
    writable: bool = False,
) -> Any:
    """
    Address of the first element of *array*, which stays alive and in place meanwhile.

    Raises:
        TypeError: another dtype, not one-dimensional, not C-contiguous, too short, or
            read-only where C writes.
    """
    if array.dtype != dtype or array.ndim != 1 or not array.flags.c_contiguous:
        raise TypeError(
            f"need a contiguous one-dimensional array of {dtype}, "
            f"got {array.dtype} of shape {array.shape}"
        )
    if len(array) < min_size:
        raise TypeError(f"the array has {len(array)} elements, {min_size} are needed")
    return ffi.from_buffer(_C_NAMES[dtype], array, require_writable=writable)
