"""
Adapters: what a context computes with besides the weights of its model; their files are checked
before libllama opens them.

A LoRA is pairs of thin matrices A and B, named after the product that they change; libllama
compares half of their shapes, and others end the process at the next decode. A control vector
is a direction for each layer but the first; libllama reads no such file, so this does.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from array import array
from dataclasses import dataclass
from pathlib import Path

from pyllama_raw.errors import AdapterLoadFailed
from pyllama_raw.native import libllama
from pyllama_raw.native.gguf import (
    DamagedFile,
    Header,
    TensorInfo,
    check_tensors,
    header_of,
    n_bytes,
)
from pyllama_raw.native.libllama import ffi, lib
from pyllama_raw.native.model import Model
from pyllama_raw.native.pointers import Handle

A, B = ".lora_a", ".lora_b"
TABLE = "token_embd.weight"  # rows of it are looked up, so its pair lies the other way
DIRECTION = "direction."
F32 = 0  # ggml.h: enum ggml_type
MAX_ALPHA = 1e4  # products with it stay far from infinity
Dims = tuple[int, ...]


class Lora(Handle):
    """A LoRA. It must be set on no context when it is closed; the model is freed after it."""

    def __init__(self, model: Model, path: str, *, digest: str, n_bytes: int) -> None:
        """Use load_adapter()."""
        # Its file was checked by read_adapter(): libllama looks at half of the shapes.
        since = libllama.mark()
        pointer = lib.plr_adapter_load(model.ptr, os.fsencode(path))
        if pointer == ffi.NULL:
            raise AdapterLoadFailed(path, libllama.reason(since))
        super().__init__(pointer, lib.plr_adapter_free, parents=[model])
        self.digest, self.n_bytes = digest, n_bytes
        # Its effect would begin inside of a prompt, which no cache of prefixes knows.
        if lib.llama_adapter_get_alora_n_invocation_tokens(pointer):
            self.close()
            reason = (
                "it is an aLoRA, which is at work on a part of a prompt: use a LoRA"
            )
            raise AdapterLoadFailed(path, reason)


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
    # A control vector is in Python's memory: nothing of it is in libllama until it is set.
    file = read_adapter(name, model.header)
    if file.directions is not None:
        return ControlVector(file.directions, digest=file.digest, n_bytes=file.n_bytes)
    return Lora(model, name, digest=file.digest, n_bytes=file.n_bytes)


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """The content of a file that fits the model."""

    digest: str  # of all of it
    n_bytes: int  # of its tensors
    # of a control vector: of layers 1, 2, ...; of a LoRA None
    directions: array[float] | None


def read_adapter(path: str, model: Header) -> AdapterFile:
    """
    Read the adapter at *path*, which is for the model with the header *model*.

    Raises:
        AdapterLoadFailed: there is no such file, it is damaged, or of another model.
    """
    try:
        header = header_of(path)
        check_tensors(header)
        # The file says which of the two it is.
        is_control = header.values.get("general.architecture") == "controlvector"
        (_check_control if is_control else _check_lora)(header, model)
        with (
            Path(path).open("rb") as stream,
            mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            # Reading all of it once checks its numbers and gives it a name for caches.
            _check_numbers(header, content)
            digest = hashlib.sha256(content).hexdigest()
            directions = _directions(header, model, content) if is_control else None
    except (DamagedFile, OSError) as error:
        raise AdapterLoadFailed(path, str(error)) from None
    return AdapterFile(digest, sum(map(n_bytes, header.tensors)), directions)


def _check_lora(header: Header, model: Header) -> None:
    for key, expected in (
        ("general.type", "adapter"),
        ("adapter.type", "lora"),
        ("general.architecture", model.values.get("general.architecture")),
    ):
        if (value := header.values.get(key)) != expected:
            raise DamagedFile(
                f"{key} is {value!r}, an adapter of this model has {expected!r}"
            )
    alpha = header.values.get("adapter.lora.alpha", 0.0)
    if type(alpha) is not float or not abs(alpha) <= MAX_ALPHA:
        raise DamagedFile(
            f"adapter.lora.alpha={alpha!r} is not allowed: 0 to {MAX_ALPHA:g} is"
        )
    _check_pairs(header, model)


def _check_pairs(header: Header, model: Header) -> None:
    products = {tensor.name: tensor.dims for tensor in model.tensors}
    parts = {tensor.name: tensor.dims for tensor in header.tensors}
    for name, dims in parts.items():
        base, end = name[: -len(A)], name[-len(A) :]
        # Every tensor is one of a pair, of a product that the model has.
        if end not in (A, B) or base + A not in parts or base + B not in parts:
            raise DamagedFile(f"tensor {name!r} is not of a pair {A} and {B}")
        if base not in products:
            raise DamagedFile(f"the model has no tensor {base!r}, which it changes")
        # Tied weights are looked up and multiplied, and a pair fits one of these only.
        if base == TABLE and "output.weight" not in products:
            raise DamagedFile(
                f"{TABLE!r} is the output of this model, too: it cannot be changed"
            )
        if end == A:
            _check_pair(base, products[base], dims, parts[base + B])


def _check_pair(name: str, product: Dims, a: Dims, b: Dims) -> None:
    """The first dimension is the one that a product sums over; the third counts experts."""
    if len(product) > 1:
        n_in, n_out, *experts = product
        # A maps inputs to the rank, B the rank to outputs; of a table both lie the other way.
        rank = a[0] if name == TABLE else (*a, 1)[1]
        fitting = [n_in, rank, *experts], [rank, n_out, *experts]
        if name == TABLE:
            fitting = [rank, n_out], [rank, n_in]
        if (_least(a), _least(b)) == tuple(map(_least, fitting)):
            return
    raise DamagedFile(
        f"{name!r} is {list(product)} in the model, which {list(a)} and {list(b)} do not fit"
    )


def _least(dims: Dims | list[int]) -> list[int]:
    """Dimensions without the last ones that are 1: those need not be written."""
    sizes = list(dims)
    while len(sizes) > 1 and sizes[-1] == 1:
        sizes.pop()
    return sizes


def _check_control(header: Header, model: Header) -> None:
    arch = str(model.values.get("general.architecture"))
    # The hint is optional; the sizes of tensors must fit anyway.
    hint = header.values.get("controlvector.model_hint", arch)
    if hint != arch:
        raise DamagedFile(f"it is made for {hint!r}, the model is {arch!r}")
    n_layer, n_embd = _sizes(model)
    for tensor in header.tensors:
        if tensor.name not in (f"{DIRECTION}{layer}" for layer in range(1, n_layer)):
            last = f"{DIRECTION}{n_layer - 1}"
            raise DamagedFile(f"tensor {tensor.name!r} is not {DIRECTION}1 to {last}")
        if tensor.type != F32 or _least(tensor.dims) != [n_embd]:
            raise DamagedFile(
                f"tensor {tensor.name!r} is not {n_embd} floats, as layers give"
            )


def _sizes(model: Header) -> tuple[int, int]:
    """Layers, and floats that each gives."""
    arch = model.values.get("general.architecture")
    n_layer = model.values.get(f"{arch}.block_count")
    n_embd = model.values.get(f"{arch}.embedding_length")
    assert isinstance(n_layer, int)
    assert isinstance(n_embd, int)
    return n_layer, n_embd


def _check_numbers(header: Header, content: mmap.mmap) -> None:
    """After a number that is not finite nothing else is."""
    if not header.tensors:
        raise DamagedFile("it has no tensors")
    with ffi.from_buffer("uint8_t[]", content) as data:
        for tensor in header.tensors:
            at = data + _start(header, content, tensor)
            if not lib.ggml_validate_row_data(tensor.type, at, n_bytes(tensor)):
                raise DamagedFile(
                    f"tensor {tensor.name!r} has a number that is not finite"
                )


def _directions(header: Header, model: Header, content: mmap.mmap) -> array[float]:
    n_layer, n_embd = _sizes(model)
    directions = array("f", bytes(4 * n_embd * (n_layer - 1)))
    for tensor in header.tensors:
        # Layers that the file leaves out get zeros, which change nothing.
        start = _start(header, content, tensor)
        first = n_embd * (int(tensor.name.removeprefix(DIRECTION)) - 1)
        directions[first : first + n_embd] = array(
            "f", content[start : start + 4 * n_embd]
        )
    return directions


def _start(header: Header, content: mmap.mmap, tensor: TensorInfo) -> int:
    return len(content) - header.n_left + tensor.offset
