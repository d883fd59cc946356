"""A library of llama.cpp that is installed, and the versions that fit."""

import re

import pytest

import build_lib
from build_lib import BuildError
from tests.support.builds import SUFFIX, forbidden, make_prefix, make_source_that_fits


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


def test_prefix_whose_library_is_cut_short_is_refused(monkeypatch, tmp_path):
    """
    Before anything is compiled: the system would end the build with SIGBUS.
    """
    prefix = make_prefix(tmp_path / "prefix")
    monkeypatch.setattr(
        build_lib.loaded, "lacks_its_end", lambda path: "libggml-base" in path.name
    )

    with pytest.raises(BuildError, match=r"lib/libggml-base\.\w+ is cut short"):
        build_lib.installed_at(prefix)


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
