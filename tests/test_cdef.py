"""
What Python sees of C is read from the headers, and what we use of them is known.
"""

import os
from pathlib import Path

import pytest

import build_lib
from scripts.c_declarations import Declarations, needed, parse, render
from scripts.c_fit import WITHOUT, misfits, without
from scripts.sync_cdef import built_include, differences, main, update

HEADER = """
#ifndef LLAMA_H
#define LLAMA_H // guard
#define LLAMA_ANSWER 0x2a
#define LLAMA_NAME "no number"

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
    typedef struct llama_params {
        int32_t n_ctx; // size
        char    name[2*LLAMA_ANSWER];
        char    key[128];
    } llama_params;
    LLAMA_API struct llama_params
        llama_default_params(void);
    static inline int llama_inline(int n) { return n; }
    LLAMA_API int32_t llama_run(
            struct llama_model * model,
                   llama_token   token); // 0 on success
    DEPRECATED(LLAMA_API void llama_old(int32_t n), "use llama_run (really), or not");
#ifdef __cplusplus
}
LLAMA_API std::map<int, int> llama_only_cpp(void);
#endif
#endif
"""

SEEN = """\
#define LLAMA_ANSWER ...
enum llama_kind {
    LLAMA_KIND_NONE, LLAMA_KIND_ONE, ...
};
typedef int32_t llama_token;
typedef bool (* llama_progress) (float progress, void * user_data);
typedef struct llama_params llama_params;
struct llama_params {
    int32_t n_ctx;
    char name[...];
    char key[128];
    ...;
};
struct llama_params llama_default_params(void);
int32_t llama_run(struct llama_model * model, llama_token token);
"""


def without_deprecated(found: Declarations) -> Declarations:
    return {key: parts for key, parts in found.items() if key[0] != "deprecated"}


def test_header_is_declared():
    """
    Numbers, enums, types and functions are, with what the compiler knows left to it.
    """
    assert render(without_deprecated(parse(HEADER))) == SEEN


def test_declarations_are_read_as_they_are_written():
    """
    What is written for cffi can be read and compared with a header.
    """
    assert parse(SEEN) == without_deprecated(parse(HEADER))


def test_only_what_is_named_is_needed():
    """
    A name brings the types that it names, and a value its enum.
    """
    known = parse(HEADER)

    found = needed({"llama_run", "LLAMA_KIND_ONE", "llama_unknown"}, known)

    assert list(found) == [
        ("typedef", "llama_token"),
        ("enum", "llama_kind"),
        ("function", "llama_run"),
    ]


@pytest.mark.parametrize(
    ("old", "new", "lines"),
    [
        ("// opaque", "LLAMA_API void llama_new(void); //", []),
        (
            "llama_default_params(void)",
            "llama_defaults(void)",
            ["missing: function llama_default_params"],
        ),
        (
            "llama_token   token);",
            "llama_token   token, bool on);",
            ["changed: function llama_run"],
        ),
        ("_ANSWER 0x2a", "_OTHER (1 << 3)", ["missing: constant LLAMA_ANSWER"]),
        (
            "LLAMA_KIND_ONE ",
            "LLAMA_KIND_TWO ",
            ["changed: enum llama_kind has no LLAMA_KIND_ONE"],
        ),
        ("int32_t n_ctx;", "int32_t n_ctx; bool on;", []),
        (
            "int32_t n_ctx;",
            "uint32_t n_ctx;",
            ["changed: struct llama_params has no int32_t n_ctx"],
        ),
        ("(*llama_progress)", "(*llama_other)", ["missing: typedef llama_progress"]),
        (
            "typedef int32_t llama_token",
            "typedef int64_t llama_token",
            ["changed: typedef llama_token"],
        ),
        (
            "LLAMA_API int32_t llama_run(",
            "LLAMA_API int32_t llama_ran(",
            ["missing: function llama_run"],
        ),
    ],
)
def test_change_of_a_header_is_reported(old: str, new: str, lines: list[str]):
    """
    Whatever we use and a header drops or changes is named; what it adds is not.
    """
    assert old in HEADER
    assert misfits(parse(SEEN), parse(HEADER.replace(old, new))) == lines


def test_deprecated_function_is_reported():
    """
    A function that we use and the header now deprecates is there, and to be dropped.
    """
    ours = parse(SEEN + "void llama_old(int32_t n);")

    assert misfits(ours, parse(HEADER)) == []
    assert differences(ours, parse(HEADER)) == ["deprecated: function llama_old"]


def test_headers_of_the_build_have_what_we_use(capsys: pytest.CaptureFixture[str]):
    """
    Every name that we use stands in used.h, as the headers of the extension have it.

    An older llama.cpp than the pinned one lacks what the code does without, and nothing else.
    """
    if built_include() is None:
        pytest.skip("the extension has not been built here")

    code = main([])

    lines = set(capsys.readouterr().out.splitlines())
    lacks = {f"{line} ({meaning})" for line, meaning in WITHOUT.items()}
    is_pinned = not (os.environ.get("PYLLAMA_RAW_PREFIX") or build_lib.named_source())
    if is_pinned or code == 0:
        assert (code, lines) == (0, {"the headers have what we use"})
    else:
        assert lines <= lacks


