"""
Writes the type stub of the extension, so that mypy knows each function of `lib`.

It asks cffi what it reads in the declarations. A pointer to a struct and the struct are one
class, as cffi reads both alike: a context given as a model is an error. `ffi` and what it
makes stay `Any`.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterator
from typing import Any

from cffi import FFI, model

CONST = 1  # cffi's bit of a pointer to what is const
BYTES = ("char", "unsigned char", "uint8_t")
FLOATS = {"_Bool": "bool", "float": "float", "double": "float"}

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


def stub(cdef: str) -> str:
    """The text of `_llama.pyi` for the declarations *cdef*."""
    ffi = FFI()
    ffi.cdef(cdef)
    # No public interface of cffi has what is not compiled yet.
    declarations = {key: item[0] for key, item in ffi._parser._declarations.items()}
    return "".join(line + "\n" for line in lines(declarations))


def lines(declarations: dict[str, Any]) -> Iterator[str]:
    """The stub line by line; *declarations* is by kind and name."""
    yield HEAD
    for key, item in declarations.items():
        if key.startswith("struct ") and key[7] not in "$_":
            yield from struct(item)
    yield from ("", "class _Lib:")
    for key, item in declarations.items():
        kind, name = key.split(" ")
        if kind == "function":
            yield function(name, item)
        elif kind == "macro":
            yield f"    {name}: int"
        elif kind == "enum":
            yield from (f"    {value}: int" for value in item.enumerators)
    yield from ("", "ffi: Any", "lib: _Lib")


def struct(c_type: Any) -> Iterator[str]:
    """The class of one struct; what Python must allocate to set stays Any."""
    fields = list(members(c_type))
    yield f"class {camel(c_type.name)}(Struct):{'' if fields else ' ...'}"
    for name, of_field in fields:
        if not keyword.iskeyword(name):  # `async`: only getattr reads it
            is_array = isinstance(of_field, model.ArrayType)
            type_ = "CData" if is_array else result(of_field).replace("CData", "Any")
            yield f"    {name}: {type_}"


def members(c_type: Any) -> Iterator[tuple[str, Any]]:
    """Name and type of each field; those of a part without a name are the struct's."""
    for name, of_field in zip(
        c_type.fldnames or (), c_type.fldtypes or (), strict=True
    ):
        if name:
            yield name, of_field
        else:
            yield from members(of_field)


def function(name: str, c_type: Any) -> str:
    """One method of `_Lib`."""
    parts = [
        f"p{n}: {argument(c_argument)}" for n, c_argument in enumerate(c_type.args)
    ]
    arguments = ", ".join(["self", *parts, *(["/"] if parts else [])])
    return f"    def {name}({arguments}) -> {result(c_type.result)}: ..."


def argument(c_type: Any) -> str:
    """What Python may pass for *c_type*: cffi takes bytes and lists for const arrays."""
    name = result(c_type)
    if name != "CData" or not isinstance(c_type, model.PointerType):
        return name
    item = c_type.totype
    if isinstance(item, model.VoidType | model.StructType):  # a FILE
        return "Any"
    if c_type.quals & CONST and isinstance(item, model.PrimitiveType):
        is_bytes = item.name in BYTES
        return "CData | bytes" if is_bytes else f"CData | Sequence[{result(item)}]"
    return name


def result(c_type: Any) -> str:
    """The stub's name for *c_type*."""
    if isinstance(c_type, model.PrimitiveType):
        return FLOATS.get(c_type.name, "int")
    if isinstance(c_type, model.VoidType):
        return "None"
    if isinstance(c_type, model.EnumType):
        return "int"
    target = c_type.totype if isinstance(c_type, model.PointerType) else c_type
    is_known = isinstance(target, model.StructType) and target.name[0] not in "$_"
    return camel(target.name) if is_known else "CData"


def camel(name: str) -> str:
    """llama_model_params -> LlamaModelParams."""
    return "".join(word.capitalize() for word in name.split("_"))
