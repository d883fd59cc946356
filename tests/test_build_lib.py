"""Finding, keying and describing the native library; nothing is compiled here."""

import errno
import fcntl
import hashlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

import build_lib
from build_lib import BuildError
from scripts import llama_source
from tests.support.limits import LIMIT_S

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
    write_headers(folder / "include", build_lib.HEADERS)
    for name in build_lib.LIBRARIES:
        (folder / "lib" / f"lib{name}.{SUFFIX}").touch()
    return folder


def make_built(home: Path) -> Path:
    """A library of the cache, as far as names go."""
    make_prefix(home)
    (home / "done").touch()
    return home


def write_headers(folder: Path, names: Iterable[str]) -> None:
    """Headers that declare what we use: all of it in llama.h."""
    for name in names:
        (folder / name).touch()
    if (folder / "llama.h").exists():
        text = build_lib.USED.read_text()
        (folder / "llama.h").write_text(re.sub(r"(#define \w+) \.\.\.", r"\1 1", text))


def make_source_that_fits(folder: Path) -> Path:
    """A llama.cpp source tree with headers only."""
    places = {"l": "include", "g": "ggml/include", "m": "tools/mtmd"}
    for name in build_lib.HEADERS:
        place = folder / places[name[0]]
        place.mkdir(parents=True, exist_ok=True)
        write_headers(place, [name])
    return folder


def forbidden(*_: object, **__: object) -> None:
    """In the place of what takes minutes."""
    pytest.fail("this must not be reached")


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


def test_debians_folder_of_libraries_is_known(monkeypatch, tmp_path):
    """
    What a package of the system installs is in a folder of its machine.
    """
    prefix = make_prefix(tmp_path / "prefix")
    (prefix / "lib").rename(tmp_path / "of-machine")
    (prefix / "lib").mkdir()
    (tmp_path / "of-machine").rename(prefix / "lib" / "x86_64-linux-gnu")
    monkeypatch.setattr(
        build_lib.sysconfig, "get_config_var", {"MULTIARCH": "x86_64-linux-gnu"}.get
    )

    library = build_lib.installed_at(prefix)

    assert library.lib == prefix / "lib" / "x86_64-linux-gnu"


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


OTHER = [  # what another version has, and how that is said
    ("llama_vocab_bos", "llama_vocab_of", "missing: function llama_vocab_bos"),
    (
        "#define LLAMA_DEFAULT_SEED",
        "#define OTHER",
        "missing: constant LLAMA_DEFAULT_SEED",
    ),
    (
        "int32_t llama_vocab_n_tokens(",
        "int64_t llama_vocab_n_tokens(",
        "changed: function llama_vocab_n_tokens",
    ),
    ("    bool no_host;", "", "changed: struct llama_model_params has no bool no_host"),
    (
        "    bool no_host;",
        "    int no_host;",
        "changed: struct llama_model_params has no bool no_host",
    ),
    (
        "LLAMA_VOCAB_TYPE_SPM,",
        "",
        "changed: enum llama_vocab_type has no LLAMA_VOCAB_TYPE_SPM",
    ),
    (
        "typedef int32_t llama_token;",
        "typedef int64_t llama_token;",
        "changed: typedef llama_token",
    ),
]


@pytest.mark.parametrize(
    ("variable", "other"),
    [
        *(("PYLLAMA_RAW_PREFIX", other) for other in OTHER),
        ("PYLLAMA_RAW_SOURCE", OTHER[0]),
    ],
)
def test_another_version_is_refused_by_its_headers(
    monkeypatch, tmp_path, variable, other
):
    """
    What is missing or changed is named before anything runs, with what to do.
    """
    old, new, line = other
    is_prefix = variable == "PYLLAMA_RAW_PREFIX"
    make = make_prefix if is_prefix else make_source_that_fits
    folder = make(tmp_path / "other")
    header = folder / "include" / "llama.h"
    text = header.read_text()
    assert old in text
    header.write_text(text.replace(old, new))
    monkeypatch.setenv(variable, str(folder))
    monkeypatch.setattr(build_lib.toolchain, "run", forbidden)

    with pytest.raises(BuildError) as caught:
        build_lib.find_or_build()

    assert str(caught.value) == (
        f"{variable}={folder} is another llama.cpp than {build_lib.LLAMA_COMMIT}, which "
        f"this version is written for. In its headers is\n  {line}\n"
        f"Name a llama.cpp of {build_lib.LLAMA_COMMIT}, or unset {variable} to build it"
    )


