"""
Sources of llama.cpp: the window of versions that this package builds with, and files of the pinned
one that are no part of libllama.

    python -m scripts.llama_source             what is in the window
    python -m scripts.llama_source newest      unpacks that version; prints its folder
    eval "$(python -m scripts.llama_source newest --export)"

A folder is in the cache, and is mended as the pinned source is. PYLLAMA_RAW_SOURCE takes it. The
last command sets it, with the flags that speed the build up; `scripts/test --llama newest` does so
for its tests.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import tarfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import build_lib

fetch = build_lib.fetch


@dataclass(frozen=True, slots=True)
class Version:
    """One llama.cpp of the window."""

    build: str  # as its project counts them
    archive: build_lib.fetch.Artifact
    folder: PurePosixPath  # in the archive


WINDOW = {
    "before": Version(
        "of llama-cpp-python 0.3.35",
        fetch.Artifact(
            project="llama-cpp-python",
            version="0.3.35",
            url="https://files.pythonhosted.org/packages/1a/71/"
            "5ecdad726b87527b361d9d95313c6591f27bb3fad79c9ab524ad4250b4c9/"
            "llama_cpp_python-0.3.35.tar.gz",
            sha256="1139dbb54509074b70893fab8554e3b079aa9f4d312058ce4018ef0019e3de12",
            n_bytes=74_868_054,
        ),
        PurePosixPath("llama_cpp_python-0.3.35/vendor/llama.cpp"),
    ),
    "pinned": Version(
        build_lib.LLAMA_COMMIT, build_lib.SOURCE, build_lib.SOURCE_FOLDER
    ),
    "newest": Version(
        "b11549",
        fetch.Artifact(
            project="xllamacpp",
            version="2026.10.11549",
            url="https://files.pythonhosted.org/packages/87/62/"
            "b6dfaaf346d3d4fd0e2a2df755f2693b77673f2735da7ba0592af9d2f09e/"
            "xllamacpp-2026.10.11549.tar.gz",
            sha256="c17ee1163006f70726abb9f72137830818f3d8cb60bfc34cb232d08428eaa22b",
            n_bytes=37_722_765,
        ),
        PurePosixPath("xllamacpp-2026.10.11549/thirdparty/llama.cpp"),
    ),
}

# Models that see and hear are joined to few files, as those of the pinned source are. Other files of
# another version have perhaps other names.
CMAKE_ARGS = f"-DCMAKE_PROJECT_llama.cpp_INCLUDE={build_lib.JOINED_FLAGS} -DPLR_JOIN_MEDIA_ONLY=ON"


def tree(name: str) -> Path:
    """
    The folder of a version of WINDOW, which is fetched, unpacked and mended once.

    Raises:
        FetchFailed: the archive cannot be had.
        BuildError: it cannot be mended as the pinned source is.
    """
    version = WINDOW[name]
    home = home_of(version)
    with fetch.locked(home.with_suffix(".lock"), build_lib.toolchain.say):
        if not home.is_dir():
            unfinished = home.with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            unpack(unfinished, [""], version)
            build_lib.mend(unfinished)
            unfinished.rename(home)
        else:
            build_lib.mend(home)  # an earlier checkout had fewer mends
    return home


def home_of(version: Version) -> Path:
    """Where the cache has, or is to have, the folder of *version*."""
    return fetch.cache_dir() / "source" / version.archive.sha256[:16]


def unpack(
    folder: Path, parts: Collection[str], version: Version = WINDOW["pinned"]
) -> Path:
    """What *parts* of a source hold, files or folders, into *folder*, which it returns."""
    archive = fetch.fetch(
        version.archive, fetch.cache_dir() / "download", lambda *_: None
    )
    with tarfile.open(archive) as tar:
        for member in tar:
            name = PurePosixPath(member.name)
            if not name.is_relative_to(version.folder) or not member.isfile():
                continue
            part = name.relative_to(version.folder)
            if ".." in part.parts:
                continue
            if any(part.is_relative_to(parent) for parent in parts):
                path = folder / part
                path.parent.mkdir(parents=True, exist_ok=True)
                content = tar.extractfile(member)
                assert content is not None
                path.write_bytes(content.read())
    return folder


def main(argv: list[str] | None = None) -> int:
    """Run the command line *argv*; the exit code."""
    parser = argparse.ArgumentParser(description="Unpack a llama.cpp of the window.")
    parser.add_argument("name", nargs="?", choices=WINDOW)
    parser.add_argument("--export", action="store_true", help="print lines for a shell")
    options = parser.parse_args(argv)
    if options.name is None and options.export:
        parser.error("--export needs the name of a version")
    if options.name is None:
        for name, version in WINDOW.items():
            print(f"{name}: {version.build}, in {version.archive.filename}")
        return 0
    try:
        folder = tree(options.name)
    except (build_lib.BuildError, OSError) as error:
        raise SystemExit(f"llama_source: {error}") from None
    if not options.export:
        print(folder)
    elif options.name != "pinned":  # it is built without a variable
        print(f"export PYLLAMA_RAW_SOURCE={shlex.quote(str(folder))}")
        print(f"export PYLLAMA_RAW_CMAKE_ARGS={shlex.quote(CMAKE_ARGS)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
