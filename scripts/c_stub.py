"""
Writes the type stub of the extension, so that mypy knows each function of `lib`.

It asks the extension itself. A pointer to a struct and the struct are one class, as cffi
reads both alike: a context given as a model is an error. `ffi` and what it makes stay `Any`.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator
from typing import Any

HEAD = '''\
# Written by `python -m scripts.sync_cdef --write-stub`; do not edit.
# fmt: off

from collections.abc import Sequence
from typing import Any

class CData:
    """A C value or pointer whose type mypy does not follow."""

    def __bool__(self) -> bool: ...
    def __int__(self) -> int: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int | slice, /) -> Any: ...
    def __setitem__(self, index: int | slice, value: Any, /) -> None: ...
    def __getattr__(self, name: str, /) -> Any: ...
    def __add__(self, n: int, /) -> CData: ...

class Struct:
    """A struct, or a pointer to one; false if NULL."""

    def __bool__(self) -> bool: ...
    def __getitem__(self, index: int, /) -> Any: ...
'''


def stub() -> str:
    """The text of `_llama.pyi` for the extension that is built."""
    from pyllama_raw._ffi import ffi, lib

    return "".join(line + "\n" for line in lines(ffi, lib))


def lines(ffi: Any, lib: Any) -> Iterator[str]:
    """The stub line by line."""
    yield HEAD
    for tag in ffi.list_types()[1]:
        if not tag.startswith("_"):  # the FILE of the C library
            yield from struct(ffi, ffi.typeof(f"struct {tag}"))
    yield from ("", "class _Lib:")
    for name in dir(lib):
        value = getattr(lib, name)
        if isinstance(value, int):
            yield f"    {name}: int"
        else:
            yield function(name, ffi.typeof(value))
    yield from ("", "ffi: Any", "lib: _Lib")


def struct(ffi: Any, c_type: Any) -> Iterator[str]:
    """The class of one struct; what Python must allocate to set stays Any."""
    try:
        ffi.sizeof(c_type)
    except (
        ffi.error
    ):  # only C can look into it, and cffi aborts where its fields are read
        yield f"class {camel(c_type)}(Struct): ..."
        return
    yield f"class {camel(c_type)}(Struct):"
    for name, field in c_type.fields:
        if name and not keyword.iskeyword(name):  # `async`: only getattr reads it
            yield f"    {name}: {result(field.type).replace('CData', 'Any')}"


def function(name: str, c_type: Any) -> str:
    """One method of `_Lib`."""
    parts = [f"p{n}: {argument(each)}" for n, each in enumerate(c_type.args)]
    given = ", ".join(["self", *parts, *(["/"] if parts else [])])
    return f"    def {name}({given}) -> {result(c_type.result)}: ..."


def argument(c_type: Any) -> str:
    """What Python may pass for *c_type*: cffi takes bytes and lists for arrays."""
    name = result(c_type)
    if c_type.kind != "pointer" or name != "CData":
        return name
    item = c_type.item
    if item.kind == "void":
        return "Any"
    if item.cname in ("char", "unsigned char", "uint8_t"):
        return "CData | bytes"
    return f"CData | Sequence[{result(item)}]" if item.kind == "primitive" else name


def result(c_type: Any) -> str:
    """The stub's name for *c_type*."""
    if c_type.kind == "primitive":
        floats = {"_Bool": "bool", "float": "float", "double": "float"}
        return floats.get(c_type.cname, "int")
    if c_type.kind in ("void", "enum"):
        return "None" if c_type.kind == "void" else "int"
    target = c_type.item if c_type.kind == "pointer" else c_type
    return camel(target) if re.fullmatch(r"struct \w+", target.cname) else "CData"


def camel(c_type: Any) -> str:
    """struct llama_model_params -> LlamaModelParams."""
    words = c_type.cname.removeprefix("struct ").split("_")
    return "".join(word.capitalize() for word in words)
