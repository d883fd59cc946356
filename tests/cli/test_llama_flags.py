"""Arguments of llama-server: the table against its source, and what they come to here."""

import tempfile
from pathlib import Path

import pytest

import build_lib
from pyllama_raw.cli.llama_arguments import read, sections
from pyllama_raw.cli.llama_flags import FLAGS, OLDER
from pyllama_raw.errors import ConfigError
from scripts.llama_arguments import (
    PAGE,
    SOURCE,
    Argument,
    arguments_of,
    listed,
    written,
)
from scripts.llama_source import unpack


def parsed(*arguments, **variables):
    return read([str(argument) for argument in arguments], variables, files=())


def test_every_flag_of_llama_server_has_a_meaning():
    """
    With its names, negated names, number of values and variable; none is unknown, and none is here
    that it has not.
    """
    table = {
        Argument(flag.names, flag.negated, flag.n_values, flag.variable)
        for flag in FLAGS
    }

    assert table == set(listed())
    assert len({name for flag in FLAGS for name in flag.names}) == sum(
        len(flag.names) for flag in FLAGS
    )
    assert not {n for flag in OLDER for n in flag.names} & {
        n for f in FLAGS for n in f.names
    }


def test_the_list_is_that_of_the_pinned_source():
    """
    As far as the source is on this machine.
    """
    archive = (
        build_lib.fetch.cache_dir()
        / "download"
        / build_lib.SOURCE.url.rpartition("/")[2]
    )
    if not archive.exists():
        pytest.skip("the source is not here")
    with tempfile.TemporaryDirectory() as folder:
        source = (unpack(Path(folder), (SOURCE,)) / SOURCE).read_text()

    assert arguments_of(source) == listed()


def test_the_table_of_the_page_is_what_the_code_does():
    """
    `python -m scripts.llama_arguments` writes it.
    """
    page = PAGE.read_text("utf-8")

    assert written(page) == page


def test_what_a_program_gives_becomes_options_of_ours():
    """
    Long and short names, low lines for dashes, words for numbers.
    """
    values = parsed(
        *("-m", "a.gguf", "--ctx_size", 4096, "-np", 2, "-ngl", "all", "-fa", "on"),
        *("--no-webui", "-ctk", "q8_0", "--context-shift", "--load-mode", "dio"),
    ).values

    assert values == {
        "own.model": "a.gguf",
        "context.n_ctx": 4096,
        "scheduler.n_slots": 2,
        "model.n_gpu_layers": -1,
        "context.flash_attn": "on",
        "own.ui": False,
        "context.type_k": "q8_0",
        "scheduler.context_full": "shift",
        "model.load_mode": "direct_io",
    }


@pytest.mark.parametrize(
    ("types", "values"),
    [
        ("none", {"speculation.mode": "off"}),
        ("draft-mtp,none", {"speculation.mode": "off"}),
        ("ngram-simple,draft-simple", {}),
        ("ngram-simple,draft-mtp", {"speculation.mode": "mtp"}),
    ],
)
def test_drafts_are_switched_off_as_there(types, values):
    """
    By the type none, also beside others, which is the default there; heads are named; of the others the engine chooses.
    """
    assert parsed("--spec-type", types).values == values


def test_a_kind_of_drafts_that_is_misspelt_is_refused():
    """
    As there; it would be no draft at all without a word.
    """
    with pytest.raises(ConfigError, match="not 'draft-mpt'"):
        parsed("--spec-type", "ngram-mod,draft-mpt")


def test_variables_give_way_to_the_command_line():
    """
    LLAMA_ARG_NO_ of a flag says no, and a flag without a value is a word.
    """
    variables = {
        "LLAMA_ARG_CTX_SIZE": "512",
        "LLAMA_ARG_PORT": "9000",
        "LLAMA_ARG_NO_KV_OFFLOAD": "1",
        "LLAMA_ARG_ENDPOINT_METRICS": "true",
        "LLAMA_ARG_SWA_FULL": "0",
        "LLAMA_API_KEY": 'a,"b,c"',
    }

    assert parsed("-c", 1024, **variables).values == {
        "context.n_ctx": 1024,
        "listen.port": 9000,
        "context.offload_kqv": False,
        "own.metrics": True,
        "own.api_keys": ["a", "b,c"],
    }


