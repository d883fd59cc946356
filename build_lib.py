"""
Find or build libllama and libmtmd, and describe the extension that links them.

Looked for in this order:
  PYLLAMA_RAW_PREFIX   an installed llama.cpp: headers in include/, libraries in lib/
  PYLLAMA_RAW_SOURCE   a llama.cpp source tree, built with PYLLAMA_RAW_CMAKE_ARGS
  the pinned source    the same llama.cpp this package was written against, with MENDS: from
                       the archive that PYLLAMA_RAW_SOURCE names, from the cache, or from PyPI
PYLLAMA_RAW_CPU builds for a lesser CPU than this one, or for any CPU (_ffi/cpu_level.py). A build
is kept in the user's cache under a key of all that shaped it. Packaging (setup.py) calls this file
before the package can be imported: standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent
FFI_DIR = ROOT / "pyllama_raw" / "_ffi"


def load_by_path(path: Path) -> ModuleType:
    """Run one file of the package without importing the package."""
    spec = importlib.util.spec_from_file_location(f"_by_path_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


fetch = load_by_path(ROOT / "pyllama_raw" / "options" / "fetch.py")
toolchain = load_by_path(ROOT / "scripts" / "toolchain.py")
c_declarations = load_by_path(ROOT / "scripts" / "c_declarations.py")
c_fit = load_by_path(ROOT / "scripts" / "c_fit.py")
cpu_level = load_by_path(FFI_DIR / "cpu_level.py")
loaded = load_by_path(FFI_DIR / "loaded.py")
BuildError: type[Exception] = toolchain.BuildError

# The one place that pins llama.cpp. Raising it is its own commit.
LLAMA_COMMIT = "0c1e57098"
SOURCE = fetch.Artifact(
    project="llama-cpp-python",
    version="0.3.36",
    url="https://files.pythonhosted.org/packages/ec/e9/"
    "e7de2b0463ea3ffbf0ede6cb21b58c1258a8f6521aae45ca773a59fe7cf3/"
    "llama_cpp_python-0.3.36.tar.gz",
    sha256="832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
    n_bytes=76_589_250,
)
SOURCE_FOLDER = PurePosixPath("llama_cpp_python-0.3.36/vendor/llama.cpp")


@dataclass(frozen=True, slots=True)
class Mend:
    """A bug of llama.cpp that is mended in the source before it is built."""

    file: str
    wrong: str  # stands once in the file
    right: str


# prepare() computes where each token of a batch goes, then puts back where each stream
# searches its next cell. v_heads_old has one entry a stream, and s counts the streams of one
# micro-batch. So a batch that ends early, by an abort or for lack of cells, leaves streams of
# micro-batches that were not reached at the place of another stream. Their next token then
# leaves a gap, and sums over cells are made in another order.
MENDS = (
    Mend(
        "src/llama-kv-cache.cpp",
        "head = it->v_heads_old[s];",
        "head = it->v_heads_old[sinfo.strm[s]];",
    ),
)


def _room_for(file: str, n_cells: str) -> Mend:
    """Have *file* compare how many cells a state says it has with *n_cells*, and then make room."""
    first, then = "// single sequence\n", "        seq_rm(dest_seq_id, -1, -1);"
    check = (
        f"        if (cell_count > {n_cells}) {{\n"
        '            LLAMA_LOG_ERROR("%s: not enough cells in kv cache\\n", __func__);\n'
        "            return false;\n"
        "        }\n\n"
    )
    return Mend(file, first + then, first + check + then)


# Versions with states of version 2 make room for as many cells as a state says, so a forged file
# of one takes all memory. Later ones have the right text: the pinned source stays as it was, so these
# are no part of the key of its library.
MENDS_OF_OLDER = (
    _room_for("src/llama-kv-cache.cpp", "cells.size()"),
    _room_for("src/llama-memory-recurrent.cpp", "size"),
)
MENDED = "mended"  # a file of the prefix whose library has all of both

CMAKE_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",
    "-DCMAKE_INSTALL_LIBDIR=lib",
    f"-DCMAKE_INSTALL_RPATH={'@loader_path' if sys.platform == 'darwin' else '$ORIGIN'}",
    "-DLLAMA_BUILD_MTMD=ON",
    "-DMTMD_VIDEO=OFF",  # it gives uploads that are no image or sound to ffmpeg
    *(
        f"-DLLAMA_BUILD_{part}=OFF"
        for part in ("COMMON", "TESTS", "TOOLS", "EXAMPLES", "SERVER", "APP", "UI")
    ),
    "-DLLAMA_OPENSSL=OFF",
)
AMX_FLAGS = ROOT / "scripts" / "amx.cmake"  # read behind project("ggml")
JOINED_FLAGS = ROOT / "scripts" / "joined.cmake"  # read behind project("llama.cpp")
TARGETS = ("llama", "mtmd")
GOMP = "libgomp.so.1"
OLDER_LIBSTDCXX = ROOT / "scripts" / "older_libstdcxx.h"
IN_FRONT = FFI_DIR / "memory" / "huge_pages.h"  # of every C file
WHOLE_HEADERS = ("llama.h", "gguf.h", "mtmd.h", "mtmd-helper.h")  # declared to Python
PART_HEADERS = ("ggml.h", "ggml-backend.h", "ggml-opt.h", "ggml-cpu.h")
HEADERS = (*PART_HEADERS, *WHOLE_HEADERS)
SHIM_HEADERS = (
    *(f"boundary/{name}.h" for name in ("errors", "abort_flag", "loading", "vocab")),
    *(
        "boundary/state.h",
        "boundary/log.h",
        "boundary/adapters.h",
        "boundary/variant.h",
    ),
    *("kernels/kernels.h", "boundary/breakdown.h"),
    *("grammar/grammar.h", "step/sampler.h", "step/step.h", "media/projector.h"),
)
USED = ROOT / "scripts" / "used.h"
LIBRARIES = ("llama", "mtmd", "ggml", "ggml-base")
SOURCE_PARTS = (
    "CMakeLists.txt",
    "cmake",
    "include",
    "src",
    "ggml",
    "vendor",
    "tools/mtmd",
)
SHAPING = ("PYLLAMA_RAW_SOURCE", "PYLLAMA_RAW_CMAKE_ARGS")  # what is built
RECIPE = 1  # raise it when this file builds the same inputs differently


@dataclass(frozen=True, slots=True)
class Library:
    """A prefix holding headers and shared libraries."""

    prefix: Path
    include: Path
    lib: Path
    bundled: bool  # copied next to the extension; else found where the user has it
    cpu: str = cpu_level.NATIVE

    @property
    def is_mended(self) -> bool:
        """Whether the library is known to have MENDS."""
        return (self.prefix / MENDED).is_file()

    @property
    def files(self) -> list[Path]:
        """The shared libraries under the names the loader asks for."""
        found = {path.resolve(): path for path in sorted(self.lib.iterdir())}
        return sorted(_by_soname(path) for path in found if _is_shared(path))


def find_or_build() -> Library:
    """
    Return the library the environment asks for, building it if the cache lacks it.

    Raises:
        BuildError: says what is missing and what to install or set.
    """
    toolchain.check_compilers()
    cpu = chosen_cpu()
    if prefix := os.environ.get("PYLLAMA_RAW_PREFIX"):
        shaping = {name: os.environ.get(name, "").strip() for name in SHAPING}
        shaping[cpu_level.VARIABLE] = "" if cpu == cpu_level.NATIVE else cpu
        for name, text in shaping.items():
            if text:
                raise BuildError(
                    f"{name}={text} has no effect on the library that is "
                    f"installed in PYLLAMA_RAW_PREFIX={prefix}: unset one of both"
                )
        return installed_at(path_of("PYLLAMA_RAW_PREFIX", prefix))
    if tree := named_tree():
        folders = [tree / part for part in ("include", "ggml/include", "tools/mtmd")]
        check_headers("PYLLAMA_RAW_SOURCE", tree, folders)
    home = home_of_build()
    if not is_built(home):
        with (
            fetch.writing(home.parent),
            fetch.locked(home.with_suffix(".lock"), toolchain.say),
        ):
            if not is_built(home):
                _build_into(home)
    return Library(home, home / "include", home / "lib", bundled=True, cpu=cpu)


def home_of_build() -> Path:
    """Where the cache has, or is to have, the library that is built."""
    return Path(fetch.cache_dir() / "lib" / build_key())


def is_built(home: Path) -> bool:
    """
    Whether *home* has a whole library: what empties caches may have taken files of it, and a disk that was
    full parts of them.
    """
    lib = home / "lib"
    if not (home / "done").is_file() or not all(
        _find_library(lib, name) for name in LIBRARIES
    ):
        return False
    return not any(
        loaded.lacks_its_end(path) for path in lib.iterdir() if _is_shared(path)
    )


def needs_source() -> bool:
    """Whether find_or_build() is going to read the archive of the cache."""
    if os.environ.get("PYLLAMA_RAW_PREFIX") or named_source():
        return False
    return not is_built(home_of_build())


def chosen_cpu() -> str:
    """The level of CPUs to build for. Raises BuildError for one that cannot be."""
    try:
        return str(cpu_level.level_of_environment())
    except cpu_level.CpuLevelError as error:
        raise BuildError(str(error)) from None


def cpu_of_library() -> str:
    """The level of the library that this process loads: a variant is one of a library for any CPU."""
    name = os.environ.get(cpu_level.VARIABLE)
    is_variant = name in cpu_level.VARIANTS and name not in cpu_level.LEVELS
    return cpu_level.ANY if is_variant else chosen_cpu()


def installed_at(prefix: Path) -> Library:
    """Check that *prefix* holds what the extension needs, and describe it."""
    include = prefix / "include"
    missing = [name for name in HEADERS if not (include / name).is_file()]
    if missing:
        raise BuildError(
            f"PYLLAMA_RAW_PREFIX={prefix} has no {', '.join(missing)} in {include}: "
            "install llama.cpp with its headers and with LLAMA_BUILD_MTMD=ON there, "
            "or unset PYLLAMA_RAW_PREFIX to build the pinned version"
        )
    check_headers("PYLLAMA_RAW_PREFIX", prefix, [include])
    # Debian has the libraries of each machine in a folder of its own.
    multiarch = sysconfig.get_config_var("MULTIARCH")
    places = ["lib", "lib64", *([f"lib/{multiarch}"] if multiarch else [])]
    for lib in (prefix / place for place in places):
        if all(_find_library(lib, name) for name in LIBRARIES):
            if path := loaded.cut_short(loaded.libraries_in(lib)):
                raise BuildError(
                    f"PYLLAMA_RAW_PREFIX={prefix}: {path} is cut short, as by a full disk: install "
                    "llama.cpp there anew"
                )
            return Library(prefix, include, lib, bundled=False)
    names = ", ".join(f"lib{name}" for name in LIBRARIES)
    raise BuildError(
        f"PYLLAMA_RAW_PREFIX={prefix} has no shared {names} in {' or '.join(places)}: "
        "build llama.cpp with BUILD_SHARED_LIBS=ON and install it there"
    )


def check_headers(variable: str, named: Path, folders: list[Path]) -> None:
    """
    Refuse the llama.cpp in *named* if its headers do not fit the names we use.

    Raises:
        BuildError: lists what is missing and what is declared otherwise.
    """
    lines = [
        f"missing: header {name}"
        for name in HEADERS
        if name not in c_fit.find(HEADERS, folders)
    ]
    misfits = c_fit.misfits(read(USED), declared(HEADERS, folders))
    lines += [line for line in misfits if line not in c_fit.WITHOUT]
    if lines:
        raise BuildError(
            f"{variable}={named} is another llama.cpp than {LLAMA_COMMIT}, which this "
            f"version is written for. In its headers is\n{c_fit.shown(lines)}"
            f"Name a llama.cpp of {LLAMA_COMMIT}, or unset {variable} to build it"
        )


def build_key(cpu: str | None = None) -> str:
    """Name everything that shapes the binary: source, flags, compiler, machine; *cpu* is the level."""
    tree, cpu = named_tree(), cpu or chosen_cpu()
    parts = (
        str(RECIPE),
        str(MENDS),
        f"{_tree_stamp(tree)} {MENDS_OF_OLDER}" if tree else SOURCE.sha256,
        IN_FRONT.read_text(),
        AMX_FLAGS.read_text(),
        JOINED_FLAGS.read_text(),
        *CMAKE_FLAGS,
        *cpu_level.cmake_flags(cpu),
        *(cpu_level.VARIANTS if cpu == cpu_level.ANY else ()),
        # A flag may name a file of this checkout: those of another clone are the same build.
        *(flag.replace(f"{ROOT}{os.sep}", "") for flag in user_flags()),
        *(f"{k}={os.environ.get(k, '')}" for k in ("CFLAGS", "CXXFLAGS", "LDFLAGS")),
        toolchain.compiler("CC", "cc"),
        toolchain.compiler("CXX", "c++"),
        sys.platform,
        toolchain.cpu() if cpu == cpu_level.NATIVE else cpu,
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def user_flags() -> list[str]:
    """What the user adds for cmake; a GPU toolkit then stays findable at run time."""
    flags = toolchain.words("PYLLAMA_RAW_CMAKE_ARGS")
    return ["-DCMAKE_INSTALL_RPATH_USE_LINK_PATH=ON", *flags] if flags else []


def named_source() -> Path | None:
    """What PYLLAMA_RAW_SOURCE names: a source tree, or the archive of the pinned source."""
    name = os.environ.get("PYLLAMA_RAW_SOURCE")
    return path_of("PYLLAMA_RAW_SOURCE", name) if name else None


def path_of(variable: str, name: str) -> Path:
    """The path that an environment variable names. Raises BuildError."""
    try:
        return Path(name).expanduser().resolve()
    except (OSError, RuntimeError) as error:  # the folder of no user, links in a circle
        raise BuildError(f"{variable}={name} names no path: {error}") from None


def named_tree() -> Path | None:
    """
    The source tree that PYLLAMA_RAW_SOURCE names; None: the pinned source is built.

    Raises:
        BuildError: it names neither a tree nor the archive of the pinned source.
    """
    path = named_source()
    if path is None or (path.is_file() and is_pinned(path)):
        return None
    if path.is_file():
        raise BuildError(
            f"PYLLAMA_RAW_SOURCE={path} is not {SOURCE.filename}: the archive of the pinned "
            f"llama.cpp has {SOURCE.n_bytes} bytes with sha256 {SOURCE.sha256}. Unpack "
            "another one and name its folder"
        )
    if not (path / "include" / "llama.h").is_file():
        raise BuildError(
            f"PYLLAMA_RAW_SOURCE={path} is not a llama.cpp source tree: "
            "it has no include/llama.h"
        )
    return path


def is_pinned(archive: Path) -> bool:
    """Whether *archive* is the pinned source, whatever its name is."""
    return bool(fetch.is_whole(archive, SOURCE))


def _tree_stamp(tree: Path) -> str:
    """Hash of names, sizes and times: an edited tree is built anew."""
    digest = hashlib.sha256(str(tree).encode())
    for part in SOURCE_PARTS:
        for path in sorted([tree / part, *(tree / part).rglob("*")]):
            if path.is_file():
                stat = path.stat()
                digest.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
    return digest.hexdigest()


def _build_into(home: Path) -> None:
    """Build in a temporary folder and move the finished prefix to *home*."""
    started = time.monotonic()
    prefix = f".build-{home.name}-"
    for left in home.parent.glob(
        f"{prefix}*"
    ):  # by a build that was killed: we hold the lock
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=home.parent, prefix=prefix) as scratch:
        folder = Path(scratch)
        for tool in ("cmake", "ninja"):
            toolchain.find_tool(tool)  # before minutes of downloading
        named = named_tree()
        tree = named or unpack_source(folder / "llama.cpp")
        if not named:
            mend(tree)
        prefix, work, cpu = folder / "prefix", folder / "work", chosen_cpu()
        if cpu == cpu_level.ANY and not named:
            leave_variants_out(tree)
        toolchain.say(
            f"building libllama and libmtmd from {named or 'llama.cpp ' + LLAMA_COMMIT}"
        )
        shutil.copy(IN_FRONT, folder)  # the build sees no folder of this checkout
        cmake_build(
            tree,
            work,
            [*CMAKE_FLAGS, *cpu_level.cmake_flags(cpu), *user_flags()],
            TARGETS,
            c_flags=shlex.join(["-include", str(folder / IN_FRONT.name)]),
        )
        toolchain.run(
            toolchain.find_tool("cmake"),
            "--install",
            str(work),
            "--prefix",
            str(prefix),
            *(["--strip"] if cpu == cpu_level.ANY else []),
        )
        if cpu == cpu_level.ANY:
            add_openmp(prefix / "lib")
        if (tree / "LICENSE").is_file():  # a tree of the user may lack it
            shutil.copy(tree / "LICENSE", prefix / "lib" / "LICENSE.llama.cpp")
        if is_mended(tree):
            (prefix / MENDED).touch()
        (prefix / "done").write_text(f"{time.monotonic() - started:.0f} s\n")
        _remove(home)
        prefix.rename(home)
    toolchain.say(f"built in {time.monotonic() - started:.0f} s, kept in {home}")


def _remove(path: Path) -> None:
    """Take away what stands where a library is to be, whatever it is."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def unpack_source(target: Path) -> Path:
    """Unpack the llama.cpp of the pinned source as *target*; fetch it if nobody names it."""
    with tarfile.open(named_source() or fetch_source()) as tar:
        for member in tar:
            name = PurePosixPath(member.name)
            if not (member.isfile() and name.is_relative_to(SOURCE_FOLDER)):
                continue
            path = target / name.relative_to(SOURCE_FOLDER)
            if ".." in name.parts or path.name == ".git":
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            content = tar.extractfile(member)
            assert content is not None
            with path.open("wb") as file:
                shutil.copyfileobj(content, file)
    return target


