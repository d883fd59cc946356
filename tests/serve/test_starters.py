"""Programs in whose hands llama-server is, with our program and with llama.cpp's own."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

import pyllama_raw
from scripts.tiny_models import vocab
from tests.serve.starters import (
    MEMORY,
    OURS,
    STARTERS,
    free_port,
    polling,
    started,
    theirs,
)
from tests.support.limits import LIMIT_S
from tests.support.tiny import tiny_adapter, tiny_model

pytestmark = pytest.mark.native

FILL = {"pre": vocab.MASK, "suf": vocab.SEP, "mid": vocab.UNKNOWN}
OVERRIDES = ",".join(
    f"tokenizer.ggml.fim_{n}_token_id=int:{i}" for n, i in FILL.items()
)
LIBRARIES = Path(pyllama_raw.__file__).parent / "_ffi" / "lib"
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(params=["ours", "theirs"], scope="module")
def command(request):
    """The command of a server."""
    own = OURS if request.param == "ours" else theirs()
    if own is None:
        pytest.skip("the pinned llama-server is not built here")
    return own


@pytest.fixture(scope="module")
def client(command):
    """A client of one server for all that asks only."""
    arguments = [
        *("-m", str(tiny_model("llama")), "--port", str(free_port()), "-c", "2048"),
        *("-np", "2", "--alias", "tiny", "--override-kv", OVERRIDES, "--metrics"),
        *("--lora", str(tiny_adapter("lora-a")), "--slots", "--jinja"),
    ]
    with started(command, arguments) as server:
        polling(0.1, 1.0)(server)
        with server.client() as client:
            yield client


def events(client, path, body):
    """Events of a stream, without comments and its end."""
    with client.stream("POST", path, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
    return [json.loads(line[6:]) for line in lines]


def posted(client, path, body):
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


# -- the life of a server ----------------------------------------------------------------


@pytest.mark.parametrize("name", STARTERS)
def test_a_program_starts_waits_for_and_ends_a_server(name, command, tmp_path):
    """
    In its way and within its times; a server that was told to end leaves nothing behind.
    """
    if name == "jan" and command is not OURS:
        pytest.skip("the pinned version has another line")
    starter = STARTERS[name]
    model, port = str(tiny_model("llama")), free_port()
    arguments = starter.arguments(model, port, tmp_path)
    with started(command, arguments, **starter.options) as server:
        starter.wait(server)
        with server.client() as client:
            answer = posted(
                client, "/v1/chat/completions", {"messages": CHAT, "max_tokens": 3}
            )
        code = starter.end(server)

    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert code == (-9 if name == "ollama" else 0)
    assert command is not OURS or not [*tmp_path.iterdir()]


def test_a_verbose_log_has_the_lines_of_memory(command, tmp_path):
    """
    Ollama reckons by them what a model takes.
    """
    starter = STARTERS["ollama"]
    arguments = starter.arguments(str(tiny_model("llama")), free_port(), tmp_path)
    with started(command, arguments) as server:
        starter.wait(server)
        starter.end(server)

    matches = [MEMORY.search(line) for line in server.lines]
    assert {match[2] for match in matches if match} >= {"model", "KV", "compute"}


def test_a_server_that_loads_says_so(command):
    """
    Each answer before the first good one is 503 with the text that Ollama looks for.
    """
    arguments = STARTERS["llama-swap"].arguments(
        str(tiny_model("llama")), free_port(), None
    )
    bodies = []
    with started(command, arguments) as server:
        while (status := server.health(1.0)) != 200:
            assert server.process.poll() is None, server.lines
            if status is not None:
                with server.client() as client:
                    answer = client.get("/health")
                bodies += [answer.json()] if answer.status_code == 503 else []

    error = {"message": "Loading model", "type": "unavailable_error", "code": 503}
    assert all(body == {"error": error} for body in bodies)


@pytest.mark.parametrize("ends_with", ["stdin", "parent"])
def test_our_server_ends_with_who_started_it(ends_with, tmp_path):
    """
    Where that is question for; the file of its socket goes, too.
    """
    path = tmp_path / "server.sock"
    flags = ["-m", str(tiny_model("llama")), "--host", str(path), "-c", "512"]
    own = {**os.environ, "PYLLAMA_RAW_ENDS_WITH": ends_with}
    # A shell between both, whose end is that of the parent; stdin is inherited.
    script = '"$@" & echo $!; read line'
    shell = ["sh", "-c", script, "sh", *OURS, *flags] if ends_with == "parent" else []
    process = subprocess.Popen(
        shell or [*OURS, *flags],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=own,
    )
    try:
        lines = iter(process.stderr.readline, "")
        assert any("server is listening" in line for line in lines)
        process.stdin.close()
        process.wait(LIMIT_S)
        end = time.monotonic() + LIMIT_S
        while path.exists():
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait(LIMIT_S)
        for pipe in (process.stdin, process.stdout, process.stderr):
            pipe.close()


# -- probes ------------------------------------------------------------------------------


def run(command, *arguments):
    return subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def test_probes_have_the_forms_that_are_read(command):
    """
    The header of the devices stands alone, the version is on stderr, and help ends well.
    """
    devices = run(command, "--list-devices", "--offline", "--verbose")
    version, usage = run(command, "--version"), run(command, "--help")

    assert devices.returncode == 0
    assert devices.stdout.startswith("Available devices:\n  ")
    assert version.stderr.startswith("version: ")
    assert " (build " in version.stderr.splitlines()[0]
    assert usage.returncode == 0
    assert "--ctx-size" in usage.stdout


def test_a_start_without_a_model_tells_the_system(command):
    """
    Ollama ends the process as soon as the line is there.
    """
    flags = ["--port", str(free_port()), "--host", "127.0.0.1"]
    flags += ["--no-webui", "--offline", "--verbose"]
    with started(command, flags) as server:
        end = time.monotonic() + LIMIT_S
        while not any("system_info:" in line for line in list(server.lines)):
            assert server.process.poll() is None, server.lines
            assert time.monotonic() < end
            time.sleep(0.02)


def test_libraries_of_others_are_not_loaded(tmp_path):
    """
    Ollama names folders with a ggml of its own, which may be another one.
    """
    for name in (
        "libggml-base.so.0",
        "libggml-cpu.so.0",
        "libggml.so.0",
        "libllama.so.0",
    ):
        (tmp_path / name).write_text("no library")
    foreign = {
        "LD_LIBRARY_PATH": str(tmp_path),
        "GGML_BACKEND_PATH": str(tmp_path / "x"),
    }
    answer = subprocess.run(
        [*OURS, "--list-devices"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={**os.environ, **foreign},
    )

    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout.startswith("Available devices:")


def test_an_unknown_flag_ends_the_server(command):
    """
    With the status and the words that are looked for.
    """
    answer = run(command, "--no-such-flag")

    assert answer.returncode == 1
    assert "error: invalid argument: --no-such-flag" in answer.stderr


def test_a_model_that_is_not_there_ends_the_server(command, tmp_path):
    """
    With a line of an error.
    """
    port = str(free_port())
    answer = run(
        command, "-m", str(tmp_path / "none.gguf"), "--port", port, "--offline"
    )

    assert answer.returncode == 1
    assert "error" in answer.stderr


# -- what is sent and read ---------------------------------------------------------------


def test_chats_of_ollama(client):
    """
    llama.cpp's names in a chat; counts and times in the chunk that has the reason.
    """
    body = {
        "messages": CHAT,
        "n_predict": 4,
        "n_keep": 4,
        "repeat_last_n": 64,
        "typical_p": 1.0,
        "cache_prompt": True,
        "chat_template_kwargs": {},
        "seed": 1,
    }
    health = client.get("/health").json()
    chunks = events(client, "/v1/chat/completions", body)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    [last] = [chunk for chunk in chunks if "timings" in chunk]

    assert health["status"] == "ok"
    assert all(set(choice["delta"]) <= {"role", "content"} for choice in choices)
    assert last["choices"][0]["finish_reason"] in ("length", "stop")
    counts = {"cache_n", "prompt_n", "prompt_ms", "predicted_n", "predicted_ms"}
    assert counts <= set(last["timings"])


def test_completions_of_ollama(client):
    """
    Streams with probabilities; the last event has stop, its type and the times.
    """
    body = {
        "prompt": "a prompt",
        "n_predict": 3,
        "n_keep": 4,
        "n_probs": 2,
        "preserved_tokens": [],
        "typical_p": 1.0,
        "ignore_eos": True,
        "cache_prompt": True,
    }
    *parts, last = events(client, "/completion", body)

    assert (last["stop"], last["stop_type"]) == (True, "limit")
    assert {"cache_n", "prompt_n", "predicted_n"} <= set(last["timings"])
    [entry] = parts[0]["completion_probabilities"]
    assert {"token", "logprob", "top_logprobs"} <= set(entry)


def test_tokens_and_templates_of_ollama(client):
    """
    There and back, and the prompt of a chat.
    """
    question = {"content": "a text", "add_special": False, "parse_special": True}
    tokens = posted(client, "/tokenize", question)["tokens"]
    text = posted(client, "/detokenize", {"tokens": tokens})["content"]
    prompt = posted(client, "/apply-template", {"messages": CHAT})["prompt"]

    assert text.strip() == "a text"
    assert "hi" in prompt


def test_gaps_of_llama_vim(client):
    """
    Chunks with their times, limits, chosen fields of the answer; then a warm-up.
    """
    body = {
        "id_slot": 0,
        "input_prefix": "def f():\n",
        "input_suffix": "\n",
        "input_extra": [{"text": "x = 1\n", "time": [1, 2], "filename": "a.py"}],
        "prompt": "    ",
        "n_predict": 8,
        "n_indent": 4,
        "top_k": 40,
        "top_p": 0.9,
        "stream": False,
        "samplers": ["top_k", "top_p", "infill"],
        "cache_prompt": True,
        "t_max_prompt_ms": 500,
        "t_max_predict_ms": 1000,
        "response_fields": [
            *(
                "content",
                "timings/prompt_n",
                "timings/prompt_ms",
                "timings/predicted_n",
            ),
            *("timings/predicted_ms", "truncated", "tokens_cached"),
        ],
    }
    gap = posted(client, "/infill", body)
    warm_up = {"n_predict": 0, "samplers": [], "response_fields": [""]}
    nothing = posted(client, "/infill", body | warm_up)

    assert set(gap) == set(body["response_fields"])
    assert nothing == {}


def test_facts_of_editors(client):
    """
    llama.vscode and Zed look for the context, and for what the template can do.
    """
    [model] = client.get("/v1/models").json()["data"]
    props = client.get("/props", params={"autoload": "false"}).json()
    tokens = posted(client, "/tokenize", {"content": "a text"})["tokens"]

    assert model["owned_by"] == "llamacpp"
    assert model["meta"]["n_ctx"] == props["default_generation_settings"]["n_ctx"]
    assert model["meta"]["n_ctx_train"] == 2048
    assert "status" not in model
    assert props["modalities"]["vision"] is False
    assert {"supports_tools", "supports_tool_calls"} <= set(props["chat_template_caps"])
    assert len(tokens) > 1


def test_chunks_of_zed(client):
    """
    Each has a model, a kind and choices, that with the counts, too.
    """
    body = {
        "messages": CHAT,
        "max_tokens": 3,
        "stream_options": {"include_usage": True},
    }
    chunks = events(client, "/v1/chat/completions", body)

    assert all({"model", "object", "choices"} <= set(chunk) for chunk in chunks)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] <= 3


def test_models_of_ramalama_and_codex(client):
    """
    The alias is the name in both lists.
    """
    listed = client.get("/models").json()

    assert [model["name"] for model in listed["models"]] == ["tiny"]
    assert [model["id"] for model in listed["data"]] == ["tiny"]


def test_slots_and_metrics_of_lemonade_and_jan(client):
    """
    What is processing, and counts for monitors.
    """
    slots = client.get("/slots").json()
    metrics = client.get("/metrics")

    assert [slot["id"] for slot in slots] == [0, 1]
    assert not any(slot["is_processing"] for slot in slots)
    assert "llamacpp:prompt_tokens_total" in metrics.text


def test_scales_of_adapters(client):
    """
    For all requests from then on.
    """
    question = {
        "prompt": "a prompt",
        "n_predict": 6,
        "temperature": 0,
        "cache_prompt": False,
    }
    [before] = client.get("/lora-adapters").json()
    with_it = posted(client, "/completion", question)["content"]
    done = posted(client, "/lora-adapters", [{"id": 0, "scale": 0.0}])
    [after] = client.get("/lora-adapters").json()
    without = posted(client, "/completion", question)["content"]
    posted(client, "/lora-adapters", [{"id": 0, "scale": 1.0}])

    assert (before["scale"], after["scale"], done) == (1.0, 0.0, {"success": True})
    assert with_it != without


def test_vectors_of_old_clients(command):
    """
    In llama-server's own form, and without a norm where that is question for.
    """
    flags = ["-m", str(tiny_model("bert")), "--port", str(free_port()), "--embedding"]
    with started(command, flags) as server:
        polling(0.1, 1.0)(server)
        with server.client() as client:
            [own] = posted(client, "/embedding", {"content": "a text"})
            body = {"input": "a text", "embd_normalize": -1}
            raw = posted(client, "/v1/embeddings", body)
            usual = posted(client, "/v1/embeddings", {"input": "a text"})

    [vector] = own["embedding"]
    assert own["index"] == 0
    assert vector == pytest.approx(usual["data"][0]["embedding"], abs=1e-4)
    assert raw["data"][0]["embedding"] != usual["data"][0]["embedding"]
    assert usual["usage"]["prompt_tokens"] > 0


def test_a_prompt_that_is_too_long_is_known_by_its_words(client):
    """
    Ollama looks for them in the text of the error.
    """
    body = {"prompt": "a " * 9000, "n_predict": 1}
    answer = client.post("/completion", json=body)

    assert answer.status_code == 400
    assert "context size" in answer.json()["error"]["message"]
    assert answer.json()["error"]["type"] == "exceed_context_size_error"
