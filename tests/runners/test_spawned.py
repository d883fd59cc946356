"""Servers as child processes: they are started, watched, replaced and ended."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import pytest

from pyllama_raw.errors import ClosedError, ConfigError
from pyllama_raw.options.sampling import SamplingParams
from pyllama_raw.runners import (
    COMPATIBLE,
    Dialect,
    OwnServer,
    RebuildCause,
    RemoteRunner,
    SpawnedRunner,
)
from pyllama_raw.runners.child import Child
from pyllama_raw.runners.errors import NotReady, RunnerDied
from pyllama_raw.runners.keeper import members
from tests.support.limits import LIMIT_S
from tests.support.native_loops import anyio_backend  # noqa: F401

pytestmark = pytest.mark.anyio
STUB = Path(__file__).with_name("stub_server.py")
FOREVER = "for ever"
PARENT = f"""
import anyio
from tests.runners.test_spawned import Stub
from pyllama_raw.runners import SpawnedRunner

async def main():
    async with SpawnedRunner(Stub()) as runner:
        print(runner.base_url, flush=True)
        await anyio.sleep({LIMIT_S})

anyio.run(main)
"""


@dataclass
class Stub:
    """A server without a model; see stub_server.py."""

    way: str = "well"
    name: str = "stub"
    served_name: str = "a"
    dialect: Dialect = COMPATIBLE

    def check(self) -> None:
        """Nothing."""

    async def command(self) -> list[str]:
        return [sys.executable, "-S", str(STUB), self.way]

    def environment(self, key: str) -> dict[str, str]:
        return {"STUB_KEY": key}


def command_of(pid: int | None) -> list[bytes]:
    """The command line of a process as others see it; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except FileNotFoundError:
        return []


async def until(is_true: Callable[[], bool]) -> None:
    """Wait for another task or process."""
    while not is_true():  # noqa: ASYNC110
        await anyio.sleep(0.01)


async def ended(url: str) -> None:
    """Wait until nobody listens at *url*."""
    parts = urlsplit(url)

    def is_gone() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((parts.hostname, parts.port)) != 0

    await until(is_gone)


async def test_what_has_not_begun_says_so():
    """
    It has no address and no process, and is not ready; it starts when it is asked.
    """
    runner = SpawnedRunner(Stub())
    before = await runner.health()
    fresh = (runner.base_url, runner.pid, before.ready, before.detail)
    result = await runner.generate("a").collect()
    during = await runner.health()
    await runner.aclose()

    assert fresh == ("", None, False, "Runtime not initialized")
    assert result.text == "well"
    assert (during.ready, during.detail) == (True, "healthy")
    assert (runner.base_url, runner.pid) == ("", None)


async def test_the_key_is_not_on_the_command_line():
    """
    Others of the machine see it; the server has it from its environment.
    """
    async with SpawnedRunner(Stub()) as runner:
        await runner.generate("a").collect()  # refused without the key
        command = command_of(runner.pid)

    assert command[1:-1] == [b"-S", str(STUB).encode(), b"well"]


async def test_kill_of_a_child_ends_its_calls_and_the_next_one_is_served():
    """
    Each call under way raises RunnerDied with the code, after what it had read.
    """
    ends: list[tuple[str, int | None]] = []
    n_begun = 0

    async def ask() -> None:
        nonlocal n_begun
        text = ""
        try:
            async with runner.generate(FOREVER) as run:
                async for delta in run:
                    text += delta.text
                    n_begun += 1
        except RunnerDied as error:
            ends.append((text, error.returned))

    with anyio.fail_after(LIMIT_S):
        async with SpawnedRunner(Stub()) as runner:
            first = runner.pid
            async with anyio.create_task_group() as group:
                for _ in range(3):
                    group.start_soon(ask)
                await until(lambda: n_begun == 3)
                os.kill(first, signal.SIGKILL)
            dead = await runner.health()
            after = await runner.generate("a").collect()
            second = runner.pid

    assert ends == [("well", -signal.SIGKILL)] * 3
    assert (dead.live, dead.ready) == (False, False)
    assert dead.detail.startswith("Health check failed: ")
    assert after.text == "well"
    assert second not in (None, first)


async def test_a_child_that_died_idle_is_replaced():
    """
    The request that finds it dead does not fail.
    """
    with anyio.fail_after(LIMIT_S):
        async with SpawnedRunner(Stub()) as runner:
            first, url = runner.pid, runner.base_url
            os.kill(first, signal.SIGKILL)
            await ended(url)
            await until(lambda: runner.pid is None)
            result = await runner.generate("a").collect()

    assert result.text == "well"


async def test_kill_of_the_parent_leaves_no_orphan():
    """
    The child ends with it, though nobody could tell it so.
    """
    with subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        url = parent.stdout.readline().strip()
        parent.kill()
        parent.wait()
        with anyio.fail_after(LIMIT_S):
            await ended(url)

    assert url.startswith("http://127.0.0.1:")


