"""
The tiny random models for tests, made when one is first asked for.

All are made at once, in about a second, in a process of their own: what libllama logs and
keeps there is not seen by the tests. They stay in the user's cache folder, under the hash
of what made them. Test processes that start together each make them; one set is kept.
"""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.tiny_models.adapters import ADAPTERS
from scripts.tiny_models.projectors import PROJECTORS
from scripts.tiny_models.recipes import (
    ATTENTION,
    EMBEDDING,
    HYBRID,
    OTHER,
    RECIPES,
    RECURRENT,
    SWA,
)

__all__ = [
    "ADAPTERS",
    "ATTENTION",
    "EMBEDDING",
    "GENERATING",
    "HYBRID",
    "OTHER",
    "PROJECTORS",
    "RECIPES",
    "RECURRENT",
    "SWA",
    "tiny_adapter",
    "tiny_model",
    "tiny_projector",
]

ROOT = Path(__file__).parents[2]
GENERATING = tuple(recipe for recipe in RECIPES.values() if recipe.generates)


def tiny_model(name: str) -> Path:
    """The file of the model *name* of scripts/tiny_models/recipes.py."""
    return models() / f"{RECIPES[name].name}.gguf"


def tiny_projector(name: str) -> tuple[Path, Path]:
    """The projector *name* of scripts/tiny_models/projectors.py, and its text model."""
    folder, model = models(), PROJECTORS[name].model.name
    return folder / f"{name}-projector.gguf", folder / f"{model}.gguf"


def tiny_adapter(name: str) -> Path:
    """The adapter *name* of scripts/tiny_models/adapters.py."""
    return models() / f"{ADAPTERS[name].name}.gguf"


@functools.cache
def models() -> Path:
    """The folder with all models."""
    folder = cache() / fingerprint()
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            make(Path(scratch) / "models", folder)
    return folder


def make(scratch: Path, folder: Path) -> None:
    """Make all models in *scratch*, then move them to *folder* at once."""
    command = [sys.executable, "-m", "scripts.make_tiny_models", str(scratch)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    try:
        scratch.rename(folder)
    except OSError:
        if not folder.exists():  # else another process was first
            raise


def cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "pyllama_raw" / "tiny-models"


def fingerprint() -> str:
    """Changes with every file that decides what the models are."""
    files = [
        ROOT / "scripts" / "make_tiny_models.py",
        *sorted((ROOT / "scripts" / "tiny_models").glob("*.py")),
        ROOT / "scripts" / "mutations" / "gguf_file.py",
    ]
    return hashlib.sha256(b"\0".join(f.read_bytes() for f in files)).hexdigest()[:16]
