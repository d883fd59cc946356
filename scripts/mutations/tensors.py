"""What can be wrong with the tensors of a model file."""

from __future__ import annotations

import random

from pyllama_raw.native.libllama import lib
from scripts.mutations.gguf_file import File, Tensor
from scripts.mutations.numbers import number_like


def retype(rng: random.Random, file: File) -> str:
    """A tensor is of another type; its data has the size of that type, or the old one."""
    tensor = rng.choice(file.tensors)
    tensor.type = rng.choice((*range(lib.GGML_TYPE_COUNT), 100, -1))
    if rng.random() < 0.8 and 0 <= tensor.type < lib.GGML_TYPE_COUNT:
        fit(rng, tensor)
    return f"{tensor.name.decode()} is {tensor.type}"


def retype_all(rng: random.Random, file: File) -> str:
    """All matrices, or all vectors, are of another type."""
    kind = rng.randrange(lib.GGML_TYPE_COUNT)
    n_dims = rng.choice((1, 2))
    for tensor in file.tensors:
        if len(tensor.dims) == n_dims:
            tensor.type = kind
            fit(rng, tensor)
    return f"{n_dims} dimensions: {kind}"


def fit(rng: random.Random, tensor: Tensor) -> None:
    """Data of the size that type and dimensions of *tensor* ask for."""
    block, size = lib.ggml_blck_size(tensor.type), lib.ggml_type_size(tensor.type)
    if not block:
        return
    n_rows = 1
    for dim in tensor.dims[1:]:
        n_rows *= dim
    n_bytes = tensor.dims[0] // block * size * n_rows
    if 0 <= n_bytes < 2**24:
        fill = rng.choice((0, 1, 0x3C))
        tensor.data = (tensor.data + bytes([fill]) * n_bytes)[:n_bytes]


def reshape(rng: random.Random, file: File) -> str:
    """A tensor has other dimensions; its data fits them, or not."""
    tensor = rng.choice(file.tensors)
    how = rng.choice(("one", "swap", "count", "add"))
    if how == "one" and tensor.dims:
        index = rng.randrange(len(tensor.dims))
        tensor.dims[index] = int(number_like(rng, 10, tensor.dims[index]))
    elif how == "swap":
        tensor.dims.reverse()
    elif how == "count":
        n_dims = rng.choice((0, 1, 2, 3, 4, 5, 8))
        tensor.dims = (tensor.dims + [1] * 8)[:n_dims]
    else:
        tensor.dims.append(rng.choice((0, 1, 2, -1, 2**31, 2**62)))
    if rng.random() < 0.6 and tensor.dims and min(tensor.dims) >= 0:
        fit(rng, tensor)
    return f"{tensor.name.decode()} {tensor.dims}"


def move(rng: random.Random, file: File) -> str:
    tensor = rng.choice(file.tensors)
    tensor.offset = rng.choice(
        (0, 1, 31, 32, 64, 2**20, 2**40, 2**63, 2**64 - 32, 2**64 - 1)
    )
    return f"{tensor.name.decode()} at {tensor.offset}"


def rename(rng: random.Random, file: File) -> str:
    tensor = rng.choice(file.tensors)
    other = rng.choice(file.tensors).name
    old = tensor.name
    tensor.name = rng.choice(
        (other, b"", b"x", b"x" * 63, b"x" * 64, b"\xff", old + b"\0")
    )
    return f"{old.decode()} is {tensor.name[:40]!r}"


def drop_tensor(rng: random.Random, file: File) -> str:
    index = rng.randrange(len(file.tensors))
    if rng.random() < 0.7:
        return file.tensors.pop(index).name.decode()
    file.tensors.append(file.tensors[index])
    return f"twice {file.tensors[index].name.decode()}"


def fill_data(rng: random.Random, file: File) -> str:
    """The numbers of one tensor, or of all, are no weights."""
    patterns = {
        "nan": b"\0\0\xc0\x7f",
        "inf": b"\0\0\x80\x7f",
        "-inf": b"\0\0\x80\xff",
        "max": b"\xff\xff\x7f\x7f",
        "zero": bytes(4),
        "ones": b"\xff" * 4,
    }
    name = rng.choice(list(patterns))
    all_of_them = rng.random() < 0.2
    for tensor in file.tensors if all_of_them else [rng.choice(file.tensors)]:
        tensor.data = (patterns[name] * (len(tensor.data) // 4 + 1))[: len(tensor.data)]
    return name
