"""Finding, keying and describing the native library; nothing is compiled here."""

import errno
import hashlib
import io
import os
import re
import shlex
import sys
import tarfile
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

import build_lib
from build_lib import BuildError
from tests.support.builds import (
    SUFFIX,
    forbidden,
    make_built,
    make_prefix,
    make_source,
    make_source_that_fits,
)


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


def test_clones_share_what_was_built(monkeypatch, tmp_path):
    """
    A flag that names a file of the checkout is the same flag in another one.
    """
    keys = []
    for root in (tmp_path, build_lib.ROOT):
        flag = f"-DCMAKE_PROJECT_llama.cpp_INCLUDE={root / 'scripts' / 'joined.cmake'}"
        monkeypatch.setenv("PYLLAMA_RAW_CMAKE_ARGS", flag)
        monkeypatch.setattr(build_lib, "ROOT", root)
        keys.append(build_lib.build_key())

    assert keys[0] == keys[1]


def test_an_extension_is_kept_by_its_sources(monkeypatch, tmp_path):
    """
    A changed source asks for another one; beside a library of the user's none is kept.
    """
    monkeypatch.setattr(build_lib, "FFI_DIR", tmp_path)
    library = build_lib.Library(tmp_path, tmp_path, tmp_path, bundled=True)
    (tmp_path / "step").mkdir()
    (tmp_path / "lib").mkdir()
    kept = []
    for text in ("int a;", "int b;", "int a;"):
        (tmp_path / "step" / "step.cpp").write_text(text)
        kept.append(build_lib.kept_extension(library))
    (tmp_path / "lib" / "LICENSE.llama.cpp").touch()  # as after an installation
    kept.append(build_lib.kept_extension(library))

    assert kept[0] == kept[2] == kept[3] != kept[1]
    assert build_lib.kept_extension(replace(library, bundled=False)) is None


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


def test_the_archive_of_the_pinned_source_can_be_named(monkeypatch, tmp_path):
    """
    A build without a network: nothing is fetched, and the build is that of the pinned source.
    """
    key = build_lib.build_key()
    root = str(build_lib.SOURCE_FOLDER)
    archive = tmp_path / "source.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        member = tarfile.TarInfo(f"{root}/src/a.cpp")
        member.size = 4
        tar.addfile(member, io.BytesIO(b"text"))
    monkeypatch.setattr(build_lib, "is_pinned", lambda path: path == archive)
    monkeypatch.setattr(build_lib.fetch, "fetch", forbidden)
    monkeypatch.setenv("PYLLAMA_RAW_SOURCE", str(archive))

    target = build_lib.unpack_source(tmp_path / "target")

    assert (target / "src" / "a.cpp").read_text() == "text"
    assert build_lib.build_key() == key


def test_the_page_of_installing_fetches_the_archive_that_is_pinned():
    """
    pip prepares what it downloads, so the tools of that build are isolated, and are wheels.
    """
    page = (build_lib.ROOT / "docs" / "install.md").read_text()
    project = build_lib.SOURCE.project
    lines = [line for line in page.splitlines() if f" {project}==" in line]

    assert lines == [
        f"pip download -d wheels --no-deps --no-binary {project} "
        f"{project}=={build_lib.SOURCE.version}"
    ]
    assert f"wheels/{build_lib.SOURCE.filename}\n" in page


def test_the_page_of_installing_names_all_that_a_build_needs():
    """
    Of tools and packages, as pyproject.toml asks for them.
    """
    page = (build_lib.ROOT / "docs" / "install.md").read_text()
    project = tomllib.loads((build_lib.ROOT / "pyproject.toml").read_text())
    tools, packages = (
        shlex.split(line)[4:]
        for line in page.splitlines()
        if line.startswith("pip download -d wheels ") and "--no-deps" not in line
    )
    name = re.compile(r"[\w-]+")

    assert tools == project["build-system"]["requires"]
    assert [name.match(text)[0] for text in packages] == [
        name.match(text)[0] for text in project["project"]["dependencies"]
    ]


def test_another_archive_is_refused(monkeypatch, tmp_path):
    """
    With what the pinned one is, and what to do with another one.
    """
    archive = tmp_path / "llama.cpp.tar.gz"
    archive.touch()
    monkeypatch.setenv("PYLLAMA_RAW_SOURCE", str(archive))

    with pytest.raises(BuildError) as caught:
        build_lib.find_or_build()

    assert str(caught.value) == (
        f"PYLLAMA_RAW_SOURCE={archive} is not {build_lib.SOURCE.filename}: the archive of "
        f"the pinned llama.cpp has {build_lib.SOURCE.n_bytes} bytes with sha256 "
        f"{build_lib.SOURCE.sha256}. Unpack another one and name its folder"
    )


