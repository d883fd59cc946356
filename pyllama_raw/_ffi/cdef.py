"""
What Python sees of the C libraries: the text for `FFI.cdef`, from the files of `cdefs/`.

One file a header or a part of it, in header order, so that a diff of the header is a diff
here. Values of enums and macros, sizes of arrays and layouts of structs are `...`: the C
compiler fills them in, nothing is typed twice. `scripts/sync_cdef.py` compares with the
headers. This module is also run by path while building: it imports nothing of the package.
"""

from pathlib import Path

DIRECTORY = Path(__file__).parent / "cdefs"

# A type is declared before it is used.
FILES = (
    "ggml.h",
    "ggml_backend.h",
    "ggml_cpu.h",
    "ggml_opt.h",
    "gguf.h",
    "llama_enums.h",
    "llama_params.h",
    "llama_model.h",
    "llama_context.h",
    "llama_vocab.h",
    "llama_sampler.h",
    "llama_rest.h",
    "mtmd.h",
    "mtmd_helper.h",
    "shim.h",
)

CDEF = "\n".join((DIRECTORY / name).read_text(encoding="utf-8") for name in FILES)
