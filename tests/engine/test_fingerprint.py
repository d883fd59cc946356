"""When a state of another process is of use: only if all of the model is as it was."""

import os
import re
from array import array
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from pyllama_raw.engine.build import open_store
from pyllama_raw.engine.shared_models import BLOCK_BYTES, fingerprint, model_files
from pyllama_raw.engine.state_files import SpanKeys
from pyllama_raw.native.libllama import library_digest, state_version
from pyllama_raw.options.config import CacheConfig, EngineConfig

pytestmark = pytest.mark.native

N_HEAD = 10_000
N_TENSORS = 4 * 2**20


def make_model(path: Path, seed: int = 1) -> Path:
    """Bytes for metadata and tensors; nobody here loads them."""
    path.write_bytes(Random(seed).randbytes(N_HEAD + N_TENSORS))  # noqa: S311
    return path


def name_of(files, tensor_bytes=N_TENSORS) -> str:
    return fingerprint(files, tensor_bytes, {}, {})


def change(path: Path, start: int, n_bytes: int) -> None:
    with path.open("r+b") as stream:
        stream.seek(start)
        data = stream.read(n_bytes)
        stream.seek(start)
        stream.write(bytes(byte ^ 1 for byte in data))


def test_each_tensor_counts(tmp_path):
    """
    A file system that keeps neither times nor inodes: other weights of the size of a small
    matrix, anywhere, are noticed all the same.
    """
    path = make_model(tmp_path / "m.gguf")
    files = model_files(path)
    names = [name_of(files)]
    n_bytes = N_TENSORS // 512 + BLOCK_BYTES
    for start in range(N_HEAD, N_HEAD + N_TENSORS - n_bytes + 1, n_bytes):
        change(path, start, n_bytes)
        names.append(name_of(files))

    assert len(set(names)) == len(names)


def test_each_byte_of_the_metadata_counts(tmp_path):
    """
    So do the first and the last byte of the tensors.
    """
    path = make_model(tmp_path / "m.gguf")
    files = model_files(path)
    places = [*range(0, N_HEAD, 501), N_HEAD - 1, N_HEAD, N_HEAD + N_TENSORS - 1]
    names = [name_of(files)]
    for place in places:
        change(path, place, 1)
        names.append(name_of(files))

    assert len(set(names)) == len(names)


def test_the_same_model_has_the_same_name(tmp_path):
    """
    Also if its metadata are all of it, less than a block, or more than is read.
    """
    path = make_model(tmp_path / "m.gguf")
    names = {name_of(model_files(path)) for _ in range(3)}
    (tmp_path / "small").write_bytes(b"GGUF")

    assert len(names) == 1
    assert name_of(model_files(tmp_path / "small"), 0)
    assert name_of(model_files(path), 0) == name_of(model_files(path), 0)
    assert name_of(model_files(path), 10**9)


def replaced_by_rename(path: Path) -> None:
    status = path.stat()
    other = make_model(path.with_name("other"))
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)