def test_the_pinned_source_is_known_by_its_bytes(monkeypatch, tmp_path):
    """
    Its size alone is not enough.
    """
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_bytes(b"text")
    wrong.write_bytes(b"tent")
    digest = hashlib.sha256(b"text").hexdigest()
    source = replace(build_lib.SOURCE, n_bytes=4, sha256=digest)
    monkeypatch.setattr(build_lib, "SOURCE", source)

    assert [build_lib.is_pinned(path) for path in (right, wrong)] == [True, False]


def test_a_record_says_how_the_library_was_built(monkeypatch, tmp_path):
    """
    With the flags of the user, and without folders of this machine.
    """
    monkeypatch.setenv("PYLLAMA_RAW_CMAKE_ARGS", "-DGGML_CUDA=ON")
    library = build_lib.Library(tmp_path, tmp_path, tmp_path, bundled=True)

    record = build_lib.record(library)

    assert list(record) == [
        *("llama.cpp", "mended", "cpu", "compiler", "configure", "build"),
    ]
    assert record["llama.cpp"] == (
        f"{build_lib.LLAMA_COMMIT}, in {build_lib.SOURCE.filename}"
    )
    assert (record["mended"], record["cpu"]) == ("no", "native")
    assert record["configure"].startswith("cmake -S llama.cpp -B build -G Ninja ")
    assert "-DCMAKE_PROJECT_ggml_INCLUDE=scripts/amx.cmake " in record["configure"]
    assert record["configure"].endswith(" -DGGML_CUDA=ON")
    assert record["build"] == "cmake --build build --target llama mtmd"
    assert str(build_lib.ROOT) not in str(record)


def test_finished_build_is_taken_from_the_cache(tmp_path):
    """
    A build that carries its mark is used; nothing is downloaded or compiled.
    """
    home = make_built(build_lib.home_of_build())

    library = build_lib.find_or_build()

    assert (library.prefix, library.bundled) == (home, True)


@pytest.mark.parametrize("name", ["done", f"lib/libllama.{SUFFIX}"])
def test_a_library_of_which_files_are_missing_is_built_anew(
    monkeypatch, tmp_path, name
):
    """
    Programs that empty caches take files by their age, one by one.
    """
    home = make_built(build_lib.home_of_build())
    (home / name).unlink()
    built: list[Path] = []
    monkeypatch.setattr(build_lib, "_build_into", built.append)

    needs_source = build_lib.needs_source()
    build_lib.find_or_build()

    assert (needs_source, built) == (True, [home])


@pytest.mark.skipif(sys.platform != "linux", reason="ELF says how long a file is")
def test_a_library_that_is_cut_short_is_built_anew(monkeypatch):
    """
    It would be copied beside the extension each time, and end the process that loads it.
    """
    home = make_built(build_lib.home_of_build())
    content = Path(sys.executable).resolve().read_bytes()  # a file of ELF, too
    library = home / "lib" / f"libllama.{SUFFIX}"
    library.write_bytes(content)
    was_built = build_lib.is_built(home)
    library.write_bytes(content[:-1])

    assert (was_built, build_lib.is_built(home)) == (True, False)


def test_a_build_that_was_killed_leaves_nothing_for_good(monkeypatch, tmp_path):
    """
    The next build of the same library takes its folder away, and no other's.
    """
    home = build_lib.home_of_build()
    left = home.parent / f".build-{home.name}-xyz" / "work"
    other = home.parent / ".build-0123456789abcdef-xyz"
    left.mkdir(parents=True)
    other.mkdir()
    monkeypatch.setattr(build_lib.toolchain, "find_tool", lambda _: "no-such-tool")
    monkeypatch.setattr(build_lib, "fetch_source", refuse)

    with pytest.raises(BuildError, match="refused"):
        build_lib.find_or_build()

    lock = home.with_suffix(".lock")
    assert sorted(home.parent.iterdir()) == sorted([other, lock])