async def test_the_end_of_a_child_that_starts_is_told():
    """
    At once, by its code and by what it wrote; it is not that it took too long.
    """
    runner = SpawnedRunner(Stub("three"))
    with anyio.fail_after(LIMIT_S), pytest.raises(RunnerDied) as caught:
        await runner.start()
    health = await runner.health()
    await runner.aclose()

    assert (caught.value.returned, caught.value.stderr) == (3, "the model is missing")
    assert (health.live, health.ready) == (False, False)


async def test_what_cannot_be_run_says_why():
    """
    By the code that a shell has for it.
    """
    child = Child("llama-server", ["/nowhere/llama-server"], {})
    with anyio.fail_after(LIMIT_S), pytest.raises(RunnerDied) as caught:
        await child.pause(LIMIT_S)

    assert caught.value.returned == 127
    assert caught.value.stderr.startswith("Failed to spawn llama-server: [Errno 2]")


async def test_a_megabyte_of_messages_blocks_nobody():
    """
    The server starts all the same, and the end of them is kept.
    """
    with anyio.fail_after(LIMIT_S):
        async with SpawnedRunner(Stub("loud")) as runner:
            result = await runner.generate("a").collect()

    assert result.text == "well"


async def test_a_server_that_never_gets_ready_is_ended():
    """
    The error has the seconds that it had.
    """
    runner = SpawnedRunner(Stub("silent"), start_s=0.5)
    with anyio.fail_after(LIMIT_S), pytest.raises(NotReady) as caught:
        await runner.start()

    assert str(caught.value).startswith(
        "stub failed to become ready within 0.5 seconds: raise start_s"
    )
    assert runner.pid is None


async def test_a_deaf_child_is_killed_and_leaves_no_zombie():
    """
    A second close does nothing.
    """
    runner = SpawnedRunner(Stub("deaf"))
    await runner.start()
    pid = runner.pid
    with anyio.fail_after(LIMIT_S):
        await runner.aclose()
        await runner.aclose()

    assert not Path(f"/proc/{pid}").exists()  # noqa: ASYNC240


async def test_an_owner_that_leaves_while_it_starts_leaves_no_child():
    """
    Cancelled or closed; who waits for it is told that it was closed.
    """
    runner = SpawnedRunner(Stub("silent"))
    with anyio.move_on_after(0.5):
        await runner.start()
    cancelled = runner.pid

    with anyio.fail_after(LIMIT_S):
        async with anyio.create_task_group() as group:

            async def wait() -> None:
                with pytest.raises(ClosedError):
                    await runner.start()

            group.start_soon(wait)
            await until(lambda: runner.pid is not None)
            await runner.aclose()

    assert (cancelled, runner.pid) == (None, None)


async def test_a_child_that_takes_no_requests_is_not_ready():
    """
    It lives, and says what it answered.
    """
    async with SpawnedRunner(Stub("busy")) as runner:
        health = await runner.health()

    assert (health.live, health.ready) == (True, False)
    assert health.detail == "Health check returned: status 503"


async def test_a_warm_up_that_fails_is_only_told(caplog):
    """
    The server serves all the same: here it has no chats.
    """
    async with SpawnedRunner(Stub(), warms=True) as runner:
        result = await runner.generate("a", SamplingParams(max_tokens=1)).collect()

    assert result.text == "well"
    assert "stub was not warmed up" in caplog.text


# -- what a child leaves, and how it leaves -----------------------------------


@dataclass
class Shell(Stub):
    """A wrapper around a server, as scripts of administrators are."""

    async def command(self) -> list[str]:
        return ["/bin/sh", "-c", self.way]


def tasks_and_descriptors() -> set[object]:
    """Threads, and descriptors with what they are of: a number alone may be used again."""
    descriptors = set[object]()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of this look
            descriptors.add((entry.name, entry.readlink()))
    return descriptors | {*threading.enumerate()}


@pytest.mark.skipif(sys.platform != "linux", reason="it looks at /proc")
@pytest.mark.parametrize(
    "script",
    [
        "sleep 300; true",
        "sleep 300 & sleep 300",
        "trap '' TERM; sleep 300; sleep 300",
        "set -m; sleep 300 & sleep 300 & wait",
        "sleep 300 & exit 3",
        "setsid sleep 30 & sleep 300",
    ],
)
async def test_nothing_that_a_child_has_started_stays(script):
    """
    Its whole session ends with it, jobs of a shell, too; no keeper, thread or descriptor is
    left. One that made a session of its own is let go.
    """
    async with SpawnedRunner(Stub()) as runner:  # what is made once is made now
        await runner.generate("a").collect()
    before = tasks_and_descriptors()
    runner = SpawnedRunner(Shell(script), start_s=0.5)
    with anyio.fail_after(LIMIT_S):
        with pytest.raises((NotReady, RunnerDied)):
            await runner.start()
        session = runner._child.pid
        await runner.aclose()
        await until(lambda: members(session) == [])
        # Those of earlier tests may end meanwhile.
        await until(lambda: tasks_and_descriptors() <= before)

    assert not Path(f"/proc/{session}").exists()  # noqa: ASYNC240


