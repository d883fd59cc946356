"""
What Python sees of the C libraries: the text for `FFI.cdef`.

The files of `cdefs/` hold one header, or a part of one, in header order, so that a diff of
the header is a diff here. Values of enums and macros, sizes of arrays and layouts of structs
are `...`: the C compiler fills them in, nothing is typed twice. `scripts/sync_cdef.py`
compares them with the headers. Our own shim needs no second text: its headers are read.
This module is also run by path while building: it imports nothing of the package.
"""

import re
from pathlib import Path

HERE = Path(__file__).parent
DIRECTORY = HERE / "cdefs"

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
)
SHIM_FILES = (
    "boundary/errors.h",
    "boundary/abort_flag.h",
    "boundary/loading.h",
    "boundary/vocab.h",
    "boundary/state.h",
    "boundary/log.h",
    "kernels/kernels.h",
    "kernels/watch.h",
    "grammar/grammar.h",
    "step/sampler.h",
    "step/step.h",
)


def strip_header(text: str) -> str:
    """A plain C header as cdef: constants stay as names, other preprocessor lines go."""
    text = re.sub(r"#ifdef __cplusplus\n.*?#endif\n", "", text, flags=re.DOTALL)
    text = re.sub(r"^#define (\w+) \S.*$", r"constant \1 ...", text, flags=re.MULTILINE)
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    return text.replace("constant ", "#define ")


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


SHIM = "\n".join(read(HERE / name) for name in SHIM_FILES)
CDEF = "\n".join([*(read(DIRECTORY / name) for name in FILES), strip_header(SHIM)])