@pytest.mark.parametrize("other", ["file", "folder"])
def test_a_build_takes_the_place_of_what_is_none(monkeypatch, tmp_path, other):
    """
    Whatever stands there; and a source of the user may lack its licence.
    """
    tree = make_source_that_fits(tmp_path / "llama.cpp")
    monkeypatch.setenv("PYLLAMA_RAW_SOURCE", str(tree))
    home = build_lib.home_of_build()
    if other == "folder":
        (home / "lib").mkdir(parents=True)
    else:
        home.parent.mkdir(parents=True)
        home.touch()

    def install(*command: str, **_: object) -> None:
        if "--install" in command:
            make_prefix(Path(command[-1]))

    monkeypatch.setattr(build_lib.toolchain, "run", install)
    monkeypatch.setattr(build_lib.toolchain, "find_tool", lambda _: "no-such-tool")

    library = build_lib.find_or_build()

    assert (library.prefix, build_lib.is_built(home)) == (home, True)
    assert not list(library.lib.glob("LICENSE.*"))


def refuse(*_: object, **__: object) -> None:
    """In the place of a step of the build."""
    raise BuildError("refused")


@pytest.mark.parametrize("place", ["", "lib", "download"])
def test_a_cache_that_cannot_be_written_is_named(monkeypatch, tmp_path, place):
    """
    With the variable that names another one, whichever part of it is no folder.
    """
    cache = tmp_path / "cache"
    (cache / place).parent.mkdir(parents=True, exist_ok=True)
    (cache / place).touch()
    monkeypatch.setattr(build_lib.toolchain, "find_tool", lambda _: "no-such-tool")

    with pytest.raises(
        build_lib.fetch.CacheFailed,
        match=rf"cannot write to {cache}.* another folder .* PYLLAMA_RAW_CACHE",
    ):
        build_lib.find_or_build()


def test_a_disk_that_is_full_is_told_from_a_broken_source(monkeypatch, tmp_path):
    """
    Whatever writes into the cache fails with the folder and what to do.
    """

    def fill(_: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(build_lib, "_build_into", fill)

    with pytest.raises(build_lib.fetch.CacheFailed) as caught:
        build_lib.find_or_build()

    assert str(caught.value) == (
        f"cannot write to {tmp_path}/cache/lib: No space left on device. Make room there, "
        "or name another folder for all that is kept by PYLLAMA_RAW_CACHE"
    )


def test_a_damaged_archive_of_the_cache_is_fetched_anew(monkeypatch, tmp_path):
    """
    Its size alone says nothing, as after a crash of the machine, or where somebody put it there.
    """
    (tmp_path / "server").mkdir()
    archive = tmp_path / "server" / "source.tar.gz"
    archive.write_bytes(b"right")
    source = replace(
        build_lib.SOURCE,
        url=archive.as_uri(),
        n_bytes=5,
        sha256=hashlib.sha256(b"right").hexdigest(),
    )
    monkeypatch.setattr(build_lib, "SOURCE", source)
    archive = tmp_path / "cache" / "download" / "source.tar.gz"
    archive.parent.mkdir(parents=True)
    archive.write_bytes(b"wrong")

    assert build_lib.fetch_source() == archive
    assert archive.read_bytes() == b"right"


@pytest.mark.parametrize(
    "variable", ["PYLLAMA_RAW_PREFIX", "PYLLAMA_RAW_SOURCE", "PYLLAMA_RAW_CACHE"]
)
def test_the_home_of_no_user_is_named(monkeypatch, variable):
    """
    As the path that the user gave.
    """
    monkeypatch.setenv(variable, "~no-such-user/x")

    with pytest.raises(
        (BuildError, build_lib.fetch.CacheFailed),
        match=rf"^{variable}=~no-such-user/x.*home directory",
    ):
        build_lib.find_or_build()


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


def test_the_source_is_needed_unless_it_is_there_or_built(monkeypatch, tmp_path):
    """
    scripts/bootstrap fetches it beside other things.
    """
    needs = [build_lib.needs_source()]
    for name in ("PYLLAMA_RAW_PREFIX", "PYLLAMA_RAW_SOURCE"):
        monkeypatch.setenv(name, str(make_source(tmp_path / name)))
        needs.append(build_lib.needs_source())
        monkeypatch.delenv(name)
    make_built(build_lib.home_of_build())

    assert [*needs, build_lib.needs_source()] == [True, False, False, False]


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
    bool({"PYLLAMA_RAW_PREFIX", "PYLLAMA_RAW_CPU"} & set(os.environ)),
    reason="that libllama was built by others, or for a lesser CPU",
)
def test_library_has_amx_where_the_cpu_has_it():
    """
    What was built for this CPU uses its AMX.
    """
    from pyllama_raw.native.libllama import system_info

    cpu_has_it = re.search(r"\bamx_int8\b", build_lib.toolchain.cpu())

    assert ("AMX_INT8 = 1" in system_info()) == (cpu_has_it is not None)
