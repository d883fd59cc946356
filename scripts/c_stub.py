"""
Writes the type stub of the extension, so that mypy knows each function of `lib`.

Pointers to types without a body are told apart: a context given as a model is an error.
Structs get a class with their fields, used for the struct and for a pointer to it, as cffi
reads both alike. `ffi` and what it makes stay `Any`.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator

from scripts.c_declarations import Declarations

INTEGER = re.compile(r"(u?int(8|16|32|64)_t|size_t|int|char|unsigned char|enum \w+)")
FLOATS = ("float", "double")
ARRAY = " [ ... ]"
BYTES = ("char *", "uint8_t *", "unsigned char *", "void *")
SHORT = {  # struct tag -> class; others are named after the tag
    "llama_model": "ModelPtr",
    "llama_context": "ContextPtr",
    "llama_vocab": "VocabPtr",
    "llama_memory_i": "MemoryPtr",
    "llama_adapter_lora": "AdapterPtr",
    "llama_sampler": "SamplerPtr",
    "mtmd_context": "MtmdPtr",
}

HEAD = '''\
# Written by `python -m scripts.sync_cdef --write-stub`; do not edit.
# fmt: off
# ruff: noqa: A002

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

class Pointer:
    """Points to what only C can look into; false if NULL."""

    def __bool__(self) -> bool: ...

class Struct:
    """A struct, or a pointer to one."""

    def __bool__(self) -> bool: ...
    def __getitem__(self, index: int, /) -> Any: ...
'''


def stub(found: Declarations) -> str:
    """The text of `_llama.pyi` for *found*."""
    return "".join(line + "\n" for line in Writer(found).lines())


class Writer:
    """Maps C types to the names of the stub."""

    def __init__(self, found: Declarations) -> None:
        self.found = found
        self.opaque: dict[str, str] = {}  # struct tag -> class, as they are met

    def lines(self) -> Iterator[str]:
        """The stub line by line; functions first, as they name the opaque types."""
        functions = [self.function(*item) for item in self.found.functions.items()]
        structs = [
            line for item in self.found.structs.items() for line in self.struct(*item)
        ]
        yield HEAD
        yield from (
            f"class {name}(Pointer): ..." for name in sorted(set(self.opaque.values()))
        )
        yield from structs
        yield from ("", "class _Lib:")
        yield from (f"    {name}: int" for name in sorted(self.found.constants))
        for values in self.found.enums.values():
            yield from (f"    {name}: int" for name in values)
        yield from functions
        yield from ("", "ffi: Any", "lib: _Lib")

    def function(self, name: str, signature: str) -> str:
        """One method of `_Lib`."""
        head, _, rest = signature.partition(f" {name} ( ")
        parameters = rest.removesuffix(" )").split(" , ")
        parts = [self.parameter(p, n) for n, p in enumerate(parameters) if p != "void"]
        slash = ["/"] if parts else []
        return f"    def {name}({', '.join(['self', *parts, *slash])}) -> {self.result(head)}: ..."

    def parameter(self, text: str, index: int) -> str:
        """`name: type` of one C parameter."""
        match = re.match(r"(.*?)(\w+)$", text)
        c_type, name = (match[1], match[2]) if match else (text, f"p{index}")
        if not c_type.strip():  # a type without a name
            c_type, name = text, f"p{index}"
        if keyword.iskeyword(name):
            name += "_"
        return f"{name}: {self.argument(c_type)}"

    def argument(self, c_type: str) -> str:
        """What Python may pass for *c_type*: cffi takes bytes and lists for const arrays."""
        plain = self.plain(c_type)
        if plain in ("void *", "FILE *"):
            return "Any"
        name = self.result(c_type)
        if name == "CData" and c_type.startswith("const "):
            if plain in BYTES:
                return "CData | bytes"
            if plain.count("*") == 1:
                number = "float" if plain.split(" ")[0] in FLOATS else "int"
                return f"CData | Sequence[{number}]"
        return name

    def result(self, c_type: str) -> str:
        """The stub's name for *c_type*."""
        plain = self.plain(c_type)
        simple = {"void": "None", "bool": "bool", "float": "float", "double": "float"}
        if plain in simple:
            return simple[plain]
        if INTEGER.fullmatch(plain):
            return "int"
        match = re.fullmatch(r"(?:struct )?(\w+)( \*)?", plain)
        if match is None:
            return "CData"
        if match[1] in self.found.structs:
            return camel(match[1])
        return (
            self.pointer(match[1])
            if match[2] and self.is_struct(plain, match[1])
            else "CData"
        )

    def pointer(self, tag: str) -> str:
        """The class for pointers to the opaque struct *tag*."""
        return self.opaque.setdefault(tag, SHORT.get(tag, camel(tag) + "Ptr"))

    def is_struct(self, plain: str, name: str) -> bool:
        return plain.startswith("struct ") or "struct" in self.found.typedefs.get(
            name, ""
        )

    def plain(self, c_type: str) -> str:
        """*c_type* without const, its typedefs followed."""
        text = " ".join(word for word in c_type.split() if word != "const")
        name = text.split(" ")[0]
        target = self.found.typedefs.get(name, "")
        if not target or "(" in target or target.endswith(f"{name} {name}"):
            return text
        return self.plain(
            text.replace(name, target.removeprefix("typedef ").rsplit(" ", 1)[0], 1)
        )

    def struct(self, tag: str, fields: tuple[str, ...]) -> Iterator[str]:
        """The class of one struct."""
        yield ""
        yield f"class {camel(tag)}(Struct):"
        for text in fields:
            for name, type_ in self.members(text):
                if not keyword.iskeyword(name):  # `async`: only getattr reads it
                    yield f"    {name}: {type_}"

    def members(self, text: str) -> Iterator[tuple[str, str]]:
        """Name and type of one field; what Python must allocate to set stays Any."""
        body, brace, name = text.partition("{")[2].rpartition("}")
        if brace and not name.strip():  # without a name: its fields are the struct's
            for each in filter(str.strip, body.split(";")):
                yield from self.members(each.strip())
        elif brace:
            yield name.strip(), "CData"
        elif match := re.search(r"\( \* (\w+) \)", text):
            yield match[1], "Any"
        elif text.endswith(ARRAY):
            yield text.removesuffix(ARRAY).rpartition(" ")[2], "CData"
        else:
            c_type, _, name = text.rpartition(" ")
            yield name, self.result(c_type).replace("CData", "Any")


def camel(name: str) -> str:
    """llama_model_params -> LlamaModelParams, or its short name."""
    return SHORT.get(name) or "".join(word.capitalize() for word in name.split("_"))
