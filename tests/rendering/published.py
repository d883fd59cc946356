"""Chat templates as models are published with them, from the source of llama.cpp."""

from __future__ import annotations

import functools
import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from tempfile import NamedTemporaryFile

import pytest

import build_lib
from pyllama_raw.prompts.rendering.template import CompiledTemplate

FOLDER = PurePosixPath("models/templates")
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
REFUSING = {  # any chat of plain messages
    "fireworks-ai-llama-3-firefunction-v2",  # wants a variable of its own
    "google-translategemma-4b-it",  # of llama.cpp 0.6: wants parts that name languages
}


@functools.cache
def published_templates() -> dict[str, str]:
    """Names and sources, from the tree or the archive that libllama was built from."""
    if tree := os.environ.get("PYLLAMA_RAW_SOURCE"):
        paths = sorted(Path(tree).joinpath(FOLDER).glob("*.jinja"))
        return {path.stem: path.read_text() for path in paths}
    # To read all of an archive takes seconds, so what it has of them stays beside it.
    download = build_lib.fetch.cache_dir() / "download"
    copy = download / f"templates-{build_lib.SOURCE.sha256[:16]}.json"
    if copy.exists():
        return json.loads(copy.read_text())
    archive = download / build_lib.SOURCE.filename
    if not archive.exists():
        pytest.skip("the source of llama.cpp is not here")
    templates = dict(_members(archive))
    with NamedTemporaryFile("w", dir=download, delete=False) as file:
        json.dump(templates, file)
    Path(file.name).replace(copy)
    return templates


@functools.cache
def compiled_templates() -> dict[str, CompiledTemplate]:
    """All of them, compiled once, which takes seconds."""
    templates = published_templates()
    return {name: CompiledTemplate(text, TOKENS) for name, text in templates.items()}


def _members(archive: Path) -> Iterator[tuple[str, str]]:
    with tarfile.open(archive) as members:
        for member in members:
            name = PurePosixPath(member.name)
            if name.parent == build_lib.SOURCE_FOLDER / FOLDER:
                file = members.extractfile(member)
                if name.suffix == ".jinja" and file is not None:
                    yield name.stem, file.read().decode()