def test_an_older_version_may_lack_what_few_need(tmp_path):
    """
    Whoever needs it is told when it is used; the rest is built.
    """
    tree = make_source_that_fits(tmp_path / "older")
    header = tree / "include" / "llama.h"
    text = header.read_text()
    header.write_text(text.replace("llama_get_causal_attn", "llama_other"))
    folders = [tree / part for part in ("include", "ggml/include", "tools/mtmd")]

    build_lib.check_headers("PYLLAMA_RAW_SOURCE", tree, folders)

    assert "llama_get_causal_attn" in text


def test_a_version_of_long_ago_is_refused_in_few_lines(tmp_path):
    """
    Of hundreds of names the first are shown, and how many more there are.
    """
    tree = make_source_that_fits(tmp_path / "other")
    (tree / "include" / "llama.h").write_text("void llama_print(void);")
    (tree / "tools" / "mtmd" / "mtmd.h").unlink()
    folders = [tree / "include", tree / "ggml" / "include"]

    with pytest.raises(BuildError) as caught:
        build_lib.check_headers("PYLLAMA_RAW_SOURCE", tree, folders)

    lines = str(caught.value).splitlines()
    assert lines[1] == "  missing: header mtmd.h"
    assert len(lines) == build_lib.c_fit.MAX_SHOWN + 3
    assert re.fullmatch(r"  and \d{3} more", lines[-2])


def test_headers_that_only_add_names_fit(tmp_path):
    """
    A newer version that has all we declare is no other version for the compiler.
    """
    prefix = make_prefix(tmp_path / "prefix")
    header = prefix / "include" / "llama.h"
    more = "LLAMA_API void llama_new(void);\nenum llama_more { LLAMA_MORE };\n"
    deprecated = header.read_text().replace(
        "void llama_free(struct llama_context * ctx);",
        'DEPRECATED(LLAMA_API void llama_free(struct llama_context * ctx), "hint");',
    )
    assert "DEPRECATED" in deprecated
    header.write_text(
        deprecated.replace("bool no_host;", "bool no_host; int n;") + more
    )

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


@pytest.mark.parametrize("variable", ["CC", "CXX", "PYLLAMA_RAW_CMAKE_ARGS"])
def test_a_quotation_that_is_not_closed_is_named(monkeypatch, variable):
    """
    With the variable and its text, before anything is built.
    """
    monkeypatch.setenv(variable, "gcc -DNAME='two words")

    with pytest.raises(
        BuildError, match=rf"^{variable}=gcc -DNAME='two words: No closing quotation: "
    ):
        build_lib.find_or_build()


def test_a_compiler_of_no_word_is_the_default(monkeypatch):
    """
    Scripts set variables to nothing, or to a space.
    """
    monkeypatch.delenv("CC", raising=False)
    key = build_lib.build_key()
    monkeypatch.setenv("CC", " ")

    assert build_lib.build_key() == key


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


def test_an_installed_library_that_cannot_be_loaded_is_named(tmp_path):
    """
    No program could use it, as where the driver of its GPU is missing.
    """
    prefix = make_prefix(tmp_path / "prefix")
    library = build_lib.installed_at(prefix)

    with pytest.raises(
        BuildError,
        match=rf"^PYLLAMA_RAW_PREFIX={prefix}: {prefix}/lib/libllama\.\w+ cannot be loaded",
    ):
        build_lib.record(library)


def test_pip_shows_one_line_for_a_mistake(tmp_path):
    """
    No frame of setuptools, for an editable installation neither.
    """
    build = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--build-lib", str(tmp_path)],
        cwd=build_lib.ROOT,
        env=os.environ | {"PYLLAMA_RAW_CPU": "AVX2"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )

    assert build.returncode == 1
    assert build.stderr.splitlines() == [
        "error: PYLLAMA_RAW_CPU=AVX2: there is no such level; levels are native, any, "
        "sse42, avx2, avx512vnni, amx"
    ]


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


@pytest.mark.parametrize("named", [None, "PYLLAMA_RAW_PREFIX", "PYLLAMA_RAW_SOURCE"])
@pytest.mark.parametrize("compiler", ["CC", "CXX"])
def test_a_missing_compiler_is_said_first(monkeypatch, tmp_path, compiler, named):
    """
    Before a download, and before anything is wrong with what the user names.
    """
    monkeypatch.setenv(compiler, "no-such-compiler")
    monkeypatch.setattr(build_lib.fetch, "fetch", forbidden)
    if named:
        monkeypatch.setenv(named, str(tmp_path))

    with pytest.raises(BuildError, match=f"no compiler.*set {compiler}"):
        build_lib.find_or_build()


