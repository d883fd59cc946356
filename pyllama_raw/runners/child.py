"""
A server as a child process: started, watched and ended; and llama.cpp's server as one.

Rules:
1. One thread reads all that the child writes, so the child never blocks; the end of it is kept.
2. Another one waits for the child, so there is no zombie, whatever its owner does. When the
   child has ended, it kills the rest of the session, so nothing that the child has started stays.
3. Its standard input is a pipe that keeper.py watches: the child ends when this process does.
4. Versions of llama.cpp's server differ in a few flags; which ones a binary takes is read from its
   `--help`.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from math import inf
from pathlib import Path
from threading import Event, Thread
from typing import Any, cast

from anyio import CancelScope, CapacityLimiter, current_time, sleep, to_thread

from pyllama_raw.errors import MAX_REASON, ConfigError, cut
from pyllama_raw.options.machine import NoInterpreter, interpreter
from pyllama_raw.runners.capabilities import Verb
from pyllama_raw.runners.errors import RunnerDied
from pyllama_raw.runners.keeper import CANNOT_RUN, kill_session
from pyllama_raw.runners.remote import LLAMA_SERVER, Dialect
from pyllama_raw.runners.runner import RunnerMetadata

KEEPER = str(Path(__file__).with_name("keeper.py"))
KEPT_BYTES = 2**16  # of what the child has written
PIPE_BYTES = 2**16  # that a pipe holds
MAX_LINE = 1000  # bytes of a line that are told
Hears = Callable[[str], object]
ADDRESS = re.compile(rb"(?:serving at|listening on) (http://[\w.\[\]:]+:\d+)\s")
ANY_HOST = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 - a child that listens on all
LOOK_S = 0.02  # between two looks whether the child has ended
STOP_S = 1.0  # for the child to end after SIGTERM
SAID_S = 0.1  # for the last of what an ended child has written to be read


class Child:
    """
    A process that writes where it listens; it is started when this is made.

    Args:
        environment: variables beside those of this process.
        kept_bytes: of the end of what it writes.
        hears: called with each line that it writes, cut off at MAX_LINE bytes, in a thread of its own.

    Raises:
        ConfigError: the system cannot start it.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        kept_bytes: int = KEPT_BYTES,
        hears: Hears | None = None,
    ) -> None:
        self.name, self._kept_bytes = name, kept_bytes
        self._hears, self._line = hears, bytearray()
        self.url = ""  # at which it listens, once it has told it
        self._written = bytearray()
        self._ended = Event()
        try:
            self._process = subprocess.Popen(  # noqa: S603
                [interpreter(), "-I", "-S", KEEPER, name, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,  # an interrupt from the terminal is for its owner
            )
            self.pid = self._process.pid
            self._start_threads()
        except NoInterpreter as error:
            raise ConfigError(f"{name}: {error}") from error
        # No memory, process, thread or descriptor is left; NUL in a name.
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(f"Failed to spawn {name}: {error}") from error

    @property
    def has_ended(self) -> bool:
        """Whether it runs no more, nor what it has started."""
        return self._ended.is_set()

    @property
    def returned(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None: it runs."""
        return self._process.returncode if self.has_ended else None

    @property
    def said(self) -> str:
        """The end of what it has written."""
        return bytes(self._written).decode(errors="replace").strip()

    @property
    def death(self) -> RunnerDied:
        """The error that tells how it ended."""
        self._reader.join(SAID_S)
        return RunnerDied(self._process.returncode, self.said)

    async def pause(self, wait_s: float) -> None:
        """
        Wait *wait_s*, or until it tells where it listens.

        Raises:
            RunnerDied: it has ended.
        """
        had_url, until = bool(self.url), current_time() + wait_s
        while current_time() < until and bool(self.url) == had_url:
            if await self.ended_within(LOOK_S):
                raise self.death

    async def ended_within(self, limit_s: float) -> bool:
        """Whether it ends within *limit_s*."""
        until = current_time() + limit_s
        while not self.has_ended and current_time() < until:  # noqa: ASYNC110
            await sleep(LOOK_S)
        return self.has_ended

    async def ended(self) -> None:
        """Return when it has ended, without a look now and then."""
        wait = self._ended.wait
        await to_thread.run_sync(
            wait, abandon_on_cancel=True, limiter=CapacityLimiter(1)
        )

    async def end(self, limit_s: float = STOP_S) -> None:
        """Ask its session to end, and kill it if the child lives on after *limit_s*. Can be repeated."""
        with CancelScope(shield=True):
            self.ask_to_end()
            if not await self.ended_within(limit_s):
                kill_session(self.pid)
                await self.ended_within(inf)
            self._reader.join(SAID_S)

    def ask_to_end(self) -> None:
        """Send SIGTERM to the child and what it has started; it may serve its requests first."""
        # The keeper stays in the process group, so its number is that of no other one.
        if not self.has_ended:
            with suppress(OSError):
                os.killpg(self.pid, signal.SIGTERM)

    def _start_threads(self) -> None:
        """Start both, or kill the child. Each closes its own end of the pipe between them."""
        reads = writes = -1
        try:
            reads, writes = os.pipe()
            self._reader = Thread(target=self._read, args=(reads,), daemon=True)
            self._reader.start()
            reads = -1
            Thread(target=self._wait, args=(writes,), daemon=True).start()
        except BaseException:
            kill_session(self.pid)
            self._process.wait()
            for end in (reads, writes):
                if end != -1:
                    os.close(end)
            raise

    def _read(self, ends: int) -> None:
        """Keep what it writes, until it closes its output or *ends* is closed."""
        stdout = self._process.stdout
        assert stdout is not None
        pipe = stdout.fileno()
        os.set_blocking(pipe, False)
        both = select.poll()
        both.register(pipe, select.POLLIN)
        both.register(ends, select.POLLIN)
        with stdout:
            is_last = False
            while not is_last:
                ready = dict(both.poll())
                try:
                    written = os.read(pipe, PIPE_BYTES)
                except BlockingIOError:
                    written = b""
                # A process that has left the session may hold the pipe for ever.
                is_last = ends in ready or not written
                self._written += written
                if self._hears is not None:
                    self._hear(self._hears, written)
                if not self.url and (match := ADDRESS.search(self._written)):
                    self.url = _reachable(match[1].decode())
                del self._written[: -self._kept_bytes]
        os.close(ends)

    def _hear(self, hears: Hears, written: bytes) -> None:
        """Tell the lines that end in *written*."""
        *lines, half = (self._line + written).split(b"\n")
        for line in lines:
            hears(line[:MAX_LINE].decode(errors="replace").strip())
        self._line = half[:MAX_LINE]

    def _wait(self, ends: int) -> None:
        """Wait for its end, kill what it leaves behind, and close *ends*."""
        stdin = self._process.stdin
        assert stdin is not None
        self._process.wait()
        kill_session(self.pid)
        self._ended.set()
        with suppress(OSError):
            stdin.close()
        os.close(ends)


def _reachable(url: str) -> str:
    """*url* as this machine reaches it, if its host stands for all addresses."""
    scheme, _, address = url.partition("//")
    host, _, port = address.rpartition(":")
    return f"{scheme}//{ANY_HOST.get(host, host)}:{port}"


HOST = "127.0.0.1"
HELP_S = 30.0
HELP_BYTES = 2**20
SUFFIX = ".gguf"


@dataclass(frozen=True, slots=True)
class Draft:
    """A small model that proposes tokens."""

    model: str | Path
    n_max: int = 8
    n_min: int = 1
    p_min: float = 0.4


def _flags(*names: str, default: object = None) -> Any:
    """An option that is told by the flags *names*."""
    return field(default=default, metadata={"flags": names})


@dataclass(frozen=True, slots=True)
class LlamaOptions:
    """Options of llama-server, which are told in this order. None: its default."""

    n_ctx: int | None = _flags("--ctx-size")
    """Cells of all slots together."""
    n_batch: int | None = _flags("--batch-size")
    n_ubatch: int | None = _flags("--ubatch-size")
    n_threads: int | None = _flags("--threads")
    n_gpu_layers: int | None = _flags("--n-gpu-layers")
    n_slots: int | None = _flags("--parallel")
    cont_batching: bool = _flags("--cont-batching", default=False)
    """Whether `--cont-batching` is said; newer versions need it no more."""
    flash_attn: str | None = _flags("--flash-attn")
    cache_type: str | None = _flags("--cache-type-k", "--cache-type-v")
    """The type of keys and of values."""
    defrag_thold: float | None = _flags("--defrag-thold")
    prio: int | None = _flags("--prio")
    mlock: bool = False
    """Whether weights must stay in memory."""
    draft: Draft | None = None
    rpc: tuple[str, ...] = ()
    """
    HOST:PORT of machines that compute along, for a llama-server with GGML_RPC. What they are
    sent is not protected, and the server aborts when one is lost; this process lives on.
    """
    extra: tuple[str, ...] = ()
    """Further flags, such as `--embeddings`."""


@dataclass(frozen=True, slots=True)
class Words:
    """Flags that not all versions have."""

    mlock: str = "--mlock"
    mlock_value: str | bool = True
    draft_max: str = "--draft-max"
    draft_min: str = "--draft-min"


OLD = Words()
NEW = Words("--load-mode", "mlock", "--spec-draft-n-max", "--spec-draft-n-min")


def words_of(help_text: str) -> Words:
    """The words of a llama-server whose `--help` is *help_text*."""
    return NEW if NEW.draft_max in help_text and NEW.mlock in help_text else OLD


def arguments(
    model: str | Path,
    options: LlamaOptions,
    words: Words,
    port: int = 0,
    host: str = HOST,
) -> list[str]:
    """All arguments; the port 0 is a free one, which the server tells."""
    if options.n_batch is not None and options.n_ubatch is not None:
        options = replace(options, n_ubatch=min(options.n_ubatch, options.n_batch))
    flags: dict[str, Any] = {"--model": model, "--host": host, "--port": port}
    flags |= {
        flag: getattr(options, option.name)
        for option in fields(options)
        for flag in option.metadata.get("flags", ())
    }
    draft = options.draft
    flags |= {
        words.mlock: options.mlock and words.mlock_value,
        "--model-draft": draft and draft.model,
        words.draft_max: draft and draft.n_max,
        words.draft_min: draft and draft.n_min,
        "--draft-p-min": draft and draft.p_min,
        "--rpc": ",".join(options.rpc) or None,
        # A state of a model on other machines cannot be saved.
        "--cache-ram": 0 if options.rpc else None,
    }
    line: list[str] = []
    for flag, value in flags.items():
        if value is True:
            line.append(flag)
        elif value is not None and value is not False:
            line += [flag, str(value)]
    return line + list(options.extra)


def library_path(
    binary: Path, environment: Mapping[str, str], platform: str = sys.platform
) -> dict[str, str]:
    """The variable by which macOS finds the libraries beside *binary*."""
    if platform != "darwin":
        return {}
    before = environment.get("DYLD_LIBRARY_PATH")
    folders = [str(binary.parent), *([before] if before else [])]
    return {"DYLD_LIBRARY_PATH": ":".join(folders)}


@dataclass(frozen=True, slots=True)
class LlamaServer:
    """
    llama-server with one model.

    Args:
        binary: the file of the program, which the user has or has built.
        host: the address at which it listens; with 0.0.0.0 other machines reach it by the key.
        port: 0 is a free one.
    """

    model: str | Path
    binary: str | Path | None
    options: LlamaOptions = field(default_factory=LlamaOptions)
    name: str = "llama-server"
    served_name: str = "local-llm"
    dialect: Dialect = LLAMA_SERVER
    host: str = HOST
    port: int = 0

    @property
    def verbs(self) -> frozenset[Verb]:
        """Operations that the flags allow: vectors and ranks have flags of their own."""
        flags, verbs = {*self.options.extra}, {"generate"}
        if flags & {"--embedding", "--embeddings"}:
            verbs.add("embed")
        if flags & {"--rerank", "--reranking"}:
            verbs.add("rank")
        return frozenset(cast("set[Verb]", verbs))

    @property
    def metadata(self) -> RunnerMetadata:
        """The program, without the version, which it tells when it runs."""
        n = self.options.n_gpu_layers
        on_device = None if n is None else n != 0
        return RunnerMetadata("GGUF", "llama.cpp (llama-server)", None, on_device)

    def check(self) -> None:
        """Raise ConfigError if it cannot be started."""
        suffix = Path(self.model).suffix
        if suffix.lower() != SUFFIX:
            model = suffix or str(self.model)
            raise ConfigError(
                f"GGUF runtime received wrong format: {model}: give a file {SUFFIX}"
            )
        if self.binary is None:
            raise ConfigError(
                "GGUF runtime requires runtime_binary path: give binary= the llama-server "
                "that you have built"
            )
        for text, path in (
            ("llama-server binary not found at", self.binary),
            ("Model file not found at", self.model),
        ):
            if not Path(path).is_file():
                raise ConfigError(f"{text}: {path}: give a file that is there")
        # A draft only saves time. Who names a file that is not there made a mistake, though, and
        # would look for the time elsewhere if it was served without one.
        draft = self.options.draft
        if draft is not None and not Path(draft.model).is_file():
            raise ConfigError(
                f"Draft model file not found at: {draft.model}: give a file that is there, or "
                "leave draft= out to serve without one"
            )

    async def command(self) -> list[str]:
        """The program and its arguments; asks it for its flags."""
        binary = str(self.binary)
        # A script around it may start more, which ends with it.
        child = Child(self.name, [binary, "--help"], self._libraries, HELP_BYTES)
        try:
            has_ended = await child.ended_within(HELP_S)
        finally:
            await child.end()
        if not has_ended or child.returned == CANNOT_RUN:
            prefix, silence = (
                f"Failed to spawn {self.name}: ",
                f"no end in {HELP_S:g} s",
            )
            reason = child.said.removeprefix(prefix) if has_ended else silence
            raise ConfigError(f"{prefix}{binary} --help: {cut(reason, MAX_REASON)}")
        words = words_of(child.said)
        flags = arguments(self.model, self.options, words, self.port, self.host)
        return [binary, *flags]

    def environment(self, key: str) -> dict[str, str]:
        """Its key; that it downloads nothing, and that no debugger delays an abort."""
        variables = {
            "LLAMA_API_KEY": key,
            "LLAMA_ARG_OFFLINE": "1",
            "GGML_NO_BACKTRACE": "1",
        }
        return variables | self._libraries

    @property
    def _libraries(self) -> dict[str, str]:
        return library_path(Path(str(self.binary)), os.environ)
