"""Pinned files: whole and checked, or absent."""

import errno
import hashlib
import http.client
import os
import stat
import threading
import time
from pathlib import Path

import pytest

from pyllama_raw.options import fetch
from pyllama_raw.options.fetch import Artifact, CacheFailed, FetchFailed
from tests.support.limits import LIMIT_S

CONTENT = b"the pinned content" * 1000


def make_artifact(folder: Path, content: bytes = CONTENT) -> Artifact:
    """A pin whose first place is a file in *folder* holding *content*."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "thing-1.0.tar.gz").write_bytes(content)
    return Artifact(
        project="thing",
        version="1.0",
        url=(folder / "thing-1.0.tar.gz").as_uri(),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        n_bytes=len(CONTENT),
    )


@pytest.fixture(autouse=True)
def _no_network(monkeypatch, tmp_path):
    monkeypatch.setattr(fetch, "PAUSE_S", 0.0)
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "no-index").as_uri())


def test_file_is_fetched_once(tmp_path):
    """
    The second call finds the file and asks no place for it.
    """
    artifact = make_artifact(tmp_path / "server")
    seen: list[int] = []
    path = fetch.fetch(artifact, tmp_path / "cache", seen.append)
    (tmp_path / "server" / artifact.filename).unlink()

    assert fetch.fetch(artifact, tmp_path / "cache", seen.append) == path
    assert path.read_bytes() == CONTENT
    assert seen == [len(CONTENT)]


def test_wrong_content_is_refused(tmp_path):
    """
    A file of another hash is not kept, and the error gives both hashes.
    """
    artifact = make_artifact(tmp_path / "server", b"tampered")

    with pytest.raises(FetchFailed) as caught:
        fetch.fetch(artifact, tmp_path / "cache", lambda _: None)

    assert artifact.sha256 in str(caught.value)
    assert hashlib.sha256(b"tampered").hexdigest() in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_truncated_file_in_the_cache_is_replaced(tmp_path):
    """
    A file of another size under the final name is fetched again.
    """
    artifact = make_artifact(tmp_path / "server")
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / artifact.filename).write_bytes(CONTENT[:10])

    path = fetch.fetch(artifact, cache, lambda _: None)

    assert path.read_bytes() == CONTENT


def test_index_is_asked_when_the_address_fails(tmp_path, monkeypatch):
    """
    Where the address is out of reach, the mirror pip is set to gives the file.
    """
    artifact = make_artifact(tmp_path / "mirror" / "files")
    gone = Artifact(
        project="thing",
        version="1.0",
        url="file:///nowhere/thing-1.0.tar.gz",
        sha256=artifact.sha256,
        n_bytes=artifact.n_bytes,
    )
    page = tmp_path / "mirror" / "index.html"
    page.write_text(
        '<a href="files/other-1.0.tar.gz">other</a>'
        '<a href="files/thing-1.0.tar.gz#sha256=00">thing</a>'
    )
    open_url = fetch._open
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.invalid/simple/")
    asked = []

    def open_here(url):
        asked.append(url)
        base = "https://mirror.invalid/simple/thing/"
        local = url.replace(base, page.parent.as_uri() + "/")
        return open_url(page.as_uri() if url == base else local)

    monkeypatch.setattr(fetch, "_open", open_here)

    path = fetch.fetch(gone, tmp_path / "cache", lambda _: None)

    assert path.read_bytes() == CONTENT
    assert asked[-2:] == [
        "https://mirror.invalid/simple/thing/",
        "https://mirror.invalid/simple/thing/files/thing-1.0.tar.gz",
    ]


def test_other_schemes_are_refused():
    """
    Only https, http and file addresses are opened.
    """
    with pytest.raises(ValueError, match="only https, http and file"):
        fetch._open("ftp://example.invalid/x")


def test_certificates_that_are_none_are_named(monkeypatch, tmp_path):
    """
    By the variable that has their path: the network and the cache are not to blame.
    """
    monkeypatch.setenv("PIP_CERT", str(tmp_path / "gone.pem"))

    with pytest.raises(ValueError, match=r"PIP_CERT=.*gone\.pem has no certificates"):
        fetch._open("https://example.invalid/x")


def test_failed_write_leaves_nothing(tmp_path):
    """
    A block that raises leaves neither the file nor a temporary one.
    """
    path = tmp_path / "x"

    def write_half():
        with fetch.atomic_file(path) as file:
            file.write(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        write_half()

    assert list(tmp_path.iterdir()) == []


def test_what_is_kept_is_for_others_too(tmp_path):
    """
    The umask says who may read a file: root fills the cache of an image, and another user reads it.
    """
    umask = os.umask(0o027)
    try:
        with fetch.atomic_file(tmp_path / "x") as file:
            file.write(b"whole")
    finally:
        os.umask(umask)

    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o640


def test_what_a_killed_process_has_written_goes_with_the_next(tmp_path):
    """
    An hour after it wrote last; what another one writes, and other files, stay.
    """
    for name, age_s in ((".x.dead", 3700), (".x.other", 0), (".y.dead", 3700)):
        (tmp_path / name).write_bytes(b"half")
        modified_s = time.time() - age_s
        os.utime(tmp_path / name, (modified_s, modified_s))

    with fetch.atomic_file(tmp_path / "x") as file:
        file.write(b"whole")

    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"x", ".x.other", ".y.dead"}


def test_lock_makes_the_second_wait(tmp_path):
    """
    Whoever comes second says that it waits, and gets the lock after the first.
    """
    order: list[str] = []
    waits = threading.Event()

    def second():
        with fetch.locked(tmp_path / "lock", lambda _: waits.set()):
            order.append("second")

    thread = threading.Thread(target=second)
    with fetch.locked(tmp_path / "lock", pytest.fail):
        thread.start()
        assert waits.wait(LIMIT_S)
        order.append("first")
    thread.join(LIMIT_S)

    assert order == ["first", "second"]


@pytest.mark.parametrize(
    ("variable", "tail"),
    [("PYLLAMA_RAW_CACHE", "here"), ("XDG_CACHE_HOME", "here/pyllama_raw")],
)
def test_cache_folder_can_be_named(monkeypatch, tmp_path, variable, tail):
    """
    PYLLAMA_RAW_CACHE names the folder itself, XDG_CACHE_HOME the one above.
    """
    for name in ("PYLLAMA_RAW_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "here"))

    assert fetch.cache_dir() == tmp_path / tail


class Endless:
    """A server that sends without an end, and counts what is read."""

    def __init__(self):
        self.n_read = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def read(self, n_bytes):
        self.n_read += n_bytes
        return b"x" * n_bytes


def test_a_download_ends_at_the_size_that_is_expected(tmp_path, monkeypatch):
    """
    A server that sends more is cut off within a block; the error says so.
    """
    artifact = make_artifact(tmp_path / "server")
    server = Endless()
    told = []
    monkeypatch.setattr(fetch, "_open", lambda _: server)

    with (
        (tmp_path / "file").open("wb") as file,
        pytest.raises(ValueError, match="gave more than"),
    ):
        fetch._download(artifact.url, artifact, file, told.append)

    assert server.n_read == fetch.BLOCK_BYTES
    assert told == []
    assert (tmp_path / "file").read_bytes() == b""


def test_an_index_page_without_an_end_is_cut_off(tmp_path, monkeypatch):
    """
    The page that lists files is bounded, too.
    """
    artifact = make_artifact(tmp_path / "server")
    server = Endless()
    monkeypatch.setattr(fetch, "_open", lambda _: server)
    monkeypatch.setattr(fetch, "MAX_PAGE_BYTES", 1000)

    with pytest.raises(ValueError, match="gave more than"):
        fetch._url_from_index(artifact)

    assert server.n_read == 1001


def test_a_server_that_sends_too_much_is_told_in_the_end(tmp_path, monkeypatch):
    """
    Every place is tried, nothing is kept, and the error says what each did.
    """
    artifact = make_artifact(tmp_path / "server")
    monkeypatch.setattr(fetch, "_open", lambda _: Endless())
    monkeypatch.setattr(fetch, "MAX_PAGE_BYTES", 1000)
    monkeypatch.setattr(fetch, "PAUSE_S", 0.0)
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.invalid/simple/")

    with pytest.raises(fetch.FetchFailed, match=r"ValueError: .* gave more than"):
        fetch.fetch(artifact, tmp_path / "cache", lambda _: None)

    assert list((tmp_path / "cache").iterdir()) == []


def test_a_full_disk_is_not_the_networks_fault(tmp_path, monkeypatch):
    """
    It is said at once, with the folder and the variable that names another one.
    """
    artifact = make_artifact(tmp_path / "server")
    cache = tmp_path / "cache"
    n_tries = []

    def fill(url, artifact, file, on_bytes):
        n_tries.append(url)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(fetch, "_download", fill)

    with pytest.raises(CacheFailed) as caught:
        fetch.fetch(artifact, cache, lambda _: None)

    assert str(caught.value) == (
        f"cannot write to {cache}: No space left on device. Make room there, or name "
        "another folder for all that is kept by PYLLAMA_RAW_CACHE"
    )
    assert (len(n_tries), list(cache.iterdir())) == (1, [])


@pytest.mark.parametrize(
    "error",
    [
        http.client.BadStatusLine("SSH-2.0-OpenSSH"),
        http.client.IncompleteRead(b"half"),
        TimeoutError("timed out"),
    ],
)
def test_what_a_place_does_is_told_with_its_address(tmp_path, monkeypatch, error):
    """
    Whatever a server, or what stands before it, answers: each place is tried.
    """
    artifact = make_artifact(tmp_path / "server")

    def fail(_):
        raise error

    monkeypatch.setattr(fetch, "_open", fail)
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.invalid/simple")

    with pytest.raises(FetchFailed) as caught:
        fetch.fetch(artifact, tmp_path / "cache", lambda _: None)

    kind = type(error).__name__
    assert str(caught.value).splitlines()[1:3] == [
        f"  Unreachable: {place}: {kind}: {error}"
        for place in (artifact.url, "https://mirror.invalid/simple/thing/")
    ]


def test_a_file_of_the_cache_is_known_by_its_bytes(tmp_path):
    """
    A crash of the machine leaves files of the right size, and users put files there.
    """
    artifact = make_artifact(tmp_path / "server")
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / artifact.filename).write_bytes(bytes(len(CONTENT)))

    path = fetch.fetch(artifact, cache, lambda _: None)

    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize("folder", ["", "relative"])
def test_a_relative_folder_of_xdg_is_ignored(monkeypatch, tmp_path, folder):
    """
    As its specification says: it would be another one for each current folder.
    """
    monkeypatch.delenv("PYLLAMA_RAW_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", folder)
    monkeypatch.setenv("HOME", str(tmp_path))

    assert fetch.cache_dir().is_relative_to(tmp_path)


def test_a_lock_that_cannot_be_made_is_named(tmp_path):
    """
    With its folder; two processes never go on without it.
    """
    (tmp_path / "lock").mkdir()

    with (
        pytest.raises(CacheFailed, match=rf"cannot write to {tmp_path}: .*/lock\)"),
        fetch.locked(tmp_path / "lock", pytest.fail),
    ):
        pass