OLD = {
    "include/llama.h": """
        #define LLAMA_STATE_SEQ_VERSION 3
        #define LLAMA_OTHER 0x1 // of nobody
        enum llama_vocab_type { LLAMA_VOCAB_TYPE_NONE = 0, LLAMA_VOCAB_TYPE_SPM };
        struct llama_model_params { bool no_host; int32_t other; };
        LLAMA_API void llama_free(struct llama_context * ctx);
        LLAMA_API void llama_gone(void);
        LLAMA_API void llama_stays(void);
    """,
    "tools/mtmd/mtmd.h": "#ifdef __cplusplus\nstd::map<int, size_t> mtmd_get_memory_usage(const char * f);\n#endif",
    "src/llama-model.cpp": "llama_model_params llama_model_default_params() {\n"
    "    llama_model_params result = {\n        /*.no_host =*/ false,\n    };\n}\n",
}
NEW = {
    "include/llama.h": """
        #define LLAMA_STATE_SEQ_VERSION 4
        #define LLAMA_OTHER 0x2 // of nobody
        enum llama_vocab_type {
            LLAMA_VOCAB_TYPE_NONE = 0, LLAMA_VOCAB_TYPE_BPE, LLAMA_VOCAB_TYPE_SPM
        };
        struct llama_model_params { bool no_host; int64_t other; };
        LLAMA_API bool llama_free(struct llama_context * ctx);
        LLAMA_API void llama_fresh(void);
        LLAMA_API void llama_stays(void);
    """,
    "tools/mtmd/mtmd.h": "#ifdef __cplusplus\nstruct usage mtmd_get_memory_usage(const char * f);\n#endif",
    "src/llama-model.cpp": OLD["src/llama-model.cpp"].replace("false", "true"),
}


def test_an_update_is_told_in_lines(tmp_path: Path):
    """
    Functions, fields, values, numbers and defaults, those that we use before all else.
    """
    for name, files in (("old", OLD), ("new", NEW)):
        for file, text in files.items():
            path = tmp_path / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    ours, others = update(tmp_path / "old", tmp_path / "new")

    assert ours == [
        "changed: C++ mtmd_get_memory_usage was "
        "std : : map < int, size_t > mtmd_get_memory_usage(const char * f);, "
        "is struct usage mtmd_get_memory_usage(const char * f);",
        "changed: enum llama_vocab_type gains LLAMA_VOCAB_TYPE_BPE",
        "changed: function llama_free was void llama_free(struct llama_context * ctx)",
        "changed: function llama_free is bool llama_free(struct llama_context * ctx)",
        "changed: struct llama_model_params loses int32_t other",
        "changed: struct llama_model_params gains int64_t other",
        "changed: number LLAMA_STATE_SEQ_VERSION was 3, is 4",
        "changed: number LLAMA_VOCAB_TYPE_SPM was 1, is 2",
        "changed: default llama_model_default_params: no_host was false, is true",
    ]
    assert others == [
        "added: function llama_fresh",
        "removed: function llama_gone",
        "changed: number LLAMA_OTHER was 0x1, is 0x2",
    ]


def test_constness_of_a_parameter_is_no_misfit():
    """
    Whoever calls the function passes the same.
    """
    text = "int32_t llama_run(struct llama_model * model, const char * text);"

    assert misfits(parse(text), parse(text.replace("const char", "char"))) == []
    assert misfits(parse(text), parse(text.replace("char", "int"))) == [
        "changed: function llama_run"
    ]


def test_what_an_older_version_lacks_is_known_to_the_shim():
    """
    As a macro for each function; of those that must not be absent there is none.
    """
    ours = build_lib.read(build_lib.USED)
    line = "missing: function mtmd_tokenize_from_parts"
    absent = {("function", "mtmd_tokenize_from_parts"), ("function", "llama_decode")}
    older = {key: parts for key, parts in ours.items() if key not in absent}

    assert line in WITHOUT
    assert without(ours, ours) == []
    assert without(ours, older) == [("PLR_WITHOUT_MTMD_TOKENIZE_FROM_PARTS", "1")]


def test_header_missing_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """
    A folder without the headers is named instead of everything being reported as gone.
    """
    with pytest.raises(SystemExit):
        main(["--include", str(tmp_path)])

    assert f"ggml.h is in none of {tmp_path}" in capsys.readouterr().err


def test_a_source_that_is_none_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """
    Of two folders that are not there nothing would differ, and of one everything.
    """
    with pytest.raises(SystemExit):
        main(["--update", str(tmp_path / "one"), str(tmp_path / "other")])

    assert f"{tmp_path / 'one'} is no llama.cpp source tree" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variable", "args"),
    [
        ("PYLLAMA_RAW_CPU=wrong", ()),
        ("PYLLAMA_RAW_PREFIX=~nobody-has-this-name", ()),
        ("PYLLAMA_RAW_CACHE=/dev/null", ("--update", "pinned", "newest")),
    ],
)
def test_a_wrong_variable_is_an_error(
    variable: str,
    args: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """
    The command ends with a line that names it.
    """
    name, _, value = variable.partition("=")
    monkeypatch.setenv(name, value)

    with pytest.raises(SystemExit):
        main([*args])

    assert name in capsys.readouterr().err


def test_command_line_fails_on_a_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """
    The command exits with 1 and prints the difference, so that a script can stop on it.
    """
    for name in build_lib.HEADERS:
        (tmp_path / name).touch()

    code = main(["--include", str(tmp_path)])

    assert code == 1
    assert "missing: function llama_decode\n" in capsys.readouterr().out


def test_shim_is_declared_whole():
    """
    Python sees every function of the shim, which its headers name with their kind.
    """
    texts = [(build_lib.FFI_DIR / name).read_text() for name in build_lib.SHIM_HEADERS]

    seen = build_lib.seen_by_python([])

    assert ("function", "plr_step") in seen
    assert ("constant", "PLR_EXCEPTION") in seen
    assert {key: seen[key] for key in parse("\n".join(texts))} == seen
