"""Levels of CPUs and variants of a library for any CPU."""

from collections.abc import Iterable
from pathlib import Path

import pytest

import build_lib
from build_lib import BuildError


def test_names_of_levels_are_those_of_variants_too():
    """
    Where a library for any CPU is asked for.
    """
    levels = build_lib.cpu_level

    for name in (*levels.VARIANTS, *levels.LEVELS):
        levels.check_variant(name)


AVX2_MACHINE = "flags : ssse3 sse4_2 popcnt avx avx2 fma f16c bmi2"


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
