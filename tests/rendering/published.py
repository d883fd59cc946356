"""Chat templates as models are published with them, from the source of llama.cpp."""

from __future__ import annotations

import functools
import os
import tarfile
from pathlib import Path, PurePosixPath

import pytest

import build_lib

FOLDER = PurePosixPath("models/templates")


@functools.cache
def published_templates() -> dict[str, str]:
    """Names and sources, from the tree or the archive that libllama was built from."""
    if tree := os.environ.get("PYLLAMA_RAW_SOURCE"):
        paths = sorted(Path(tree).joinpath(FOLDER).glob("*.jinja"))
        return {path.stem: path.read_text() for path in paths}
    archive = build_lib.fetch.cache_dir() / "download" / build_lib.SOURCE.filename
    if not archive.exists():
        pytest.skip("the source of llama.cpp is not here")
    wanted = build_lib.SOURCE_FOLDER / FOLDER
    found = {}
    with tarfile.open(archive) as members:
        for member in members:
            name = PurePosixPath(member.name)
            if name.parent == wanted and name.suffix == ".jinja":
                file = members.extractfile(member)
                assert file is not None
                found[name.stem] = file.read().decode()
    return found
