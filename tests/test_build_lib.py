"""Finding, keying and describing the native library; nothing is compiled here."""

import io
import os
import re
import shlex
import sys
import tarfile
from pathlib import Path

import pytest

import build_lib
from build_lib import BuildError

SUFFIX = "dylib" if sys.platform == "darwin" else "so"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch, tmp_path):
    for name in tuple(os.environ):
        if name.startswith("PYLLAMA_RAW_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PYLLAMA_RAW_CACHE", str(tmp_path / "cache"))


def make_prefix(folder: Path) -> Path:
    """An installed llama.cpp, as far as names go."""
    (folder / "include").mkdir(parents=True)
    (folder / "lib").mkdir()
    for name in build_lib.HEADERS:
        (folder / "include" / name).touch()
    for name in build_lib.LIBRARIES:
        (folder / "lib" / f"lib{name}.{SUFFIX}").touch()
    return folder


def make_source(folder: Path) -> Path:
    """A llama.cpp source tree, as far as names go."""
    (folder / "include").mkdir(parents=True)
    (folder / "include" / "llama.h").write_text("// one")
    return folder


def test_named_prefix_is_used_where_it_is(monkeypatch, tmp_path):
    """
    A prefix of the user is linked in place: the extension points at its lib folder.
    """
    prefix = make_prefix(tmp_path / "prefix")
    monkeypatch.setenv("PYLLAMA_RAW_PREFIX", str(prefix))

    library = build_lib.find_or_build()

    assert library == build_lib.Library(
        prefix, prefix / "include", prefix / "lib", bundled=False
    )
    assert build_lib.rpath(library) == str(prefix / "lib")


def test_bundled_library_is_found_relative_to_the_extension(tmp_path):
    """
    A library of our own is looked for beside the extension, wherever that is.
    """
    library = build_lib.Library(tmp_path, tmp_path, tmp_path, bundled=True)

    assert build_lib.rpath(library) in ("$ORIGIN/lib", "@loader_path/lib")


def test_prefix_without_multimodal_headers_is_refused(tmp_path):
    """
    A prefix without libmtmd is named with what it lacks and the flag that adds it.
    """
    prefix = make_prefix(tmp_path / "prefix")
    (prefix / "include" / "mtmd.h").unlink()

    with pytest.raises(BuildError, match=r"has no mtmd\.h in .*LLAMA_BUILD_MTMD"):
        build_lib.installed_at(prefix)


def test_prefix_with_static_libraries_is_refused(tmp_path):
    """
    A prefix without shared libraries is named with the flag that makes them.
    """
    prefix = make_prefix(tmp_path / "prefix")
    (prefix / "lib" / f"libmtmd.{SUFFIX}").rename(prefix / "lib" / "libmtmd.a")

    with pytest.raises(BuildError, match="BUILD_SHARED_LIBS=ON"):
        build_lib.installed_at(prefix)


def test_libraries_are_copied_under_the_names_the_loader_wants(tmp_path):
    """
    Of libx.so -> libx.so.0 -> libx.so.0.5.0 the middle name is taken, once.
    """
    lib = tmp_path / "lib"
    lib.mkdir()
    (lib / "libllama.so.0.5.0").touch()
    (lib / "libllama.so.0").symlink_to("libllama.so.0.5.0")
    (lib / "libllama.so").symlink_to("libllama.so.0")
    (lib / "libggml-cpu-zen4.so").touch()
    (lib / "LICENSE").touch()

    library = build_lib.Library(tmp_path, tmp_path, lib, bundled=True)

    assert library.files == [lib / "libggml-cpu-zen4.so", lib / "libllama.so.0"]


def test_key_names_the_flags(monkeypatch):
    """
    The same flags find the same build; other flags never do.
    """
    plain = build_lib.build_key()
    monkeypatch.setenv("PYLLAMA_RAW_CMAKE_ARGS", "-DGGML_VULKAN=ON")
    flagged = build_lib.build_key()
    monkeypatch.delenv("PYLLAMA_RAW_CMAKE_ARGS")

    assert flagged != plain
    assert build_lib.build_key() == plain


def test_key_names_the_content_of_a_source_tree(monkeypatch, tmp_path):
    """
    An edited source tree of the user is built anew.
    """
    tree = make_source(tmp_path / "llama.cpp")
    monkeypatch.setenv("PYLLAMA_RAW_SOURCE", str(tree))
    before = build_lib.build_key()
    (tree / "include" / "llama.h").write_text("// changed")

    assert build_lib.build_key() != before


