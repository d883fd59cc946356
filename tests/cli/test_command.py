"""The commands from arguments to exit status, on an engine without a model."""

import asyncio
import io
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from pyllama_raw.api.engine import AsyncEngine
from pyllama_raw.cli import command, generate, main
from pyllama_raw.cli.generate import JsonLines
from pyllama_raw.errors import LibraryNotBuilt, ModelLoadFailed
from pyllama_raw.testing import FakeExecutor, fake_engine, fake_limits
from tests.cli.support import FakeTty
from tests.support.limits import LIMIT_S

Cli = Callable[..., tuple[int, str, str]]

TURNS = 20  # of the event loop: more than a task needs to hand its request in


@pytest.fixture
def executor() -> FakeExecutor:
    """What each engine's own one is like."""
    return FakeExecutor(fake_limits())


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, executor: FakeExecutor) -> list[object]:
    """What the engine was opened with; the engine is fake."""
    calls: list[object] = []

    def open_fake(model: object, config: object, needs: object) -> AsyncEngine:
        calls.extend((model, config))
        own = FakeExecutor(executor.limits, executor.flag, on_step=executor._on_step)
        return fake_engine(own)

    monkeypatch.setattr(AsyncEngine, "open", open_fake)
    monkeypatch.setattr(generate, "resolve_model", lambda spec: spec or "default")
    return calls


@pytest.fixture
def cli(
    opened: list[object],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Cli:
    """Run the command; return status, stdout and stderr."""

    def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        data = io.BytesIO(stdin.encode())
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(data))
        status = main(arguments)
        return status, *capsys.readouterr()

    return run


def lines_of(out: str) -> list[dict[str, object]]:
    """Objects by index."""
    return sorted(map(json.loads, out.splitlines()), key=lambda line: line["index"])


def test_prompts_become_text(cli: Cli):
    """
    Every prompt gets its title and text, in the order of the arguments.
    """
    status, out, err = cli("generate", "hello", "world", "--max-tokens", "4")

    assert (status, err) == (0, "")
    assert out == "[0] hello\neway\n\n[1] world\nayms\n"


def test_flags_reach_the_engine(cli: Cli, opened: list[object]):
    """
    Model and options arrive as they were given; the rest are the defaults.
    """
    cli(
        *("generate", "a", "--max-tokens", "1", "--model", "m.gguf", "--slots", "3"),
        *(
            "--n-ctx",
            "999",
            "--token-budget",
            "64",
            "--deterministic",
            "--no-kv-unified",
        ),
        *("--flash-attn", "on", "--n-batch", "256", "--n-ubatch", "128", "--threads"),
        *("2", "--gpu-layers", "0", "--context-full", "shift"),
    )

    model, config = opened
    assert model == "m.gguf"
    assert config.model_dump(exclude_defaults=True) == {
        "model": {"n_gpu_layers": 0, "chat_template": "auto"},
        "context": {
            "n_ctx": 999,
            "n_batch": 256,
            "n_ubatch": 128,
            "n_threads": 2,
            "kv_unified": False,
            "flash_attn": "on",
        },
        "scheduler": {
            "n_slots": 3,
            "token_budget": 64,
            "context_full": "shift",
            "max_waiting_tokens": 2**40,
        },
        "max_adapter_bytes": 2**60,
        "fit_ctx": 4096,
        "deterministic": True,
    }


def test_the_fast_way_of_deterministic_has_a_flag(cli: Cli, opened: list[Any]):
    """
    A value behind the other flag could be taken for a prompt.
    """
    cli("generate", "a", "--max-tokens", "1", "--deterministic-fast")

    assert opened[1].deterministic == "fast"


def test_json_lines_and_bad_lines(cli: Cli):
    """
    Bad lines, refused prompts and good ones each give an object; one failure is status 1.
    """
    stdin = (
        '{"prompt": "a"}\nbad\n{"prompt": [900]}\n{"prompt": [1], "max_tokens": 2}\n'
    )

    status, out, err = cli(
        "generate", "--input", "-", "--jsonl", "--max-tokens", "3", stdin=stdin
    )

    lines = lines_of(out)
    assert (status, err) == (1, "")
    assert [line["index"] for line in lines] == [0, 1, 2, 3]
    assert [line.get("usage", {}).get("completion_tokens") for line in lines] == [
        3,
        None,
        None,
        2,
    ]
    assert ["error" in line for line in lines] == [False, True, True, False]


def test_several_outputs_and_log_probabilities(cli: Cli):
    """
    --n shows the texts of a prompt by index, or lists them in its object, with what
    --logprobs and --prompt-logprobs ask for.
    """
    common = ("generate", "hello", "--n", "2", "--max-tokens", "4")

    _, shown, _ = cli(*common)
    _, written, _ = cli(*common, "--jsonl", "--logprobs", "1", "--prompt-logprobs", "0")

    choices = json.loads(written)["choices"]
    assert shown == "(0) eway\n(1) eway\n"
    assert [choice["choice"] for choice in choices] == [0, 1]
    assert [len(choice["logprobs"]) for choice in choices] == [4, 4]
    assert [len(choice.get("prompt_logprobs", ())) for choice in choices] == [5, 0]