def test_a_missing_tool_is_said_before_a_download(monkeypatch):
    """
    Nobody waits for the source to learn that cmake is not there.
    """

    def missing(name: str) -> str:
        raise BuildError(f"no {name}")

    monkeypatch.setattr(build_lib.toolchain, "find_tool", missing)
    monkeypatch.setattr(build_lib.fetch, "fetch", forbidden)

    with pytest.raises(BuildError, match="no cmake"):
        build_lib.find_or_build()


def test_bootstrap_ends_where_the_build_cannot_begin(tmp_path):
    """
    Without a compiler nothing is installed first.
    """
    (tmp_path / "scripts").mkdir()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    bootstrap = shutil.copy(
        build_lib.ROOT / "scripts" / "bootstrap", tmp_path / "scripts"
    )
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(
        '#!/bin/sh\necho "$1 $2" | cut -c 1-20 >>calls\n[ "$2" != --key ]\n'
    )
    python.chmod(0o755)

    done = subprocess.run([bootstrap], cwd=tmp_path, check=False, timeout=LIMIT_S)

    calls = (tmp_path / "calls").read_text().splitlines()
    assert (done.returncode, calls[1:]) == (1, ["build_lib.py --key"])


FAKE_PYTHON = """#!/bin/sh
case "$1 $2" in
    "-c "*) exec "{python}" "$@" ;;
    "build_lib.py --key") echo key; exit ;;
    "-VV ") exit ;;
esac
echo "$@" | sed -e "s/.*version-check install/install/" -e "s/ --no-.*//" >>calls
"""
TOOLS = ["build_lib.py --fetch", "install -r .venv/tools.txt"]
BUILT = ["build_lib.py", "install -r .venv/packages.txt"]


def make_checkout(folder: Path) -> Path:
    """A checkout with an environment whose Python notes its calls; returns scripts/bootstrap."""
    for name in ("scripts", ".venv/bin", "pyllama_raw/_ffi"):
        (folder / name).mkdir(parents=True)
    shutil.copy(build_lib.ROOT / "pyproject.toml", folder)
    python = folder / ".venv" / "bin" / "python"
    python.write_text(FAKE_PYTHON.format(python=sys.executable))
    python.chmod(0o755)
    (folder / "pyllama_raw" / "_ffi" / "_llama.abi3.so").touch()
    bootstrap = build_lib.ROOT / "scripts" / "bootstrap"
    return Path(shutil.copy(bootstrap, folder / "scripts"))


def test_an_environment_without_pip_gets_it(tmp_path):
    """
    As uv makes them, under the same name.
    """
    bootstrap = make_checkout(tmp_path)
    (tmp_path / "pip.py").write_text("raise ImportError")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}

    subprocess.run(
        [bootstrap, "--demo"],
        cwd=tmp_path,
        env=environment,
        check=True,
        timeout=LIMIT_S,
    )

    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0] == "-m ensurepip"


