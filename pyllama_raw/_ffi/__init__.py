"""
The C boundary: the compiled extension, loaded on first use.

`pyllama_raw._ffi.lib` and `.ffi` import it; `import pyllama_raw` alone does not, so
documentation, core and fakes work where nothing has been built.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from pyllama_raw.errors import LibraryNotBuilt

EXTENSION = "pyllama_raw._ffi._llama"
LIBRARY_DIR = Path(__file__).parent / "lib"  # bundled libraries, if they are bundled


def load() -> tuple[Any, Any]:
    """
    Import the extension and return (ffi, lib).

    Raises:
        LibraryNotBuilt: it is absent or the loader refused it; says what to run.
    """
    try:
        extension = importlib.import_module(EXTENSION)
    except ImportError as error:
        raise LibraryNotBuilt(
            f"the native library cannot be loaded ({error}): run `pip install .` "
            "(or `pip install -e .`) in the source tree, which builds llama.cpp if "
            "PYLLAMA_RAW_PREFIX names no installed one"
        ) from error
    return extension.ffi, extension.lib


def __getattr__(name: str) -> Any:
    """Load `ffi` and `lib` when first asked for; afterwards they are plain globals."""
    if name not in ("ffi", "lib"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()["ffi"], globals()["lib"] = load()
    return globals()[name]