def fetch_source() -> Path:
    """The archive of the pinned source in the cache, downloaded if it is not there."""
    progress = toolchain.DownloadLines(SOURCE.n_bytes)
    return Path(fetch.fetch(SOURCE, fetch.cache_dir() / "download", progress))


def mend(tree: Path) -> None:
    """
    Mend the llama.cpp in *tree*, which is ours.

    Raises:
        BuildError: its text has neither what is wrong nor what is right.
    """
    for one in (*MENDS, *MENDS_OF_OLDER):
        path = tree / one.file
        text = path.read_text("utf-8") if path.is_file() else ""
        if text.count(one.wrong) == 1:
            path.write_text(text.replace(one.wrong, one.right), "utf-8")
        elif one.right not in text:
            raise BuildError(
                f"{one.file} of llama.cpp {LLAMA_COMMIT} has neither {one.wrong!r} once "
                f"nor {one.right!r}: look whether it is mended otherwise, and change "
                "MENDS in build_lib.py"
            )


def is_mended(tree: Path) -> bool:
    """Whether the llama.cpp in *tree*, of anybody, has the text of all mends."""
    paths = [(tree / one.file, one) for one in (*MENDS, *MENDS_OF_OLDER)]
    return all(
        path.is_file() and one.right in path.read_text("utf-8", "replace")
        for path, one in paths
    )


