"""
A recipe for any architecture: libllama says by name which key it misses.

Each attempt states one key more. An attempt may end the process, because nothing is between
libllama and this file: give each architecture a process of its own.
"""

from __future__ import annotations

import re

from pyllama_raw.native.libllama import ffi, lib
from scripts.tiny_models import gguf, vocab
from scripts.tiny_models.architectures import BASE, MORE, N_TOKENS, VALUES
from scripts.tiny_models.recipe import Recipe

_MISSED = re.compile(r"key not found in model: ([^\s;]+)")


class CannotLearn(Exception):
    """What libllama said in the end."""


def learn(arch: str) -> Recipe:
    """The keys that the loader of *arch* demands, and no others."""
    fields: dict[str, object] = {**BASE, **MORE[arch]}
    metadata: dict[str, object] = {"general.name": "tiny"}  # some names mean something
    if arch in N_TOKENS:
        metadata |= vocab.extended(N_TOKENS[arch])
    while refusal := _refusal(recipe := Recipe(arch, arch, fields, more=metadata)):
        missed = _MISSED.search(refusal)
        key = missed[1] if missed else ""
        name = key.removeprefix(f"{arch}.")
        if name not in VALUES or name in fields or name in metadata:
            raise CannotLearn(refusal)
        (metadata if name == key else fields)[name] = VALUES[name]
    return recipe


def _refusal(recipe: Recipe) -> str:
    """What libllama says against *recipe*, if it says something."""
    metadata = ffi.gc(lib.gguf_init_empty(), lib.gguf_free)
    for key, value in recipe.metadata.items():
        gguf.set_value(metadata, key, value)
    try:
        model, _ = gguf.build(recipe, metadata)
    except RuntimeError as error:
        return str(error)
    lib.llama_model_free(model)
    return ""
