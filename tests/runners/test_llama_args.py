"""What llama-server is told, in the words of its version; and what keeps it from starting."""

from pathlib import Path

import anyio
import pytest

from pyllama_raw import SamplingParams
from pyllama_raw.errors import ConfigError
from pyllama_raw.runners import (
    LLAMA_SERVER,
    Draft,
    LlamaOptions,
    LlamaServer,
    RunnerMetadata,
    SpawnedRunner,
)
from pyllama_raw.runners.child import NEW, OLD, arguments, library_path, words_of
from pyllama_raw.runners.keeper import members

FULL = LlamaOptions(
    n_ctx=8192,
    n_batch=2048,
    n_ubatch=512,
    n_threads=8,
    n_gpu_layers=99,
    n_slots=4,
    cont_batching=True,
    flash_attn="on",
    cache_type="q8_0",
    defrag_thold=0.1,
    prio=2,
    mlock=True,
    draft=Draft("D"),
)
SHARED = (
    "--model M --host 127.0.0.1 --port 8081 --ctx-size 8192 --batch-size 2048 "
    "--ubatch-size 512 --threads 8 --n-gpu-layers 99 --parallel 4 --cont-batching "
    "--flash-attn on --cache-type-k q8_0 --cache-type-v q8_0 --defrag-thold 0.1 --prio 2 "
)
GOLDEN = {
    OLD: f"{SHARED}--mlock --model-draft D --draft-max 8 --draft-min 1 --draft-p-min 0.4",
    NEW: f"{SHARED}--load-mode mlock --model-draft D --spec-draft-n-max 8 "
    "--spec-draft-n-min 1 --draft-p-min 0.4",
}
OLD_HELP = "--mlock  force system to keep model in RAM\n--draft-max, --draft N"
NEW_HELP = (
    "-lm, --load-mode MODE\n--spec-draft-n-max N\n--draft-max N  has been removed"
)


@pytest.mark.parametrize("words", [OLD, NEW], ids=["old", "new"])
def test_all_options_in_both_dialects(words):
    """
    Two lists, told apart by a few flags.
    """
    assert arguments("M", FULL, words, port=8081) == GOLDEN[words].split()


def test_options_that_nobody_gave_are_left_to_the_server():
    """
    The port is a free one, and only this machine reaches it.
    """
    expected = ["--model", "M", "--host", "127.0.0.1", "--port", "0"]

    assert arguments("M", LlamaOptions(), OLD) == expected


def test_a_micro_batch_is_no_larger_than_a_batch():
    """
    The server would refuse it.
    """
    words = arguments("M", LlamaOptions(n_batch=128, n_ubatch=512), NEW)

    assert words[-4:] == ["--batch-size", "128", "--ubatch-size", "128"]


def test_a_model_on_other_machines_has_no_saved_states():
    """
    The server aborts where it saves one.
    """
    words = arguments("M", LlamaOptions(rpc=("a:1", "b:2"), extra=("--jinja",)), NEW)

    assert words[-5:] == ["--rpc", "a:1,b:2", "--cache-ram", "0", "--jinja"]


def test_the_dialect_is_read_from_the_help():
    """
    A flag that was removed is still in it.
    """
    assert (words_of(OLD_HELP), words_of(NEW_HELP)) == (OLD, NEW)


def test_macos_finds_the_libraries_beside_the_program():
    """
    Before those of the user; other systems find them by themselves.
    """
    binary, before = Path("/a/llama-server"), {"DYLD_LIBRARY_PATH": "/b"}

    assert library_path(binary, {}, "darwin") == {"DYLD_LIBRARY_PATH": "/a"}
    assert library_path(binary, before, "darwin") == {"DYLD_LIBRARY_PATH": "/a:/b"}
    assert library_path(binary, before, "linux") == {}


