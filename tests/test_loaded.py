"""What an installed libllama says of itself, and what that is compared with."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pyllama_raw import _ffi
from pyllama_raw._ffi.loaded import RECORD, record_in, version_of
from pyllama_raw.cli.command import main
from pyllama_raw.errors import LibraryNotBuilt
from pyllama_raw.native import libllama

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a compiler")


def make_library(path: Path, version: str, commit: str) -> Path:
    """A libllama that can only say which one it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    code = (
        f'const char * llama_version(void) {{ return "{version}"; }}\n'
        f'const char * ggml_commit(void) {{ return "{commit}"; }}\n'
    )
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", path],  # noqa: S607
        input=code.encode(),
        check=True,
    )
    return path


def write_record(folder: Path, library: Path, version: str) -> None:
    record = {"library": str(library), "version": version}
    (folder / RECORD).write_text(json.dumps(record))


def test_a_library_says_its_version_and_commit(tmp_path):
    """
    The version alone stays the same for weeks.
    """
    library = make_library(tmp_path / "libllama.so.0", "0.6.0-dev", "abc")

    assert version_of(library) == "0.6.0-dev, abc"


def test_another_library_than_the_one_compiled_for_is_refused(tmp_path, monkeypatch):
    """
    Before anything of it is called; both are named, and what to run.
    """
    library = make_library(tmp_path / "lib" / "libllama.so.0", "0.6.0-dev", "new")
    write_record(tmp_path, library, "0.5.0-dev, old")
    monkeypatch.setattr(_ffi, "LIBRARIES", tmp_path)

    with pytest.raises(LibraryNotBuilt) as caught:
        _ffi.load()

    assert str(caught.value) == (
        f"the extension was compiled for llama.cpp 0.5.0-dev, old in {library}, and what is "
        f"there now is 0.6.0-dev, new: run `PYLLAMA_RAW_PREFIX={tmp_path} pip install "
        "--force-reinstall --no-deps .` in the source tree"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="ELF says how long a file is")
@pytest.mark.parametrize("name", ["_llama.abi3.so", "lib/libllama.so.0"])
def test_a_library_that_is_cut_short_is_named(tmp_path, monkeypatch, name):
    """
    The system would load it, and end the process with SIGBUS; the name and what to run are said.
    """
    path = make_library(tmp_path / name, "0.6.0-dev", "abc")
    (tmp_path / "lib").mkdir(exist_ok=True)
    path.write_bytes(path.read_bytes()[:-1])
    monkeypatch.setattr(_ffi, "LIBRARIES", tmp_path / "lib")

    with pytest.raises(LibraryNotBuilt) as caught:
        _ffi.load()

    assert str(caught.value).startswith(
        f"{path} is cut short, as by a full disk: install pyllama_raw anew (`pip install "
    )


@pytest.mark.skipif(sys.platform != "linux", reason="ELF says how long a file is")
@pytest.mark.parametrize("name", ["libllama.so.0", "libggml-base.so.0"])
def test_an_installed_library_that_is_cut_short_is_named(tmp_path, monkeypatch, name):
    """
    As after an update of the system that found no room, of libllama or of what it needs.
    """
    library = make_library(tmp_path / "usr" / "libllama.so.0", "0.6.0-dev", "abc")
    path = make_library(tmp_path / "usr" / name, "0.6.0-dev", "abc")
    path.write_bytes(path.read_bytes()[:-1])
    write_record(tmp_path, library, "0.6.0-dev, abc")
    monkeypatch.setattr(_ffi, "LIBRARIES", tmp_path)

    with pytest.raises(LibraryNotBuilt) as caught:
        _ffi.load()

    assert (
        f"cannot be loaded ({path} is cut short, as by a full disk): install it there anew"
        in str(caught.value)
    )


def test_a_library_that_is_gone_is_named(tmp_path, monkeypatch):
    """
    With the version that it had.
    """
    write_record(tmp_path, tmp_path / "lib" / "libllama.so.0", "0.5.0-dev, old")
    monkeypatch.setattr(_ffi, "LIBRARIES", tmp_path)

    with pytest.raises(
        LibraryNotBuilt, match=r"0\.5\.0-dev, old in .* cannot be loaded"
    ):
        _ffi.load()


@pytest.mark.native
def test_info_says_how_the_library_was_built(tmp_path, monkeypatch, capsys):
    """
    From what lies beside the extension, and how to build another one; or that nothing does.
    """
    monkeypatch.setattr(_ffi, "LIBRARIES", tmp_path)
    statuses = [main(["info", "--build"])]
    write_record(tmp_path, tmp_path / "libllama.so.0", "0.5.0-dev, old")
    statuses.append(main(["info", "--build"]))
    statuses.append(main(["info", "--build", "--json"]))
    out, err = capsys.readouterr()

    assert statuses == [1, 0, 0]
    assert err == "error: nothing says how the library was built\n"
    assert "  version            0.5.0-dev, old\n" in out
    assert (
        "  CUDA               PYLLAMA_RAW_CMAKE_ARGS=-DGGML_CUDA=ON pip install .\n"
        in out
    )
    assert json.loads(out[out.index("{") :])["version"] == "0.5.0-dev, old"


def test_a_library_that_nobody_wrote_down_has_no_record(tmp_path):
    """
    As of an extension that was built before there were records.
    """
    assert record_in(tmp_path) == {}


def test_an_extension_of_another_version_is_said(monkeypatch):
    """
    As after `git pull` in an editable installation: a function of ours is missing in it.
    """
    extension = SimpleNamespace(llama_decode=1)
    monkeypatch.setattr(libllama, "load", lambda: (extension, None))
    lib = libllama._Lazy(0)

    assert (lib.llama_decode, hasattr(lib, "llama_of_later")) == (1, False)
    with pytest.raises(LibraryNotBuilt, match=r"has no plr_new, .* scripts/bootstrap"):
        lib.plr_new  # noqa: B018


def test_a_llama_cpp_whose_plug_ins_are_elsewhere_is_said(monkeypatch):
    """
    Cmake installs them in bin, where ggml does not look; every model would fail without a hint.
    """
    lib = SimpleNamespace(
        plr_log_install=lambda: None,
        plr_abort_install=lambda: None,
        plr_woven_choose=lambda _: True,
        ggml_backend_reg_count=lambda: 0,
        ggml_backend_load_all=lambda: None,
    )
    monkeypatch.setattr(_ffi, "load", lambda: (None, lib))
    monkeypatch.setattr(_ffi, "use_variant", lambda *_: None)
    monkeypatch.setattr(libllama, "_loaded", None)
    monkeypatch.setattr(libllama, "_variant", None)

    with pytest.raises(LibraryNotBuilt, match=r"ggml finds none: .* GGML_BACKEND_PATH"):
        libllama.load()


def test_the_prefix_is_named_as_the_user_named_it(tmp_path, monkeypatch):
    """
    The folder of the library does not tell, because systems have others than lib.
    """
    record = {
        "llama.cpp": "installed in /usr",
        "library": str(tmp_path / "lib" / "x86_64-linux-gnu" / "libllama.so.0"),
        "version": "0.5.0",
    }
    (tmp_path / RECORD).write_text(json.dumps(record))
    monkeypatch.setattr(_ffi, "LIBRARIES", tmp_path)

    with pytest.raises(LibraryNotBuilt, match="run `PYLLAMA_RAW_PREFIX=/usr pip"):
        _ffi._check_version()