def leave_variants_out(tree: Path) -> None:
    """
    Take the variants of CPUs that we do not ship out of the llama.cpp in *tree*, which is ours.

    ggml has no option for that. Raises BuildError: it does not have all that we ship.
    """
    path = tree / "ggml" / "src" / "CMakeLists.txt"
    text = path.read_text("utf-8")
    x86, behind, rest = text.partition('elseif(GGML_SYSTEM_ARCH STREQUAL "ARM")')
    line = re.compile(r"^ *ggml_add_cpu_backend_variant\((\w+).*\)\n", re.MULTILINE)
    missing = set(cpu_level.VARIANTS) - set(line.findall(x86))
    if missing:
        raise BuildError(
            f"llama.cpp {LLAMA_COMMIT} has no CPU variants {', '.join(sorted(missing))}: "
            "change VARIANTS in pyllama_raw/_ffi/cpu_level.py"
        )
    x86 = line.sub(lambda one: one[0] if one[1] in cpu_level.VARIANTS else "", x86)
    path.write_text(x86 + behind + rest, "utf-8")


def add_openmp(lib: Path) -> None:
    """
    Copy GCC's OpenMP into *lib* under its own name, with its licence if the system has it.

    Other machines may lack it. `_ffi/openmp.py` looks for it by that name. Raises BuildError.
    """
    command = [*(toolchain.words("CC") or ["cc"]), f"-print-file-name={GOMP}"]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    path = Path(said.strip())
    if not path.is_absolute():  # the compiler repeats a name that it does not know
        raise BuildError(
            f"{command[0]} has no {GOMP}: build for any CPU with GCC and its OpenMP "
            "(Debian: apt install libgomp1)"
        )
    shutil.copyfile(path.resolve(), lib / GOMP)
    licence = Path("/usr/share/doc/libgomp1/copyright")
    if licence.is_file():
        shutil.copyfile(licence, lib / "LICENSE.libgomp")


