"""
The C boundary: the compiled extension, which load() imports.

`import pyllama_raw` alone does not, so documentation, core and fakes work where nothing has
been built.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from pyllama_raw._ffi.openmp import choosing
from pyllama_raw.errors import LibraryNotBuilt

EXTENSION = "pyllama_raw._ffi._llama"


def load() -> tuple[Any, Any]:
    """
    Import the extension and return (ffi, lib).

    Raises:
        LibraryNotBuilt: it is absent or the loader refused it; says what to run.
    """
    try:
        with choosing():
            extension = importlib.import_module(EXTENSION)
    except ImportError as error:
        raise LibraryNotBuilt(_what_to_do(error)) from error
    return extension.ffi, extension.lib


def _what_to_do(error: ImportError) -> str:
    """Name the installed copy that this one hides, or say how to build."""
    here = Path(__file__).resolve().parents[1]
    built = (entry for entry in sys.path if _has_extension(Path(entry, "pyllama_raw")))
    hidden = None if _has_extension(here) else next(built, None)
    if hidden is None:
        return (
            f"the native library cannot be loaded ({error}): run `pip install .` "
            "(or `pip install -e .`) in the source tree, which builds llama.cpp if "
            "PYLLAMA_RAW_PREFIX names no installed one"
        )
    return (
        f"Python imports pyllama_raw from {here}, which is not built, and not the copy "
        f"{_version_in(hidden)}in {hidden}: run `pyllama-raw` instead of "
        "`python -m pyllama_raw`, leave this folder, or start Python with -P"
    )


def _has_extension(package: Path) -> bool:
    return any(
        (package / "_ffi" / f"_llama{end}").exists() for end in EXTENSION_SUFFIXES
    )


def _version_in(entry: str) -> str:
    found = distributions(name="pyllama_raw", path=[entry])
    return "".join(f"of version {one.version} " for one in found)