@pytest.mark.skipif(shutil.which("flock") is None, reason="without it none waits")
def test_of_two_in_one_checkout_the_second_waits(tmp_path):
    """
    Both would install into one environment.
    """
    bootstrap, calls = make_checkout(tmp_path), tmp_path / "calls"
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    with subprocess.Popen(
        [bootstrap, "--demo"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    ) as second:
        first_line = second.stderr.readline()
        has_begun = calls.exists()
        os.close(folder)  # the first one ends
        second.communicate(timeout=LIMIT_S)

    assert first_line == f"bootstrap: waiting for another one in {tmp_path}\n"
    assert (has_begun, second.returncode, calls.exists()) == (False, 0, True)


def test_a_demo_installs_what_a_program_needs(tmp_path):
    """
    And the model, each once. What tests need is added when it is asked for.
    """
    bootstrap, calls = make_checkout(tmp_path), tmp_path / "calls"

    ran, packages = [], []
    for options in (["--demo"], ["--demo"], []):
        calls.write_text("")
        subprocess.run([bootstrap, *options], cwd=tmp_path, check=True, timeout=LIMIT_S)
        ran.append(sorted(calls.read_text().splitlines()))
        packages.append((tmp_path / ".venv" / "packages.txt").read_text())

    stub = "-m scripts.sync_cdef --write-stub"
    model = "-W ignore -m pyllama_raw.options.models"
    assert ran == [
        sorted([*TOOLS, *BUILT, "install", model]),
        [],
        sorted([*TOOLS, *BUILT, "install", stub]),
    ]
    assert ["pytest" in text for text in packages] == [False, False, True]


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (["--cpu"], 2, "usage: scripts/test --cpu NAME [ARGUMENT OF PYTEST]..."),
        (["--llama"], 2, "usage: scripts/test --llama NAME [ARGUMENT OF PYTEST]..."),
        (
            ["--cpu", "haswel"],
            1,
            "build_lib: PYLLAMA_RAW_CPU=haswel: there is no such variant; variants are x64, "
            "sse42, haswell, alderlake, skylakex, cascadelake, zen4, sapphirerapids, and "
            "sse42, avx2, avx512vnni, amx stand for some of them",
        ),
    ],
)
def test_a_wrong_name_is_refused_before_anything_is_built(
    tmp_path, arguments, code, line
):
    """
    A library for any CPU takes minutes, and another one to go back.
    """
    (tmp_path / "scripts").mkdir()
    tests = shutil.copy(build_lib.ROOT / "scripts" / "test", tmp_path / "scripts")
    bootstrap = tmp_path / "scripts" / "bootstrap"
    bootstrap.write_text("#!/bin/sh\ntouch bootstrapped\n")
    bootstrap.chmod(0o755)
    (tmp_path / "build_lib.py").symlink_to(build_lib.ROOT / "build_lib.py")

    process = subprocess.run(
        [tests, *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )

    assert (process.returncode, process.stderr.splitlines()) == (code, [line])
    assert not (tmp_path / "bootstrapped").exists()


def test_names_of_levels_are_those_of_variants_too():
    """
    Where a library for any CPU is asked for.
    """
    levels = build_lib.cpu_level

    for name in (*levels.VARIANTS, *levels.LEVELS):
        levels.check_variant(name)


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


@pytest.mark.parametrize(("setting", "number"), [("3", 3), ("0", 1), ("", 2), ("x", 2)])
def test_compilers_are_as_many_as_the_user_says(monkeypatch, setting, number):
    """
    By the variable of cmake; else one for each CPU.
    """
    monkeypatch.setattr(build_lib.toolchain, "n_cpus", lambda: 2)
    monkeypatch.setenv("CMAKE_BUILD_PARALLEL_LEVEL", setting)

    assert build_lib.toolchain.n_jobs() == number


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


AVX2_MACHINE = "flags : ssse3 sse4_2 popcnt avx avx2 fma f16c bmi2"
MENDS = (*build_lib.MENDS, *build_lib.MENDS_OF_OLDER)
EACH_MEND = pytest.mark.parametrize("mend", MENDS, ids=range(len(MENDS)))


def make_mended(folder: Path, mend: build_lib.Mend, text: str) -> Path:
    """A source tree with all that is right, but *text* in place of what *mend* makes right."""
    for other in MENDS:
        path = folder / other.file
        path.parent.mkdir(parents=True, exist_ok=True)
        content = text if other == mend else f"a {other.right} b"
        path.write_text((path.read_text() if path.exists() else "") + content + "\n")
    return folder / mend.file


@EACH_MEND
@pytest.mark.parametrize("is_right", [False, True])
def test_a_source_is_mended_once(mend, is_right, tmp_path):
    """
    A later llama.cpp that has the right text is fine as it is.
    """
    path = make_mended(tmp_path, mend, mend.right if is_right else mend.wrong)
    before = build_lib.is_mended(tmp_path)
    build_lib.mend(tmp_path)
    once = path.read_text()
    build_lib.mend(tmp_path)

    assert (before, build_lib.is_mended(tmp_path)) == (is_right, True)
    assert (once.count(mend.right), once.count(mend.wrong)) == (1, 0)
    assert path.read_text() == once


@EACH_MEND
@pytest.mark.parametrize("n_wrong", [0, 2])
def test_a_source_that_cannot_be_mended_is_refused(mend, n_wrong, tmp_path):
    """
    A mend is never lost in silence.
    """
    make_mended(tmp_path, mend, "another text " + mend.wrong * n_wrong)

    with pytest.raises(BuildError, match=r"llama-\S+\.cpp .* change MENDS"):
        build_lib.mend(tmp_path)


@EACH_MEND
def test_a_source_of_the_cache_is_mended_by_a_later_checkout(
    mend, monkeypatch, tmp_path
):
    """
    An earlier one has unpacked it, and had fewer mends.
    """
    monkeypatch.setenv("PYLLAMA_RAW_CACHE", str(tmp_path))
    make_mended(llama_source.home_of(llama_source.WINDOW["before"]), mend, mend.wrong)

    assert build_lib.is_mended(llama_source.tree("before"))


def test_the_pinned_library_is_kept_when_older_ones_are_mended(monkeypatch):
    """
    Its source has what is right, so it is not built anew.
    """
    key = build_lib.build_key()
    monkeypatch.setattr(build_lib, "MENDS_OF_OLDER", ())

    assert build_lib.build_key() == key


def test_a_library_of_the_user_is_not_taken_for_mended(tmp_path):
    """
    Only what was built from a mended source is.
    """
    library = build_lib.installed_at(make_prefix(tmp_path / "prefix"))
    before = library.is_mended
    (library.prefix / build_lib.MENDED).touch()

    assert (before, library.is_mended) == (False, True)


def test_a_level_is_part_of_the_key(monkeypatch):
    """
    Each level has a library of its own; native ones are of one machine.
    """
    monkeypatch.setattr(build_lib.cpu_level, "check_runs", lambda *_: None)
    keys = {build_lib.build_key()}
    for level in ("native", "any", *build_lib.cpu_level.LEVELS):
        monkeypatch.setenv("PYLLAMA_RAW_CPU", level)
        keys.add(build_lib.build_key())

    assert len(keys) == 2 + len(build_lib.cpu_level.LEVELS)


def test_a_wrong_level_is_refused_with_those_there_are(monkeypatch):
    """
    Before anything is fetched or built.
    """
    monkeypatch.setenv("PYLLAMA_RAW_CPU", "avx3")

    with pytest.raises(
        BuildError,
        match="no such level; levels are native, any, sse42, avx2, avx512vnni",
    ):
        build_lib.find_or_build()


def test_a_variant_is_no_level(monkeypatch):
    """
    Both are named by one variable, and the page of CPUs has a table of each.
    """
    levels = build_lib.cpu_level
    monkeypatch.setenv("PYLLAMA_RAW_CPU", "haswell")

    with pytest.raises(levels.CpuLevelError, match="haswell is a variant, which a"):
        levels.level_of_environment(AVX2_MACHINE)
    assert build_lib.cpu_of_library() == "any"
    assert build_lib.build_key("any") == build_lib.build_key(build_lib.cpu_of_library())
    monkeypatch.delenv("PYLLAMA_RAW_CPU")
    assert build_lib.cpu_of_library() == build_lib.chosen_cpu() == "native"


def test_a_level_that_the_machine_cannot_run_is_refused(monkeypatch):
    """
    With what it lacks and what it can run.
    """
    levels = build_lib.cpu_level
    monkeypatch.setenv("PYLLAMA_RAW_CPU", "avx512vnni")

    with pytest.raises(
        levels.CpuLevelError,
        match=r"no avx512_vnni, .*; it can run native, sse42, avx2$",
    ):
        levels.level_of_environment(AVX2_MACHINE)


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("PYLLAMA_RAW_CPU", "avx2"),
        ("PYLLAMA_RAW_SOURCE", "/src/llama.cpp"),
        ("PYLLAMA_RAW_CMAKE_ARGS", "-DGGML_CUDA=ON"),
    ],
)
def test_what_has_no_effect_on_an_installed_library_is_refused(
    monkeypatch, tmp_path, variable, text
):
    """
    Rather than forgotten: a build for a GPU would have none.
    """
    monkeypatch.setattr(build_lib.cpu_level, "check_runs", lambda *_: None)
    monkeypatch.setenv("PYLLAMA_RAW_PREFIX", str(make_prefix(tmp_path / "prefix")))
    monkeypatch.setenv(variable, text)

    with pytest.raises(
        BuildError, match=f"^{variable}={text} has no effect on the library"
    ):
        build_lib.find_or_build()