async def test_a_kill_of_the_wrapper_ends_the_server_in_it():
    """
    Nobody would listen to the server, and it would keep its memory.
    """
    script = f"{sys.executable} -S {STUB} well; true"
    with anyio.fail_after(LIMIT_S):
        async with SpawnedRunner(Shell(script)) as runner:
            first, url = runner.pid, runner.base_url
            os.kill(first, signal.SIGKILL)
            await ended(url)
            await until(lambda: runner.pid is None)
            result = await runner.generate("a").collect()

    assert (result.text, members(first)) == ("well", [])


@pytest.mark.parametrize("way", ["leaves", "drains"])
async def test_a_child_that_was_asked_to_end_keeps_what_it_has(way, caplog):
    """
    It serves its request, and a new one starts another child beside it.
    """
    caplog.set_level("INFO")
    with anyio.fail_after(LIMIT_S):
        async with SpawnedRunner(Stub(way)) as runner:
            first, url = runner.pid, runner.base_url
            async with runner.generate(FOREVER) as run:
                await anext(run)
                os.kill(first, signal.SIGTERM)
                if way == "leaves":
                    await ended(url)
                else:
                    while (await runner.health()).ready:  # noqa: ASYNC110
                        await anyio.sleep(0.01)
                results = [await runner.generate("a").collect() for _ in range(2)]
                lives, second = bool(command_of(first)), runner.pid

    assert [result.text for result in results] == ["well", "well"]
    assert (lives, second not in (None, first)) == (True, True)
    assert command_of(first) == []
    assert (runner.counts.n_retries, runner.counts.n_restarts) == (1, 1)
    for line in (
        "takes no more requests",
        f"stub: {sys.executable} -S",
        "serves at http",
    ):
        assert line in caplog.text


async def test_the_owner_may_lend_its_child():
    """
    By its address and its key, which may be one of his own; nothing shows the key.
    """
    runner = SpawnedRunner(Stub(), api_key="mine")
    async with (
        runner,
        RemoteRunner(runner.base_url, "a", api_key=runner.api_key) as other,
    ):
        result = await other.generate("a").collect()

    assert (result.text, runner.api_key) == ("well", "mine")
    assert "mine" not in repr(runner)
    server = OwnServer("m.gguf", host="0.0.0.0", port=8123)  # noqa: S104
    assert (await server.command())[-4:] == ["--host", "0.0.0.0", "--port", "8123"]  # noqa: S104


async def test_verbs_are_those_of_the_model_once_it_is_there():
    """
    Before that all that the program has words for; given ones stay.
    """
    runner, told = (
        SpawnedRunner(Stub("embeds")),
        SpawnedRunner(Stub("embeds"), verbs=["rank"]),
    )
    before = runner.capabilities.verbs
    async with runner, told:
        after = runner.capabilities.verbs, told.capabilities.verbs

    assert (before, after) == ({"generate", "embed"}, ({"embed"}, {"rank"}))


async def test_a_child_begins_anew():
    """
    Its requests end first, unless the device is poisoned; new ones go to another child.
    """
    with anyio.fail_after(LIMIT_S):
        async with SpawnedRunner(Stub()) as runner:
            first = runner.pid
            await runner.rebuild("new", cause=RebuildCause.CONFIG_CHANGED)
            second, key = runner.pid, runner.api_key
            async with runner.generate(FOREVER) as run:
                await anext(run)
                await runner.rebuild(cause=RebuildCause.DEVICE_POISONED)
                with pytest.raises(RunnerDied):
                    await anext(run)
            result = await runner.generate("a").collect()

    assert (result.text, key) == ("well", "new")
    assert len({first, second, runner.pid}) == 3
    assert command_of(first) == command_of(second) == []


async def test_what_the_system_cannot_start_is_a_mistake_of_options():
    """
    A name with NUL, or no descriptors: an error that says so, and no thread.
    """
    before = threading.active_count()
    with pytest.raises(ConfigError, match="Failed to spawn a: embedded null byte"):
        Child("a", ["a\0b"], {})

    assert threading.active_count() == before


async def test_lines_of_a_child_are_heard_as_they_come():
    """
    Whole ones, the beginning of a long one, and nothing of one that has no end.
    """
    lines = []
    program = (
        "import sys; sys.stdout.write('a\\n' + 'b' * 200_000 + '\\n\\xfc\\n\\nend')"
    )
    child = Child("lines", [sys.executable, "-c", program], {}, hears=lines.append)
    assert await child.ended_within(LIMIT_S)
    await child.end()

    assert lines == ["a", "b" * 1000, "ü", ""]