def replaced_in_place(path: Path) -> None:
    status = path.stat()
    change(path, N_HEAD + 1, 1)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def touched(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def permitted(path: Path) -> None:
    path.chmod(0o640)


@pytest.mark.parametrize(
    "act", [replaced_by_rename, replaced_in_place, touched, permitted]
)
def test_what_happens_to_a_file_is_noticed(tmp_path, act):
    """
    Path, size and time of the contents may be as before: inode and time of change are not.
    """
    path = make_model(tmp_path / "m.gguf")
    before = model_files(path)
    act(path)
    (file,) = model_files(path)

    assert (file.path, file.n_bytes) == before[0][:2]
    assert (file,) != before


def test_every_part_of_a_split_model_counts(tmp_path):
    """
    Whichever of its files is another one now, the states are of another model.
    """
    parts = [tmp_path / f"m-{i:05}-of-00003.gguf" for i in (1, 2, 3)]
    for seed, part in enumerate(parts):
        make_model(part, seed)
    files = model_files(parts[0])
    names = [name_of(files, 3 * N_TENSORS)]
    for part in parts:
        change(part, N_HEAD + N_TENSORS - BLOCK_BYTES, BLOCK_BYTES)
        names.append(name_of(files, 3 * N_TENSORS))

    assert [file.path for file in files] == [str(part.resolve()) for part in parts]
    assert len(set(names)) == 4


@pytest.mark.parametrize(
    "name", ["m-00001-of-99999.gguf", "m-00002-of-00003.gguf", "m-00000-of-00000.gguf"]
)
def test_a_name_that_lies_about_parts_is_one_file(tmp_path, name):
    """
    Parts that are not there are not waited for, and the file itself always counts.
    """
    path = make_model(tmp_path / name)

    assert [file.path for file in model_files(path)] == [str(path.resolve())]


@pytest.mark.parametrize("name", ["missing", "nul\0", "\ud800", "x" * 300])
def test_a_file_that_cannot_be_is_no_file(tmp_path, name):
    """
    Whoever loads the model tells what is wrong.
    """
    assert model_files(tmp_path / name) == ()


def test_a_model_that_changed_while_it_was_loaded_keeps_no_files(tmp_path):
    """
    Nobody knows then whose states they would be; the caller is warned.
    """
    path = make_model(tmp_path / "m.gguf")
    config = EngineConfig(cache=CacheConfig(directory=tmp_path / "cache"))
    model = SimpleNamespace(path=str(path), size_bytes=N_TENSORS)
    loaded = model_files(path)
    same = open_store(model, loaded, config, {})

    replaced_in_place(path)
    with pytest.warns(RuntimeWarning, match="has changed since it was loaded"):
        changed = open_store(model, loaded, config, {})
    path.unlink()
    with pytest.warns(RuntimeWarning, match="has changed since it was loaded"):
        gone = open_store(model, loaded, config, {})

    assert same is not None
    assert (changed, gone) == (None, None)


@pytest.mark.parametrize(
    ("fact", "other"), [("library_digest", "another"), ("state_version", 2**30)]
)
def test_another_library_is_a_miss(fact, other, tmp_path, monkeypatch):
    """
    Files of another build of llama.cpp, or of another version of states, are not found.
    """
    model = SimpleNamespace(path=str(make_model(tmp_path / "m.gguf")), size_bytes=1)
    cache = CacheConfig(mode="snapshots", directory=tmp_path / "states")
    config, files = EngineConfig(cache=cache), model_files(Path(model.path))
    tokens, state = array("i", range(4)).tobytes(), memoryview(b"state")
    n_files = []
    for change in (None, other):
        if change is not None:
            monkeypatch.setattr(
                f"pyllama_raw.engine.shared_models.{fact}", lambda other=change: other
            )
        store = open_store(model, files, config, {})
        n_files.append(len(store.scan(SpanKeys())))
        store.write(None, tokens, state)
        n_files.append(len(store.scan(SpanKeys())))
        store.close()

    assert n_files == [0, 1, 0, 1]


def test_the_digest_is_of_the_library_that_is_loaded():
    """
    Its files lie beside the extension, or where the user has them.
    """
    digest = library_digest()

    assert re.fullmatch("[0-9a-f]{64}", digest)
    assert state_version() >= 1


def test_the_instructions_of_library_and_kernels_count(tmp_path, monkeypatch):
    """
    AMX or none, a kernel of ours that this CPU lacks, kernels that are switched off: each
    gives other last bits.
    """
    files = model_files(make_model(tmp_path / "m.gguf"))
    module = "pyllama_raw.engine.shared_models"
    names = [name_of(files)]
    with monkeypatch.context() as other:
        other.setattr(f"{module}.system_info", lambda: "CPU : AMX_INT8 = 1 |")
        names.append(name_of(files))
    with monkeypatch.context() as other:
        other.setattr(f"{module}.table", lambda: ())
        names.append(name_of(files))
    names += [
        fingerprint(files, N_TENSORS, {}, {"fast_kernels": fast})
        for fast in (True, False)
    ]

    assert len(set(names)) == len(names)
