"""
A huggingface_hub for processes of tests: repositories are folders below STUB_HUB.

A download stops in the middle for as long as the pipe `gate` of its repository has no writer, if there
is one. What it leaves in the cache has the form of the real library's.
"""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def hf_hub_url(repo: str, name: str, **_: Any) -> str:
    """The address of a file."""
    return f"https://hub/{repo}/{name}"


class HfApi:
    """Facts of repositories."""

    def model_info(self, repo: str, *, files_metadata: bool, **_: Any) -> Any:
        """The files of one, with their sizes."""
        assert files_metadata
        folder = Path(os.environ["STUB_HUB"]) / repo
        if not folder.is_dir():
            raise OSError(f"404: there is no {repo}")
        large = int(os.environ.get("STUB_BYTES", "0"))
        files = [
            SimpleNamespace(
                rfilename=path.name,
                size=large or path.stat().st_size,
                blob_id="0",
                lfs={"sha256": _digest(path)},
            )
            for path in sorted(folder.glob("*.*"))
        ]
        return SimpleNamespace(siblings=files)


def hf_hub_download(repo: str, name: str, **_: Any) -> str:
    """Put a file into the cache, in two halves."""
    source = Path(os.environ["STUB_HUB"]) / repo / name
    base = Path(os.environ["HF_HUB_CACHE"]) / f"models--{repo.replace('/', '--')}"
    blob, place = base / "blobs" / _digest(source), base / "snapshots" / "abc" / name
    half, content = blob.with_name(f"{blob.name}.1.incomplete"), source.read_bytes()
    for folder in (blob.parent, place.parent, base / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    (base / "refs" / "main").write_text("abc")
    try:
        half.write_bytes(content[: len(content) // 2])
        if (gate := source.with_name("gate")).exists():
            gate.open().close()
        half.write_bytes(content)
        half.rename(blob)
    finally:
        half.unlink(missing_ok=True)
    place.symlink_to(Path("../../blobs") / blob.name)
    return str(place)


def _digest(path: Path) -> str:
    return sha256(path.name.encode()).hexdigest()