def cmake_build(
    tree: Path,
    work: Path,
    flags: list[str],
    targets: tuple[str, ...],
    c_flags: str = "",
) -> None:
    """Configure *tree* in *work* and build *targets*."""
    # Assertions of llama.cpp print file names: keep this machine's folders out of them.
    prefix_map = shlex.quote(f"-ffile-prefix-map={tree}=llama.cpp")
    env = dict(os.environ)
    for variable, own in ("CFLAGS", c_flags), ("CXXFLAGS", ""):
        given = env.get(variable, "")
        env[variable] = f"{given} {prefix_map} {own}".strip()
    cmake, ninja = toolchain.find_tool("cmake"), toolchain.find_tool("ninja")
    configure = ["-S", str(tree), "-B", str(work), f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    toolchain.run(cmake, *configure, *fixed_flags(), *flags, env=env)
    n_jobs = str(toolchain.n_jobs())
    toolchain.run(
        cmake, "--build", str(work), "-j", n_jobs, "--target", *targets, env=env
    )


def fixed_flags() -> list[str]:
    """Flags of cmake that no variable changes."""
    flags = ["-G", "Ninja", f"-DCMAKE_PROJECT_ggml_INCLUDE={AMX_FLAGS}"]
    if named_tree():
        return flags  # that source has a version, and perhaps other files of models
    return [
        *flags,
        f"-DLLAMA_BUILD_COMMIT={LLAMA_COMMIT}",
        "-DLLAMA_BUILD_NUMBER=0",
        f"-DCMAKE_PROJECT_llama.cpp_INCLUDE={JOINED_FLAGS}",
    ]


def record(library: Library) -> dict[str, str]:
    """
    What a library was built from and how: setup.py keeps it beside the extension.

    `pyllama-raw info --build` shows it. `version` is compared with that of the library that is
    loaded, where an installed one may have changed since (_ffi/__init__.py).
    """
    if not library.bundled:
        path = _by_soname(
            (_find_library(library.lib, "llama") or library.lib).resolve()
        )
        return {
            "llama.cpp": f"installed in {library.prefix}",
            "library": str(path),
            "version": _version_of(path, library.prefix),
        }
    tree = named_tree()
    flags = [*fixed_flags(), *CMAKE_FLAGS, *cpu_level.cmake_flags(library.cpu)]
    command = shlex.join(
        ["cmake", "-S", "llama.cpp", "-B", "build", *flags, *user_flags()]
    )
    return {
        "llama.cpp": str(tree) if tree else f"{LLAMA_COMMIT}, in {SOURCE.filename}",
        "mended": "yes" if library.is_mended else "no",
        "cpu": library.cpu,
        "compiler": toolchain.compiler("CXX", "c++").partition("] ")[2],
        # Folders of this machine are nobody's business, and say nothing.
        "configure": command.replace(f"{ROOT}{os.sep}", ""),
        "build": shlex.join(["cmake", "--build", "build", "--target", *TARGETS]),
    }


def _version_of(path: Path, prefix: Path) -> str:
    try:
        return str(loaded.version_of(path))
    except OSError as error:
        raise BuildError(
            f"PYLLAMA_RAW_PREFIX={prefix}: {path} cannot be loaded, so no program could use "
            f"it: {error}"
        ) from None


def _find_library(folder: Path, name: str) -> Path | None:
    suffix = "dylib" if sys.platform == "darwin" else "so"
    path = folder / f"lib{name}.{suffix}"
    return path if path.exists() else None


def _is_shared(path: Path) -> bool:
    return path.is_file() and bool(re.search(r"\.(so|dylib)\b", path.name))


def _by_soname(path: Path) -> Path:
    """The link a program linked against *path* loads: libx.so.0 of libx.so.0.1.2."""
    pattern = r"lib[^.]+(\.so(\.\d+)?|(\.\d+)?\.dylib)"
    links = [
        link
        for link in path.parent.iterdir()
        if link.resolve() == path and re.fullmatch(pattern, link.name)
    ]
    return max(links, key=lambda link: len(link.name), default=path)


def macros(library: Library) -> list[tuple[str, str]]:
    """What our C++ has to know of *library*."""
    return [
        ("PLR_IS_MENDED", str(int(library.is_mended))),
        *c_fit.without(read(USED), declared(HEADERS, [library.include])),
        *cpu_level.macros(library.cpu),
    ]


def ffibuilder(library: Library) -> Any:
    """Describe the extension: cffi API mode, C++, stable ABI of Python 3.11."""
    from cffi import FFI  # a build requirement, absent when only building the library

    is_for_any = library.cpu == cpu_level.ANY
    ffi = FFI()
    ffi.cdef(c_declarations.render(seen_by_python([library.include])))
    ffi.set_source(
        "pyllama_raw._ffi._llama",
        "".join(f'#include "{name}"\n' for name in (*SHIM_HEADERS, *HEADERS))
        # A thousand wrappers of calls gain nothing by -O3, which takes twice as long.
        + '#ifndef __clang__\n#pragma GCC optimize "O1"\n#endif\n',
        source_extension=".cpp",
        sources=sources(),
        include_dirs=[str(FFI_DIR), str(library.include)],
        library_dirs=[str(library.lib)],
        libraries=list(LIBRARIES),
        # Python compiles with -fwrapv, under which g++ makes vectors of few loops.
        extra_compile_args=[
            *("-std=c++17", "-O3", "-fno-wrapv", "-g0"),
            "-Wno-deprecated-declarations",
            # Headers of g++ 12 begin vectors of AVX-512 with themselves, on purpose.
            *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),
            *(["-include", str(OLDER_LIBSTDCXX)] if is_for_any else []),
        ],
        extra_link_args=[
            f"-Wl,-rpath,{rpath(library)}",
            *(["-Wl,--strip-all"] if is_for_any else []),
        ],
        define_macros=[
            ("Py_LIMITED_API", "0x030b0000"),
            *macros(library),
        ],
        py_limited_api=True,
    )
    return ffi


