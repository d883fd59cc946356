"""The command as a person runs it, on the default model."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.media.files import image_file, wav_file
from tests.support.limits import LIMIT_S
from tests.support.tiny import tiny_adapter, tiny_model, tiny_projector

pytestmark = pytest.mark.native

COMMAND = (sys.executable, "-m", "pyllama_raw")
ENVIRONMENT = {**os.environ, "OMP_WAIT_POLICY": "passive"}  # share busy machines


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        env=ENVIRONMENT,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def test_generate_serves_text_ids_and_messages(model_path: Path, tmp_path: Path):
    """
    All kinds of prompts run at once; stdout has the lines and stderr is silent.
    """
    summary = tmp_path / "summary.json"
    inputs = [
        {"prompt": "The capital of France is", "max_tokens": 2},
        {"prompt": [504, 3575], "max_tokens": 3},
        {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
        {"prompt": "x", "max_tokens": -1},
    ]

    done = run(
        *("generate", "--model", str(model_path), "--input", "-", "--jsonl"),
        *("--temperature", "0", "--n-ctx", "512", "--slots", "2"),
        *("--summary", str(summary)),
        stdin="\n".join(map(json.dumps, inputs)),
    )

    lines = sorted(map(json.loads, done.stdout.splitlines()), key=lambda x: x["index"])
    assert (done.returncode, done.stderr) == (1, "")
    assert lines[0]["text"] == " Paris."
    assert [len(line.get("token_ids", ())) for line in lines] == [2, 3, 4, 0]
    assert lines[3]["error"]["type"] == "InvalidRequest"
    assert json.loads(summary.read_text())["completion_tokens"] == 9


def test_generate_shows_text(model_path: Path):
    """
    A single prompt prints its text and a line break, nothing else.
    """
    done = run(
        *("generate", "--model", str(model_path), "The capital of France is"),
        *("--temperature", "0", "--max-tokens", "2", "--n-ctx", "512"),
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, " Paris.\n", "")


def test_interrupt_ends_cleanly(model_path: Path):
    """
    Ctrl-C while a request runs: status 130, no traceback, finished lines stay.
    """
    process = subprocess.Popen(
        [*COMMAND, "generate", "--model", str(model_path), "--input", "-", "--jsonl"],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    long = '{"prompt": "a", "max_tokens": 2000, "ignore_eos": true}'
    process.stdin.write(f'{{"prompt": "b", "max_tokens": 1}}\n{long}\n')
    process.stdin.close()
    process.stdin = None
    first = json.loads(process.stdout.readline())
    process.send_signal(signal.SIGINT)

    out, err = process.communicate(timeout=LIMIT_S)

    assert (first["index"], out, err, process.returncode) == (0, "", "", 130)


def test_info_shows_model_and_limits(model_path: Path):
    """
    The facts of file, devices and context come as one object.
    """
    done = run("info", str(model_path), "--json", "--slots", "2", "--n-ctx", "512")

    facts = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    parts = "library", "kernels", "devices", "file", "model", "memory", "limits"
    assert tuple(facts) == parts
    assert facts["memory"]["can_shift"] is True
    assert facts["file"]["n_vocab"] == 49152
    assert (facts["limits"]["n_slots"], facts["limits"]["n_ctx"]) == (2, 512)
    assert facts["limits"]["kernels"].startswith("attention ")


def test_info_of_a_bad_file_still_shows_the_library(tmp_path: Path):
    """
    What is known is shown, then the error; the status is 1.
    """
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"not a model")

    done = run("info", str(path))

    assert done.returncode == 1
    assert done.stdout.startswith("library\n")
    assert done.stderr.startswith("error: ")
    assert str(path) in done.stderr


def test_model_without_vocabulary_takes_ids():
    """
    Token ids go in and come out; text is refused for that line only.
    """
    done = run(
        *("generate", "--model", str(tiny_model("llama-no-vocab")), "--input", "-"),
        *("--jsonl", "--max-tokens", "3", "--n-ctx", "256", "--slots", "2"),
        stdin='{"prompt": [5, 6, 7]}\n{"prompt": "a"}\n',
    )

    lines = sorted(map(json.loads, done.stdout.splitlines()), key=lambda x: x["index"])
    assert (done.returncode, done.stderr) == (1, "")
    assert (lines[0]["text"], len(lines[0]["token_ids"])) == ("", 3)
    assert lines[1]["error"]["type"] == "Unsupported"


def test_adapters_are_for_every_request_that_names_none(tmp_path: Path):
    """
    Of a line its own are used, by name and scale; `chat` answers with those of the flags, and
    a file that is none is told.
    """
    model = ("--model", str(tiny_model("llama")), "--n-ctx", "1024")
    options = ("--temperature", "0", "--max-tokens", "8", "--ignore-eos")
    flags = ("--adapter", f"a={tiny_adapter('lora-a')}:0.5")
    flags += ("--adapter", f"b={tiny_adapter('control')}")
    lines = [{"prompt": "one"}, {"prompt": "one", "adapters": {}}]
    lines += [
        {"prompt": "one", "adapters": each} for each in ({"a": 0.5, "b": 1}, {"c": 1})
    ]
    done = run(
        *("generate", *model, *options, *flags, "--input", "-", "--jsonl"),
        stdin="\n".join(map(json.dumps, lines)),
    )
    talks = [
        run("chat", *model, *options, *given, stdin="one\n").stdout
        for given in ((), flags)
    ]
    wrong = run("chat", *model, "--adapter", f"a={tmp_path}", stdin="one\n")

    found = sorted(map(json.loads, done.stdout.splitlines()), key=lambda x: x["index"])
    with_it, without, same, unknown = found
    assert with_it["token_ids"] == same["token_ids"] != without["token_ids"]
    assert unknown["error"]["type"] == "AdapterNotFound"
    assert talks[0] != talks[1]
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert wrong.stderr.startswith("error: ")


@pytest.mark.usefixtures("media_library")
def test_generate_shows_an_image_and_a_sound(tmp_path: Path):
    """
    Files on the command line stand before each prompt, and are encoded once.
    """
    image, sound = tmp_path / "a.png", tmp_path / "a.wav"
    image.write_bytes(image_file("PNG"))
    sound.write_bytes(wav_file(8000))
    options = ("--temperature", "0", "--max-tokens", "3", "--jsonl", "--n-ctx", "2048")

    for name, flag, path in (("llava", "--image", image), ("qwen2a", "--audio", sound)):
        projector, model = map(str, tiny_projector(name))
        summary = tmp_path / f"{name}.json"
        files = ("--model", model, "--mmproj", projector, flag, str(path))
        done = run(
            "generate", *files, *options, "--summary", str(summary), "one", "two"
        )

        lines = [json.loads(line) for line in done.stdout.splitlines()]
        assert (done.returncode, done.stderr) == (0, "")
        assert [line["usage"]["media_tokens"] > 0 for line in lines] == [True, True]
        assert all(line["timings"]["encode_s"] >= 0 for line in lines)
        assert json.loads(summary.read_text())["engine"]["encodes"] == 1


def test_a_bad_image_on_the_command_line_is_told(tmp_path: Path):
    """
    A file that is no image ends the command before a model is loaded.
    """
    path = tmp_path / "a.png"
    path.write_bytes(b"hello, world")

    done = run("generate", "--image", str(path), "--mmproj", "x.gguf", "one")

    assert done.returncode != 0
    assert "no PNG" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("media_library")
def test_info_shows_the_projector():
    """
    What it takes, and how much memory it needs.
    """
    projector, model = map(str, tiny_projector("qwen2vl"))

    done = run("info", model, "--mmproj", projector, "--json")

    facts = json.loads(done.stdout)["projector"]
    n_bytes = facts.pop("n_bytes")
    assert facts == {
        "path": projector,
        "sees": True,
        "hears": False,
        "sample_rate": None,
        "uses_mrope": True,
        "n_embd": 64,
    }
    assert n_bytes > 0