def test_more_prompts_than_the_queue_holds(cli: Cli, monkeypatch: pytest.MonkeyPatch):
    """
    Inputs beyond the limit of the waiting queue are held back, not refused, however long
    the engine is busy with its first step.
    """
    loops: list[asyncio.AbstractEventLoop] = []

    @asynccontextmanager
    async def open_fake(*_: object, **__: object) -> AsyncIterator[AsyncEngine]:
        loops.append(asyncio.get_running_loop())
        own = FakeExecutor(fake_limits(), on_step=let_all_come)
        async with fake_engine(own, max_waiting=2) as engine:
            yield engine

    def let_all_come(step: int, _: object) -> None:
        for _ in range(TURNS * (step == 0)):
            turned = Event()
            loops[0].call_soon_threadsafe(turned.set)
            assert turned.wait(LIMIT_S)

    monkeypatch.setattr(AsyncEngine, "open", open_fake)
    stdin = '{"prompt": "a"}\n' * 1500

    status, out, _ = cli(
        "generate", "--input", "-", "--jsonl", "--max-tokens", "1", stdin=stdin
    )

    assert (status, len(out.splitlines())) == (0, 1500)


def test_deadline_is_no_success(cli: Cli, executor: FakeExecutor):
    """
    A request that ran out of time keeps its reason; the status is 1.
    """
    executor._on_step = lambda *_: executor.flag.wait(0.01)

    status, out, _ = cli("generate", "a", "--deadline-s", "0.001", "--jsonl")

    assert (status, lines_of(out)[0]["finish_reason"]) == (1, "deadline")


def test_summary_is_written(cli: Cli, tmp_path: Path):
    """
    The totals are in the file; stdout has the text only.
    """
    path = tmp_path / "summary.json"

    status, out, _ = cli("generate", "hi", "--max-tokens", "5", "--summary", str(path))

    totals = json.loads(path.read_text())
    assert (status, len(out)) == (0, 6)
    assert (totals["requests"], totals["completion_tokens"]) == (1, 5)
    assert totals["engine"]["output_tokens"] == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate"], "give prompts or --input"),
        (["generate", "a", "--input", "-"], "give prompts or --input"),
        (["generate", "a", "--system", "b"], "--system is allowed with --chat only"),
        (
            ["generate", "a", "--n-batch", "3"],
            "--n-ubatch 512: give at most --n-batch (3)",
        ),
        (
            ["generate", "a", "--flash-attn", "off", "--type-v", "q8_0"],
            "--type-v 'q8_0': give f32, f16 or bf16 without flash attention",
        ),
        (
            ["generate", "a", "--max-tokens", "4", "--min-tokens", "9"],
            "--min-tokens 9: give at most --max-tokens (4)",
        ),
    ],
)
def test_wrong_use_is_told_before_a_model_is_opened(
    cli: Cli, opened: list[object], arguments: list[str], message: str
):
    """
    Options out of range end with status 2 and the name of the option.
    """
    status, out, err = cli(*arguments)

    assert (status, out, opened) == (2, "", [])
    assert err.startswith("error: ")
    assert message in err


def test_missing_input_file(cli: Cli, tmp_path: Path):
    """
    A file that cannot be read is told by name, with status 1.
    """
    status, out, err = cli("generate", "--input", str(tmp_path / "none"))

    assert (status, out) == (1, "")
    assert err == f"error: {tmp_path}/none: No such file or directory\n"


def test_summary_that_cannot_be_written(cli: Cli, opened: list[object], tmp_path: Path):
    """
    It is told before the work begins.
    """
    status, out, err = cli("generate", "a", "--summary", str(tmp_path / "no" / "s"))

    assert (status, out, opened) == (2, "", [])
    assert err == (
        f"error: {tmp_path}/no/s cannot be written: there is no folder {tmp_path}/no\n"
    )


@pytest.mark.parametrize(
    "error", [LibraryNotBuilt("build it"), ModelLoadFailed("m.gguf", "bad magic")]
)
def test_engine_that_cannot_start(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    """
    A failure to open is one line on stderr, no traceback.
    """

    def refuse(*_: object, **__: object) -> AsyncEngine:
        raise error

    monkeypatch.setattr(AsyncEngine, "open", refuse)

    assert cli("generate", "a") == (1, "", f"error: {error}\n")


def test_interrupt_keeps_finished_lines(
    cli: Cli, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
):
    """
    Ctrl-C ends the run with status 130; what was finished has been written.
    """
    written, finished = Event(), JsonLines.finished

    def finish(*arguments: object) -> None:
        finished(*arguments)
        written.set()

    def interrupt(step: int, plan: object) -> None:
        if step == 1:
            assert written.wait(LIMIT_S)
            os.kill(os.getpid(), signal.SIGINT)
            assert executor.flag.wait(LIMIT_S), "cancelled"

    monkeypatch.setattr(JsonLines, "finished", finish)
    monkeypatch.setattr(command, "signal", lambda *_: None)
    executor._on_step = interrupt
    stdin = '{"prompt": "a", "max_tokens": 1}\n{"prompt": "b"}\n'

    status, out, err = cli("generate", "--input", "-", "--jsonl", stdin=stdin)

    first, *others = lines_of(out)
    assert (status, err, first["index"]) == (130, "", 0)
    assert all(line["finish_reason"] == "cancelled" for line in others)


def test_reader_that_leaves(cli: Cli, monkeypatch: pytest.MonkeyPatch):
    """
    A closed pipe ends the run with status 1 and no traceback.
    """
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)

        status, _, err = cli("generate", "a", "b", "--jsonl")

    assert (status, err) == (1, "")


def test_status_line_is_for_terminals(
    opened: list[object], monkeypatch: pytest.MonkeyPatch
):
    """
    With stderr on a terminal, a person sees progress and a last line with totals.
    """

    class Stderr(FakeTty):
        def reconfigure(self, **_: str) -> None:
            pass

    err = Stderr()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", err)

    assert main(["generate", "a", "--max-tokens", "2"]) == 0

    assert "loading the model" in err.getvalue()
    assert "0/1 done" in err.getvalue()
    assert "1/1 succeeded, 2 tokens" in err.getvalue()