def kept_extension(library: Library) -> Path | None:
    """
    Where the cache keeps, or is to keep, the extension made of the files as they are.

    None beside a library that is not of the cache: it may change under its name.
    """
    if not library.bundled:
        return None
    from cffi import __version__ as cffi_version

    digest = hashlib.sha256(f"{cffi_version}\0{sys.version}".encode())
    makers = [
        Path(__file__),
        ROOT / "setup.py",
        USED,
        OLDER_LIBSTDCXX,
        Path(cpu_level.__file__),
        *(ROOT / "scripts").glob("c_*.py"),
    ]
    for path in sorted([*makers, *map(Path, sources()), *FFI_DIR.rglob("*.h")]):
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    return library.prefix / "extension" / f"{digest.hexdigest()[:16]}.so"


def sources() -> list[str]:
    """The C++ files of the shim; in lib/ lies a licence that ends like one."""
    found = sorted(FFI_DIR.glob("*/*.cpp"))
    return [str(path) for path in found if path.parent.name != "lib"]


def seen_by_python(folders: list[Path]) -> dict[tuple[str, str], tuple[str, ...]]:
    """
    What the extension declares of the headers in *folders*, and the shim.

    Of ggml that is what we use and what the other headers name. Deprecated functions are
    left out unless we use them.
    """
    used, known = read(USED), declared(HEADERS, folders)
    whole = declared(WHOLE_HEADERS, folders)
    seen = c_declarations.needed({name for _, name in (*used, *whole)}, known)
    found = {}
    for (kind, name), parts in seen.items():
        if kind != "deprecated":
            found[kind, name] = parts
        elif ("function", name) in used:
            found["function", name] = parts
    for name in SHIM_HEADERS:
        found |= read(FFI_DIR / name)
    return found


