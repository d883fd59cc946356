"""Metadata of the files that are written without libllama: Python values as those of GGUF."""

from __future__ import annotations

from scripts.mutations import gguf_file


def encode(value: object) -> gguf_file.Value:
    """*value*; a list is of numbers that are all int, or all float."""
    if isinstance(value, list):
        is_whole = all(isinstance(item, int) for item in value)
        kind = gguf_file.U32 if is_whole else gguf_file.F32
        return gguf_file.Value(gguf_file.ARRAY, value, kind)
    if isinstance(value, str):
        return gguf_file.Value(gguf_file.STRING, value.encode())
    kinds = {bool: gguf_file.BOOL, int: gguf_file.U32, float: gguf_file.F32}
    assert isinstance(value, bool | int | float)
    return gguf_file.Value(kinds[type(value)], value)