def test_what_lacks_is_told_in_this_order(tmp_path):
    """
    The format, the program's name, the program, the model, the draft: whoever names a draft that
    is not there made a mistake, and is not served slowly without one.
    """
    model, binary = tmp_path / "a.gguf", tmp_path / "llama-server"
    messages = []
    drafted = LlamaServer(model, binary, LlamaOptions(draft=Draft(tmp_path / "d.gguf")))
    steps = [
        lambda: LlamaServer(tmp_path / "a.onnx", None).check(),
        lambda: LlamaServer(model, None).check(),
        lambda: LlamaServer(model, binary).check(),
        lambda: (binary.touch(), LlamaServer(model, binary).check()),
        lambda: (model.touch(), drafted.check()),
    ]
    for step in steps:
        with pytest.raises(ConfigError) as caught:
            step()
        messages.append(str(caught.value))
    LlamaServer(model, binary).check()

    assert messages == [
        "GGUF runtime received wrong format: .onnx: give a file .gguf",
        "GGUF runtime requires runtime_binary path: give binary= the llama-server that "
        "you have built",
        f"llama-server binary not found at: {binary}: give a file that is there",
        f"Model file not found at: {model}: give a file that is there",
        f"Draft model file not found at: {tmp_path / 'd.gguf'}: give a file that is there, or "
        "leave draft= out to serve without one",
    ]


def test_what_a_server_says_of_itself():
    """
    Verbs by its flags, its place, and a program whose version it tells when it runs.
    """
    plain = LlamaServer("a.gguf", "b")
    able = LlamaServer(
        "a.gguf",
        "b",
        LlamaOptions(n_gpu_layers=0, extra=("--embeddings", "--reranking")),
    )

    assert (plain.verbs, able.verbs) == ({"generate"}, {"generate", "embed", "rank"})
    assert SpawnedRunner(plain).capabilities.verbs == {"generate"}
    assert SpawnedRunner(able).metadata == RunnerMetadata(
        "GGUF", "llama.cpp (llama-server)", None, on_device=False
    )
    assert arguments("m", LlamaOptions(), OLD, 8080, "0.0.0.0")[2:] == [  # noqa: S104
        *("--host", "0.0.0.0", "--port", "8080")  # noqa: S104
    ]


@pytest.mark.anyio
async def test_a_program_that_cannot_be_run_says_why(tmp_path):
    """
    Here it is no program.
    """
    binary = tmp_path / "llama-server"
    binary.touch()
    with pytest.raises(ConfigError, match="Failed to spawn llama-server"):
        await LlamaServer("a.gguf", binary).command()


@pytest.mark.anyio
async def test_the_help_of_a_script_leaves_nothing(tmp_path):
    """
    What it has started ends, though it holds the output; all of a long help is read.
    """
    script = tmp_path / "llama-server"
    script.write_text(
        f"#!/bin/sh\nsleep 300 &\necho $$ > {tmp_path / 'pid'}\n"
        "echo --load-mode MODE --spec-draft-n-max N\n"
        "i=0; while [ $i -lt 3000 ]; do i=$((i+1)); echo a line of forty characters, more; done\n"
    )
    script.chmod(0o755)
    options = LlamaOptions(mlock=True)
    with anyio.fail_after(60.0):
        command = await LlamaServer("a.gguf", script, options).command()
        session = int((tmp_path / "pid").read_text())
        while members(session):  # noqa: ASYNC110
            await anyio.sleep(0.01)

    assert command[-2:] == ["--load-mode", "mlock"]


def test_a_key_is_told_by_the_environment():
    """
    And that nothing is downloaded.
    """
    variables = LlamaServer("a.gguf", "/a/llama-server").environment("secret")

    assert variables["LLAMA_API_KEY"] == "secret"
    assert variables["LLAMA_ARG_OFFLINE"] == "1"


def test_a_schema_of_a_completion_has_a_field_of_its_own():
    """
    llama-server ignores response_format there, and says nothing.
    """
    params = SamplingParams(json_schema={"const": 7})
    _, completion = LLAMA_SERVER.request("m", "a", params, {})
    _, chat = LLAMA_SERVER.request("m", [{"role": "user", "content": "a"}], params, {})

    assert completion["json_schema"] == {"const": 7}
    assert "response_format" not in completion
    assert chat["response_format"]["json_schema"]["schema"] == {"const": 7}
    assert "json_schema" not in chat