def test_levels_say_what_cmake_and_kernels_may_use():
    """
    Each option is on or off, because ggml has some on by default.
    """
    levels = build_lib.cpu_level

    assert levels.cmake_flags("native") == []
    assert levels.cmake_flags("sse42") == [
        "-DGGML_NATIVE=OFF",
        "-DGGML_SSE42=ON",
        *(f"-DGGML_{name}=OFF" for name in ("AVX", "AVX2", "FMA", "F16C", "BMI2")),
        *(f"-DGGML_{name}=OFF" for name in ("AVX512", "AVX512_VNNI")),
        *(f"-DGGML_{name}=OFF" for name in ("AMX_TILE", "AMX_INT8")),
    ]
    assert [dict(levels.macros(level)) for level in ("sse42", "avx2", "native")] == [
        {
            "PLR_CPU_LEVEL": '"sse42"',
            "PLR_WITHOUT_AVX2": "1",
            "PLR_WITHOUT_AVX512": "1",
            "PLR_WITHOUT_AMX": "1",
        },
        {
            "PLR_CPU_LEVEL": '"avx2"',
            "PLR_WITHOUT_AVX512": "1",
            "PLR_WITHOUT_AMX": "1",
        },
        {"PLR_CPU_LEVEL": '"native"'},
    ]