def test_folder_without_llama_is_no_source_tree(monkeypatch, tmp_path):
    """
    A source folder that is not llama.cpp is named, not built.
    """
    monkeypatch.setenv("PYLLAMA_RAW_SOURCE", str(tmp_path))

    with pytest.raises(BuildError, match=r"is not a llama\.cpp source tree"):
        build_lib.find_or_build()


def test_finished_build_is_taken_from_the_cache(tmp_path):
    """
    A build that carries its mark is used; nothing is downloaded or compiled.
    """
    home = tmp_path / "cache" / "lib" / build_lib.build_key()
    home.mkdir(parents=True)
    (home / "done").touch()

    library = build_lib.find_or_build()

    assert (library.prefix, library.bundled) == (home, True)


def test_only_llama_cpp_is_unpacked(monkeypatch, tmp_path):
    """
    Other folders, links and names that climb out of the target stay in the archive.
    """
    root = str(build_lib.SOURCE_FOLDER)
    archive = tmp_path / "source.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name in (f"{root}/src/a.cpp", "other/b.py", f"{root}/../c", f"{root}/.git"):
            member = tarfile.TarInfo(name)
            member.size = 4
            tar.addfile(member, io.BytesIO(b"text"))
        link = tarfile.TarInfo(f"{root}/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    monkeypatch.setattr(build_lib.fetch, "fetch", lambda *_: archive)

    target = build_lib.unpack_source(tmp_path / "target")

    assert [path for path in target.rglob("*") if path.is_file()] == [
        target / "src" / "a.cpp"
    ]
    assert not (tmp_path / "c").exists()


def test_missing_compiler_says_what_to_install(monkeypatch):
    """
    Without a compiler the error names the packages and the variable.
    """
    monkeypatch.setenv("CXX", "no-such-compiler")

    with pytest.raises(BuildError, match=r"no-such-compiler.*build-essential.*set CXX"):
        build_lib.build_key()


def test_missing_tool_says_what_to_install(monkeypatch, tmp_path):
    """
    Without cmake the error gives the pip command.
    """
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build_lib.toolchain.sysconfig, "get_path", lambda _: "")

    with pytest.raises(BuildError, match="-m pip install cmake"):
        build_lib.toolchain.find_tool("cmake")


def test_python_without_headers_says_what_to_install(monkeypatch, tmp_path):
    """
    A Python without Python.h is refused before the compiler stumbles over it.
    """
    monkeypatch.setattr(
        build_lib.toolchain.sysconfig, "get_path", lambda _: str(tmp_path)
    )

    with pytest.raises(BuildError, match="python3-dev"):
        build_lib.toolchain.check_python_headers()


def test_failed_command_shows_its_errors():
    """
    A failed build shows the error lines and what to check, with the command.
    """
    code = "print('note'); print('x.cpp:1: error: no such type'); raise SystemExit(3)"

    with pytest.raises(BuildError, match="failed with code 3") as caught:
        build_lib.toolchain.run(sys.executable, "-c", code)

    assert "x.cpp:1: error: no such type" in str(caught.value)
    assert "PYLLAMA_RAW_CMAKE_ARGS" in str(caught.value)


def test_long_build_says_how_far_it_is(capsys):
    """
    Every tenth of the steps of ninja is one line.
    """
    code = "for n in range(1, 101): print(f'[{n}/100] compiling')"

    build_lib.toolchain.run(sys.executable, "-c", code)

    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"build_lib: compiled {n} of 100" for n in range(10, 101, 10)]


def test_folders_may_have_spaces_in_their_names(monkeypatch, tmp_path):
    """
    Flags that name a folder reach the compiler whole.
    """
    tree = tmp_path / "two words"
    ran: list[dict[str, str]] = []
    for name in ("CFLAGS", "CXXFLAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(build_lib.toolchain, "run", lambda *_, env: ran.append(env))

    build_lib.cmake_build(tree, tmp_path / "work", [], ())

    flags = [shlex.split(env[name]) for env in ran for name in ("CFLAGS", "CXXFLAGS")]
    assert flags == [[f"-ffile-prefix-map={tree}=llama.cpp"]] * 4


@pytest.mark.native
@pytest.mark.skipif(
    "PYLLAMA_RAW_PREFIX" in os.environ, reason="that libllama was built by others"
)
def test_library_has_amx_where_the_cpu_has_it():
    """
    What was built for this CPU uses its AMX.
    """
    from pyllama_raw.native.libllama import system_info

    cpu_has_it = re.search(r"\bamx_int8\b", Path("/proc/cpuinfo").read_text())

    assert ("AMX_INT8 = 1" in system_info()) == (cpu_has_it is not None)