def declared(
    names: Iterable[str], folders: list[Path]
) -> dict[tuple[str, str], tuple[str, ...]]:
    """
    What those of the headers *names* declare that are in *folders*.

    The CPU backend may be a plug-in that nothing links: its functions are not there.
    """
    return {
        key: parts
        for name, path in c_fit.find(names, folders).items()
        for key, parts in read(path).items()
        if name != "ggml-cpu.h" or key[0] != "function"
    }


def read(header: Path) -> dict[tuple[str, str], tuple[str, ...]]:
    """The declarations of one header."""
    return c_declarations.parse(header.read_text("utf-8", "replace"))


def rpath(library: Library) -> str:
    """Where the extension looks for the libraries: beside itself, or in the prefix."""
    if not library.bundled:
        return str(library.lib)
    return "@loader_path/lib" if sys.platform == "darwin" else "$ORIGIN/lib"


def main() -> None:
    """Build the library into the cache; with --inplace, the extension as well."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "--inplace", action="store_true", help="build the extension too"
    )
    parser.add_argument("--key", action="store_true", help="print the cache key only")
    parser.add_argument(
        "--fetch",
        action="store_true",
        help="only fetch the source, where a build is going to need it",
    )
    parser.add_argument(
        "--lesser-cpu",
        action="store_true",
        help="print a lesser level of CPUs than this machine's, if it has one",
    )
    parser.add_argument(
        "--variant",
        metavar="NAME",
        help="only refuse a name that no variant of a library for any CPU has",
    )
    options = parser.parse_args()
    if options.lesser_cpu:
        print(cpu_level.lesser_level() or "")
        return
    try:
        if options.variant is not None:
            cpu_level.check_variant(options.variant)
            return
        toolchain.check_compilers()
        if options.key:
            print(os.environ.get("PYLLAMA_RAW_PREFIX") or build_key())
            return
        if options.fetch:
            if needs_source():
                fetch_source()
            return
        print(find_or_build().prefix)
    except (BuildError, cpu_level.CpuLevelError, OSError) as error:
        raise SystemExit(f"build_lib: {error}") from None
    if options.inplace:
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        raise SystemExit(subprocess.run(command, cwd=ROOT, check=False).returncode)


if __name__ == "__main__":
    main()
