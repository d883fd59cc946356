"""
Whether the headers of a llama.cpp fit the names that we use, told before anything is built.

Only what the compiler would refuse counts: names that a header adds do no harm, and `const` in
the parameters of a function is for the compiler to judge. An older llama.cpp may lack what WITHOUT
lists: the package is built for it all the same, and says Unsupported where somebody asks for it.
`build_lib.py` loads this file by path: standard library only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from scripts.c_declarations import Declarations

MAX_SHOWN = 20  # lines about another version; more say nothing new

_UNUSED = "nobody here names it"
_TESTS = "only tests use it, which are skipped"
_LAZY = "ModelConfig.lazy_mode is Unsupported"
_MEDIA = "images and sounds are Unsupported"

# Lines of misfits() that the code does without, and what that means.
WITHOUT = {
    "changed: enum llama_vocab_type has no LLAMA_VOCAB_TYPE_TEST": _UNUSED,
    "changed: function llama_sampler_chain_n": "it returned an int by another name",
    "changed: function mtmd_helper_bitmap_init_from_buf": _TESTS,
    "changed: struct llama_model_params has no enum llama_lazy_mode lazy_mode": _LAZY,
    "changed: struct llama_model_quantize_params has no size_t max_buf_size": _UNUSED,
    "changed: struct mtmd_context_params has no ggml_backend_dev_t device": _UNUSED,
    "missing: enum llama_lazy_mode": _LAZY,
    "missing: function llama_get_causal_attn": "the file of the model tells it",
    "missing: function mtmd_helper_init_opt_default": _TESTS,
    "missing: function mtmd_tokenize_from_parts": _MEDIA,
    "missing: struct mtmd_helper_init_opt": _TESTS,
    "missing: struct mtmd_input_part": _MEDIA,
    "missing: typedef mtmd_helper_init_opt": _TESTS,
    "missing: typedef mtmd_input_part": _MEDIA,
}


def find(names: Iterable[str], folders: Sequence[Path]) -> dict[str, Path]:
    """Each header of *names* in the first of *folders* that has it."""
    places = {name: [folder / name for folder in folders] for name in names}
    files = {name: [p for p in paths if p.is_file()] for name, paths in places.items()}
    return {name: paths[0] for name, paths in files.items() if paths}


def shown(lines: Sequence[str]) -> str:
    """The first of *lines*, and how many more there are."""
    n_more = len(lines) - MAX_SHOWN
    tail = [f"and {n_more} more"] if n_more > 0 else []
    return "".join(f"  {line}\n" for line in [*lines[:MAX_SHOWN], *tail])


def without(ours: Declarations, theirs: Declarations) -> list[tuple[str, str]]:
    """Macros for C++: PLR_WITHOUT_NAME for each function that *theirs* may lack, and does."""
    lost = set(misfits(ours, theirs)) & WITHOUT.keys()
    prefix = "missing: function "
    names = [line.removeprefix(prefix) for line in sorted(lost) if prefix in line]
    return [(f"PLR_WITHOUT_{name.upper()}", "1") for name in names]


def misfits(ours: Declarations, theirs: Declarations) -> list[str]:
    """One line for each name of *ours* that *theirs* lacks or declares otherwise, sorted."""
    lines = []
    for (kind, name), parts in ours.items():
        their_parts = theirs.get((kind, name), theirs.get(("deprecated", name)))
        if their_parts is None:
            lines.append(f"missing: {kind} {name}")
        elif kind == "function" and parts:
            if without_const(parts[0]) != without_const(their_parts[0]):
                lines.append(f"changed: function {name}")
        elif lost := [part for part in parts if part not in their_parts]:
            has_parts = kind in ("struct", "enum")
            mistake = f" has no {', '.join(lost)}" if has_parts else ""
            lines.append(f"changed: {kind} {name}{mistake}")
    return sorted(lines)


def without_const(code: str) -> str:
    """*code* without `const`: whoever calls the function passes the same."""
    return code.replace("const ", "")