def test_a_library_for_any_cpu_has_plug_ins():
    """
    They lie beside the other libraries, and our kernels may use all that a CPU has.
    """
    levels = build_lib.cpu_level

    assert levels.cmake_flags("any") == [
        "-DGGML_NATIVE=OFF",
        "-DGGML_BACKEND_DL=ON",
        "-DGGML_CPU_ALL_VARIANTS=ON",
        "-DCMAKE_INSTALL_BINDIR=lib",
    ]
    assert levels.macros("any") == [("PLR_CPU_LEVEL", '"any"')]


def make_ggml(folder: Path, names: Iterable[str]) -> Path:
    """The part of a llama.cpp that says which variants of CPUs are built."""
    path = folder / "ggml" / "src" / "CMakeLists.txt"
    path.parent.mkdir(parents=True)
    lines = [f"        ggml_add_cpu_backend_variant({name} SSE42)\n" for name in names]
    other = "        ggml_add_cpu_backend_variant(armv8.0_1)\n"
    middle = '    elseif(GGML_SYSTEM_ARCH STREQUAL "ARM")\n'
    path.write_text("".join([*lines, middle, other]))
    return path


def test_variants_that_nobody_needs_are_not_built(tmp_path):
    """
    Those of other machines are left alone.
    """
    names = list(build_lib.cpu_level.VARIANTS)
    expected = make_ggml(tmp_path / "expected", names).read_text()
    path = make_ggml(tmp_path / "source", [names[0], "cannonlake", *names[1:]])

    build_lib.leave_variants_out(tmp_path / "source")

    assert path.read_text() == expected


def test_a_source_without_one_of_our_variants_is_refused(tmp_path):
    """
    A wheel that lacks one would be slow on some CPUs, and nobody would know.
    """
    names = [name for name in build_lib.cpu_level.VARIANTS if name != "zen4"]
    make_ggml(tmp_path, names)

    with pytest.raises(BuildError, match="has no CPU variants zen4: change VARIANTS"):
        build_lib.leave_variants_out(tmp_path)


def test_a_compiler_without_openmp_is_refused(monkeypatch, tmp_path):
    """
    Another machine may have none, so a library for any CPU brings it.
    """
    monkeypatch.setenv("CC", "echo")  # as a compiler that does not know the file

    with pytest.raises(BuildError, match=r"has no libgomp\.so\.1: .*GCC"):
        build_lib.add_openmp(tmp_path)


@pytest.mark.parametrize(
    ("more", "level"),
    [
        ("", "sse42"),
        (" avx512f avx512cd avx512vl avx512dq avx512bw avx512_vnni", "avx2"),
    ],
)
def test_the_lesser_level_is_another_than_the_machines(more, level):
    """
    It is what scripts/test --all builds besides.
    """
    assert build_lib.cpu_level.lesser_level(AVX2_MACHINE + more) == level


def test_a_library_for_another_level_is_refused(monkeypatch):
    """
    When it is loaded: the variable would be without effect.
    """
    from pyllama_raw import _ffi
    from pyllama_raw.errors import LibraryNotBuilt

    monkeypatch.setattr(_ffi, "level_of_environment", lambda: "avx2")
    monkeypatch.setattr(_ffi, "check_runs", lambda _: None)
    monkeypatch.setattr(_ffi, "LEVEL_FILE", "no such file")
    monkeypatch.setenv("PYLLAMA_RAW_CPU", "avx2")

    with pytest.raises(LibraryNotBuilt, match=r"for native, and .*=avx2 says"):
        _ffi.load()
