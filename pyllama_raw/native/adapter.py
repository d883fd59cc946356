"""Adapters: what a context computes with besides the weights of its model."""

from __future__ import annotations

import os
from array import array

from pyllama_raw.errors import AdapterLoadFailed
from pyllama_raw.native import log
from pyllama_raw.native.adapter_file import read_adapter
from pyllama_raw.native.handle import Handle
from pyllama_raw.native.libllama import ffi, lib
from pyllama_raw.native.model import Model


class Lora(Handle):
    """A LoRA. It must be set on no context when it is closed; the model is freed after it."""

    def __init__(self, model: Model, path: str, *, digest: str, n_bytes: int) -> None:
        """Use load_adapter()."""
        since = log.mark()
        pointer = lib.plr_adapter_load(model.ptr, os.fsencode(path))
        if pointer == ffi.NULL:
            raise AdapterLoadFailed(path, log.reason(since))
        super().__init__(pointer, lib.plr_adapter_free, parents=[model])
        self.digest, self.n_bytes = digest, n_bytes
        if lib.llama_adapter_get_alora_n_invocation_tokens(pointer):
            self.close()
            said = "it is an aLoRA, which is at work on a part of a prompt: use a LoRA"
            raise AdapterLoadFailed(path, said)


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
    file = read_adapter(name, model.header)
    if file.directions is not None:
        return ControlVector(file.directions, digest=file.digest, n_bytes=file.n_bytes)
    return Lora(model, name, digest=file.digest, n_bytes=file.n_bytes)