def test_a_flag_may_stand_for_others():
    """
    A model of a hub with the options that suit it; what comes behind wins.
    """
    values = parsed("--fim-qwen-1.5b-default", "--port", 9).values

    assert values == {
        "own.hf_repo": "ggml-org/Qwen2.5-Coder-1.5B-Q8_0-GGUF",
        "own.hf_file": "qwen2.5-coder-1.5b-q8_0.gguf",
        "listen.port": 9,
        "context.n_ubatch": 1024,
        "context.n_batch": 1024,
        "context.n_ctx": 0,
    }


def test_adapters_and_texts_add_up():
    """
    Other flags count where they come last.
    """
    values = parsed(
        *("--lora", "a,b", "--lora-scaled", "c:0.5", "-r", "x", "-r", "y"),
        *("--temp", 1, "--temp", 0.5, "--seed", 7, "--seed", -1),
    ).values

    assert values == {
        "own.adapters": [("a", 1.0), ("b", 1.0), ("c", 0.5)],
        "defaults.stop": ["x", "y"],
        "defaults.temperature": 0.5,
    }


def test_what_changes_speed_only_is_noted():
    """
    A line for each, with the reason.
    """
    notes = parsed(
        "--threads-http", 4, "--draft-max", 8, "--reasoning-budget", -1
    ).notes

    assert [note.partition(":")[0] for note in notes] == [
        "--threads-http",
        "--draft-max",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--no-such",), "error: invalid argument: --no-such"),
        (("--port",), 'error while handling argument "--port": expected value'),
        (("--port", "x"), 'error while handling argument "--port"'),
        (("-ctk", "q2_0"), "give one of f32, f16"),
        (("--ssl-key-file", "k"), "put a proxy in front"),
        (("--reasoning-budget", "100"), "--reasoning off"),
        (("--tools", "all"), "runs no tools"),
        (("--pooling", "sum"), "give one of none, mean"),
        (("--grammar-file", "missing.gbnf"), "missing.gbnf"),
        (("--fit-target", ","), "give MiB"),
        (("--chat-template-kwargs", "[" * 10**5), "nested too deep"),
    ],
)
def test_a_mistake_and_a_refusal_name_the_flag(arguments, message):
    """
    In llama-server's words, and with what to use instead.
    """
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        parsed(*arguments)


INI = """
; of all models
version = 1
[*]
n-gpu-layers = 0   ; on the CPU
LLAMA_ARG_CTX_SIZE = 8192
[small]
model = /models/small.gguf
no-webui = true
temp = 0.2
load-on-startup = true
# the end
[hub:q8_0]
hf-repo = owner/name
"""


def test_presets_are_read_as_they_are(tmp_path):
    """
    Sections with keys that are names of flags, or variables.
    """
    file = tmp_path / "presets.ini"
    file.write_text(INI)

    assert sections(file) == {
        "default": {"version": "1"},
        "*": {"n-gpu-layers": "0", "LLAMA_ARG_CTX_SIZE": "8192"},
        "small": {
            "model": "/models/small.gguf",
            "no-webui": "true",
            "temp": "0.2",
            "load-on-startup": "true",
        },
        "hub:q8_0": {"hf-repo": "owner/name"},
    }


def test_a_long_line_of_a_preset_is_read_once(tmp_path):
    """
    A million blanks in it are no work of hours.
    """
    file, blanks = tmp_path / "presets.ini", " " * 10**6
    file.write_text(f"alias = a{blanks}b{blanks}# c\n{blanks}; d\n")

    assert sections(file) == {"default": {"alias": f"a{blanks}b"}}


def test_files_of_the_user_give_way_and_may_have_keys_of_other_programs(tmp_path):
    """
    Which are noted.
    """
    file = tmp_path / "config.ini"
    file.write_text("port = 1\ntop-k = 3\nno-kv-offload = true\nhellaswag = 1\n")
    arguments = read(["--port", "2"], {}, files=[file])

    assert arguments.values == {
        "listen.port": 2,
        "defaults.top_k": 3,
        "context.offload_kqv": False,
    }
    assert arguments.notes == [f"{file}: hellaswag is no flag of this program"]


def test_a_line_that_is_no_pair_is_named(tmp_path):
    """
    With the file.
    """
    file = tmp_path / "presets.ini"
    file.write_text("[a]\nwhat is this\n")

    with pytest.raises(ConfigError, match=r"line 2 of presets .*presets\.ini"):
        sections(file)
