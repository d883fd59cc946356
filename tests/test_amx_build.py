"""The build compiles ggml's AMX code so that the code works, whatever GCC compiles it."""

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import build_lib


def gcc_version() -> int:
    """The major version of the compiler that builds C++; 0 if that is not GCC."""
    command = [os.environ.get("CXX", "c++"), "-dM", "-E", "-x", "c++", os.devnull]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0
    macros = dict(re.findall(r"#define (\w+) (.+)", done.stdout))
    return 0 if "__clang__" in macros else int(macros.get("__GNUC__", "0"))


pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64"
    or shutil.which("objdump") is None
    or not 11 <= gcc_version() < 14,
    reason="only GCC 11 to 13 knows the CPU and drops stores; objdump reads the code",
)

# As ggml does it: a zeroed struct of 64 bytes, whose fields are set one by one.
TILES = """
#include <cstdint>
#include <immintrin.h>

struct Tiles {
    uint8_t  palette = 0, start = 0, reserved[14] = {0};
    uint16_t bytes[16] = {0};
    uint8_t  rows[16]  = {0};
};

extern "C" void configure() {
    alignas(64) Tiles tiles = {};
    tiles.palette = 1;
    for (int i = 0; i < 8; ++i) {
        tiles.bytes[i] = 64;
        tiles.rows[i]  = i < 4 ? 8 : 16;
    }
    _tile_loadconfig(&tiles);
}
"""
STORE = re.compile(r"\sv?mov\w*\s+\S+,\S*\(%r[bs]p\)")  # into the frame
N_STORES = 4  # zeros, palette, bytes, rows


def make_tree(folder: Path) -> Path:
    """A llama.cpp with nothing in it but AMX code, and the same code in another file."""
    source = folder / "ggml" / "src"
    (source / "ggml-cpu" / "amx").mkdir(parents=True)
    (source / "ggml-cpu" / "amx" / "mmq.cpp").write_text(TILES)
    (source / "ggml-cpu" / "other.cpp").write_text(TILES.replace("configure", "other"))
    (folder / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.14)\n"
        "project(llama.cpp C CXX)\nadd_subdirectory(ggml)\n"
    )
    (folder / "ggml" / "CMakeLists.txt").write_text(
        "project(ggml C CXX)\nadd_subdirectory(src)\n"
    )
    (source / "CMakeLists.txt").write_text(
        "add_library(ggml-cpu OBJECT ggml-cpu/amx/mmq.cpp ggml-cpu/other.cpp)\n"
    )
    return folder


def disassembled(path: Path) -> str:
    command = ["objdump", "-d", "--no-show-raw-insn", str(path)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def n_stores(text: str) -> int:
    """Stores into the frame before the tiles are configured."""
    before, found, _ = text.partition("ldtilecfg")
    assert found
    return len(STORE.findall(before))


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """What cmake_build makes of the two files, for a CPU with AMX."""
    folder = tmp_path_factory.mktemp("amx")
    tree = make_tree(folder / "llama.cpp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXXFLAGS", "-march=sapphirerapids")
        build_lib.cmake_build(
            tree, folder / "work", list(build_lib.CMAKE_FLAGS), ("ggml-cpu",)
        )
    built = {path.name: path for path in (folder / "work").rglob("*.cpp.o")}
    return built["mmq.cpp.o"], built["other.cpp.o"]


def test_all_that_configures_tiles_is_stored(objects):
    """
    ldtilecfg finds all 64 bytes written: no store is removed as dead.
    """
    amx, _ = objects

    assert n_stores(disassembled(amx)) >= N_STORES


def test_other_files_keep_their_optimisation(objects):
    """
    The flags are for AMX files alone: elsewhere GCC removes stores as before.
    """
    _, other = objects

    assert n_stores(disassembled(other)) < N_STORES
