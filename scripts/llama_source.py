"""Files of the pinned source of llama.cpp that are no part of libllama, for what reads them."""

from __future__ import annotations

import tarfile
from collections.abc import Collection
from pathlib import Path, PurePosixPath

import build_lib


def unpack(folder: Path, parts: Collection[str]) -> Path:
    """What *parts* of the source hold, files or folders, into *folder*, which it returns."""
    archive = build_lib.fetch.fetch(
        build_lib.SOURCE, build_lib.fetch.cache_dir() / "download", lambda *_: None
    )
    with tarfile.open(archive) as tar:
        for member in tar:
            name = PurePosixPath(member.name)
            if not name.is_relative_to(build_lib.SOURCE_FOLDER) or not member.isfile():
                continue
            part = name.relative_to(build_lib.SOURCE_FOLDER)
            if any(part.is_relative_to(parent) for parent in parts):
                path = folder / part
                path.parent.mkdir(parents=True, exist_ok=True)
                content = tar.extractfile(member)
                assert content is not None
                path.write_bytes(content.read())
    return folder
