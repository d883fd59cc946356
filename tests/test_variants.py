"""Which variant of the CPU code computes, by scores and by PYLLAMA_RAW_CPU."""

import re

import pytest

from pyllama_raw import _ffi
from pyllama_raw._ffi import Variant, choose_variant, use_variant, variant_files
from pyllama_raw._ffi.cpu_level import LEVELS, VARIANT_OF_LEVEL, VARIANTS
from pyllama_raw.errors import ConfigError, LibraryNotBuilt

# As a CPU with AVX2 and AVX-VNNI gives them.
SCORES = {
    "alderlake": 128,
    "haswell": 64,
    "sapphirerapids": 0,
    "sse42": 5,
    "zen4": 0,
}


class FakeLibrary:
    """The functions of the shim: scores by file name, and what was done."""

    def __init__(self, scores: dict[str, int], *, loads: bool = True) -> None:
        self.scores = scores
        self.loads = loads
        self.calls: list[tuple[str, object]] = []

    def plr_variant_score(self, path: bytes) -> int:
        name = re.search(r"cpu-(\w+)\.so", path.decode())
        assert name is not None
        return self.scores[name[1]]

    def plr_cpu_only(self, *sets: bool) -> None:
        self.calls.append(("only", sets))

    def plr_variant_use(self, path: bytes) -> bool:
        self.calls.append(("use", path.decode().rpartition("/")[2]))
        return self.loads


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """What a wheel has beside its extension."""
    monkeypatch.delenv("PYLLAMA_RAW_CPU", raising=False)
    names = [f"libggml-cpu-{name}.so" for name in SCORES]
    for name in (*names, "libggml-base.so.0", "libggml.so.0", "libgomp.so.1"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize("wish", [None, "", "native", "any"])
def test_the_best_score_computes(wish):
    """
    Those that score 0 cannot run.
    """
    assert choose_variant(SCORES, wish) == Variant(
        "alderlake", "best score of the 3 that this CPU runs"
    )


@pytest.mark.parametrize(
    ("wish", "name"), [("haswell", "haswell"), ("avx2", "haswell"), ("sse42", "sse42")]
)
def test_a_lesser_one_can_be_chosen(wish, name):
    """
    By its name, or by the level that it stands for.
    """
    assert choose_variant(SCORES, wish) == Variant(
        name, f"PYLLAMA_RAW_CPU={wish}; the best one here is alderlake"
    )


@pytest.mark.parametrize(
    ("wish", "problem"),
    [
        ("pentium", "this library has no such variant"),
        ("zen4", "this CPU lacks instructions of it"),
        ("amx", "this CPU lacks instructions of it"),
    ],
)
def test_what_cannot_run_is_refused_with_what_can(wish, problem):
    """
    Nothing runs as something else than was asked for.
    """
    with pytest.raises(ConfigError) as caught:
        choose_variant(SCORES, wish)

    assert str(caught.value) == (
        f"PYLLAMA_RAW_CPU={wish}: {problem}; here run sse42, haswell, alderlake "
        "(or sse42, avx2), and without PYLLAMA_RAW_CPU the best of them computes"
    )


def test_files_that_are_missing_are_said():
    """
    A whole wheel has a variant for each CPU that has SSE4.2. What fits older ones is said, too.
    """
    with pytest.raises(LibraryNotBuilt) as caught:
        choose_variant({"zen4": 0})

    assert str(caught.value) == (
        "none of the CPU variants zen4 runs on this CPU: a whole wheel has one for each that has "
        "SSE4.2 (x86-64-v2); `pip install --no-binary pyllama_raw pyllama_raw`, or "
        "`pip install .` in the source tree, builds for this one"
    )


def test_variants_are_found_by_their_names(folder):
    """
    Other libraries lie beside them; a linked library has none.
    """
    paths = variant_files(folder)
    for path in paths.values():
        path.unlink()

    assert paths == {name: folder / f"libggml-cpu-{name}.so" for name in SCORES}
    assert variant_files(folder) == {}


def test_our_kernels_use_all_of_the_cpu_beside_the_best_one(folder):
    """
    Nobody chose to do without.
    """
    library = FakeLibrary(SCORES)

    variant = use_variant(folder, library)

    assert variant is not None
    assert (variant.name, library.calls) == (
        "alderlake",
        [("use", "libggml-cpu-alderlake.so")],
    )


def test_our_kernels_do_without_what_a_lesser_one_lacks(folder, monkeypatch):
    """
    So the process computes what a lesser machine would. They are told before it is loaded.
    """
    monkeypatch.setenv("PYLLAMA_RAW_CPU", "haswell")
    library = FakeLibrary(SCORES)

    use_variant(folder, library)

    assert library.calls == [
        ("only", (True, False, False, False)),
        ("use", "libggml-cpu-haswell.so"),
    ]


def test_a_linked_library_is_left_alone(tmp_path):
    """
    It has no variants: nothing is called.
    """
    assert use_variant(tmp_path, FakeLibrary({})) is None


def test_a_library_for_any_cpu_without_variants_is_refused(tmp_path):
    """
    Nothing would compute: without their files it has no CPU backend.
    """
    (tmp_path / "cpu-level").write_text("any\n")

    with pytest.raises(LibraryNotBuilt, match=rf"^{tmp_path} has no libggml-cpu-\*"):
        use_variant(tmp_path, FakeLibrary({}))


@pytest.mark.parametrize("level", ["", "avx10"])
def test_a_library_of_an_unknown_level_is_refused(monkeypatch, tmp_path, level):
    """
    Its file is damaged, or another version of pyllama_raw wrote it.
    """
    (tmp_path / "cpu-level").write_text(level)
    monkeypatch.setattr(_ffi, "LIBRARIES", tmp_path)
    monkeypatch.setattr(_ffi, "_has_extension", lambda _: True)

    with pytest.raises(LibraryNotBuilt, match=f"cpu-level has '{level}', which is no"):
        _ffi.load()


@pytest.mark.parametrize("text", ['{"llama.cpp": "0c1e', "[1]"])
def test_a_damaged_record_is_said(monkeypatch, tmp_path, text):
    """
    By what loads the library, and by what only tells how it was built.
    """
    (tmp_path / "build.json").write_text(text)
    monkeypatch.setattr(_ffi, "LIBRARIES", tmp_path)
    monkeypatch.setattr(_ffi, "_has_extension", lambda _: True)

    for read in (_ffi.load, _ffi.build_record):
        with pytest.raises(LibraryNotBuilt, match=r"/build\.json is damaged \(.*anew"):
            read()


def test_a_damaged_file_is_said(folder):
    """
    ggml refuses it, and its log says why.
    """
    with pytest.raises(LibraryNotBuilt, match=r"alderlake\.so cannot be loaded"):
        use_variant(folder, FakeLibrary(SCORES, loads=False))


def test_each_level_has_a_variant_that_uses_its_instructions():
    """
    The names of builds for one level go on to be understood.
    """
    assert list(VARIANT_OF_LEVEL) == list(LEVELS)
    assert [VARIANTS[name][-1:] for name in VARIANT_OF_LEVEL.values()] == [
        (),
        ("avx2",),
        ("avx512vnni",),
        ("amx",),
    ]
