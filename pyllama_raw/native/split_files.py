"""Names of the files of a model that is divided, as llama-gguf-split names them."""

from __future__ import annotations

import re

_PART = re.compile(r"(?s)(.*)-(\d{5})-of-(\d{5})\.gguf")
MAX_PARTS = 2**12  # which no model has; a name may say 99999


def split_names(path: str) -> list[str]:
    """
    Names of all files of the divided model that *path* is a part of; none: it is whole.

    llama.h, llama_split_path: "/models/ggml-model-q4_0", 2, 4 ->
    "/models/ggml-model-q4_0-00002-of-00004.gguf"
    """
    match = _PART.fullmatch(path)
    if match is None or not 1 <= int(match[2]) <= int(match[3]) <= MAX_PARTS:
        return []
    numbers = range(1, int(match[3]) + 1)
    return [f"{match[1]}-{number:05}-of-{match[3]}.gguf" for number in numbers]
