"""
The C declarations are the same as the headers.
"""

import runpy
from pathlib import Path

import pytest

from pyllama_raw._ffi import cdef
from scripts.c_declarations import parse
from scripts.sync_cdef import (
    COMPLETE,
    PARTIAL,
    built_include,
    compare,
    declared,
    headers,
    main,
)

HEADER = """
#ifndef LLAMA_H
#define LLAMA_H // guard
#define LLAMA_ANSWER 0x2a

#ifdef __cplusplus
extern "C" {
#endif
    // opaque; with a comment
    struct llama_model;
    typedef int32_t llama_token;
    typedef bool (*llama_progress)(float progress, void * user_data);
    enum llama_kind {
        LLAMA_KIND_NONE = -1,
        LLAMA_KIND_ONE  = 1 << 0, /* not , two */
    };
    struct llama_params {
        int32_t n_ctx; // size
        char    name[2*LLAMA_ANSWER];
    };
    LLAMA_API struct llama_params
        llama_default_params(void);
    LLAMA_API int32_t llama_run(
            struct llama_model * model,
                   llama_token   token); // 0 on success
    DEPRECATED(LLAMA_API void llama_old(int32_t n), "use llama_run (really)");
#ifdef __cplusplus
}
LLAMA_API std::map<int, int> llama_only_cpp(void);
#endif
#endif
"""

CDEF = """
#define LLAMA_ANSWER ...
struct llama_model;
typedef int32_t llama_token;
typedef bool (*llama_progress)(float progress, void * user_data);
enum llama_kind { LLAMA_KIND_NONE, LLAMA_KIND_ONE, ... };
struct llama_params { int32_t n_ctx; char name[...]; ...; };
struct llama_params llama_default_params(void);
int32_t llama_run(struct llama_model * model, llama_token token);
"""


def differences(header: str, ours: str = CDEF) -> list[str]:
    """What is reported for one header and one cdef."""
    return compare(parse(ours), {"llama.h": parse(header)})


def test_headers_of_the_build_match():
    """
    Every declaration of the headers that the extension was built from is declared alike.
    """
    include = built_include()
    if include is None:
        pytest.skip("the extension has not been built here")

    assert compare(declared(), headers([include])) == []


def test_layout_and_comments_do_not_count():
    """
    Comments, alignment, values, export macros, deprecated and C++ parts are no difference.
    """
    assert differences(HEADER) == []


@pytest.mark.parametrize(
    ("old", "new", "lines"),
    [
        (
            "// opaque",
            "LLAMA_API void llama_new(void); //",
            ["missing: function llama_new"],
        ),
        (
            "llama_default_params(void)",
            "llama_defaults(void)",
            ["gone: function llama_default_params", "missing: function llama_defaults"],
        ),
        (
            "llama_token   token);",
            "llama_token   token, bool on);",
            [
                "changed: function llama_run\n"
                "    cdef:   int32_t llama_run "
                "( struct llama_model * model , llama_token token )\n"
                "    header: int32_t llama_run "
                "( struct llama_model * model , llama_token token , bool on )"
            ],
        ),
        (
            "_ANSWER 0x2a",
            "_OTHER (1 << 3)",
            ["gone: constant LLAMA_ANSWER", "missing: constant LLAMA_OTHER"],
        ),
        ("// opaque", "enum llama_e { LLAMA_E }; //", ["missing: enum llama_e"]),
        (
            "LLAMA_KIND_ONE ",
            "LLAMA_KIND_TWO ",
            [
                "changed: enum llama_kind: "
                "lacks LLAMA_KIND_TWO; has no longer LLAMA_KIND_ONE"
            ],
        ),
        ("// opaque", "struct llama_s { int i; }; //", ["missing: struct llama_s"]),
        (
            "int32_t n_ctx;",
            "int32_t n_ctx; bool on;",
            ["changed: struct llama_params: lacks bool on"],
        ),
        (
            "int32_t n_ctx;",
            "uint32_t n_ctx;",
            [
                "changed: struct llama_params: "
                "lacks uint32_t n_ctx; has no longer int32_t n_ctx"
            ],
        ),
        (
            "(*llama_progress)",
            "(*llama_other)",
            ["gone: typedef llama_progress", "missing: typedef llama_other"],
        ),
        (
            "typedef int32_t llama_token",
            "typedef int64_t llama_token",
            [
                "changed: typedef llama_token\n"
                "    cdef:   typedef int32_t llama_token\n"
                "    header: typedef int64_t llama_token"
            ],
        ),
    ],
)
def test_change_of_a_header_is_reported(old: str, new: str, lines: list[str]):
    """
    Whatever a header adds, drops or changes is named, and nothing else is.
    """
    assert differences(HEADER.replace(old, new)) == lines


def test_deprecated_function_is_reported():
    """
    A declared function that the header now deprecates is to be dropped.
    """
    assert differences(HEADER, CDEF + "void llama_old(int32_t n);") == [
        "deprecated: function llama_old"
    ]


def test_header_missing_is_an_error(tmp_path: Path):
    """
    A folder without the headers is named instead of everything being reported as gone.
    """
    with pytest.raises(FileNotFoundError, match=r"llama\.h is in none of"):
        headers([tmp_path])


def test_command_line_fails_on_a_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """
    The command exits with 1 and prints the difference, so that a script can stop on it.
    """
    for name in (*COMPLETE, *PARTIAL):
        (tmp_path / name).touch()

    code = main(["--include", str(tmp_path)])

    assert code == 1
    assert "gone: function llama_decode\n" in capsys.readouterr().out


def test_cdef_is_readable_by_path():
    """
    The build reads the cdef without importing the package.
    """
    assert runpy.run_path(cdef.__file__)["CDEF"] == cdef.CDEF


def test_every_cdef_file_is_used():
    """
    A file left out of FILES would be compared with nothing and declared to nobody.
    """
    assert sorted(cdef.FILES) == sorted(path.name for path in cdef.DIRECTORY.glob("*"))


def test_shim_header_is_declared_whole():
    """
    What the headers of the shim declare is what Python sees: nothing is lost on the way.
    """
    shim = parse(cdef.SHIM)

    seen = parse(cdef.strip_header(cdef.SHIM))

    assert seen == shim
    assert "plr_step" in shim.functions
    assert "PLR_EXCEPTION" in shim.constants
