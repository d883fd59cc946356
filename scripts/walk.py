"""
The walk of a request: functions of the package, in the order in which a reader comes to them.

    python -m scripts.walk                        # how long each walk is, on the default model
    python -m scripts.walk --list chat --model M  # the functions of one of them, file by file

Four requests are walked: a streamed `generate()`, a streamed chat over HTTP, `embed()` of two
texts, and `reload()`. Each is made once before it counts, so nothing is imported or compiled the
first time. What counts is the way from the call to its end, and until the engine thread is idle.

A *function* stands in a file of the package, without `testing`: a method, a coroutine, a
generator and a lambda are functions. Bodies of modules and classes are not, and comprehensions
are not, because Python 3.12 made them parts of the functions that they stand in. A function
counts once, where it is first entered. Threads are read one after the other, in the order in
which they begin; workers of one kind are read as one thread. So the walk does not depend on how
threads take turns. A *turn* is a change of file from one function of the walk to the next.

What processes of chat templates do, and what C does, is not in the walk.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from threading import Event, Thread, current_thread
from types import CodeType, FrameType
from typing import Any, NamedTuple

import anyio
import httpx

from pyllama_raw import AsyncEngine, SamplingParams
from pyllama_raw.engine.mailbox import Mailbox, OwnThread
from pyllama_raw.serve import make_app

PACKAGE = Path(__file__).resolve().parents[1] / "pyllama_raw"
NO_FUNCTIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "__annotate__"}
PARAMS = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
WAIT_S = 120.0  # longest wait for an engine that has nothing to do

Request = Callable[[str], Awaitable[None]]  # gets a text that no request had before


class Function(NamedTuple):
    """A function, by its place."""

    file: str  # from the folder of the package
    name: str  # with the class that it is a method of
    n_lines: int  # with its head and its docstring


@dataclass(frozen=True, slots=True)
class Walk:
    """Functions in the order in which a reader comes to them, by thread."""

    threads: Mapping[str, tuple[Function, ...]]

    @property
    def functions(self) -> list[Function]:
        """Functions of all threads, each where it comes first."""
        entered = (f for functions in self.threads.values() for f in functions)
        return list(dict.fromkeys(entered))

    @property
    def size(self) -> tuple[int, int, int]:
        """Functions, files and turns."""
        functions = self.functions
        turns = [a.file != b.file for a, b in pairwise(functions)]
        return len(functions), len({f.file for f in functions}), sum(turns)

    def __str__(self) -> str:
        lines, read = [], set[Function]()
        for thread, entered in self.threads.items():
            lines += ["", f"{thread}:"]
            functions = [f for f in entered if f not in read]
            read.update(functions)
            for file, group in groupby(functions, key=lambda f: f.file):
                lines.append(f"  {file}")
                lines += [f"      {f.name} ({f.n_lines})" for f in group]
        return "\n".join(lines)


class Walker:
    """Notes the functions that threads enter. Only one can be installed at a time."""

    def __init__(self) -> None:
        self._functions: dict[CodeType, Function | None] = {}
        self._entered: dict[object, dict[Function, None]] = {}
        self._names: dict[
            object, str
        ] = {}  # of threads, by the key that they have there
        self._is_on = False
        self._caller: Thread | None = (
            None  # before and after the walk, so it does not count
        )
        self._is_obeyed = False  # the engine thread has come to the last command
        self._idle = Event()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """See what this thread enters, and threads that start inside the block."""
        before = sys.getprofile(), threading.getprofile()
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        try:
            yield
        finally:
            sys.setprofile(before[0])
            threading.setprofile(before[1])  # type: ignore[arg-type] # None: no hook

    async def walk(
        self, engine: AsyncEngine, request: Callable[[], Awaitable[None]]
    ) -> Walk:
        """The walk of *request*, which *engine* serves and nothing else."""
        self._caller, self._is_on = current_thread(), True
        try:
            self._wait_until_idle(engine)  # what came before has ended
            self._entered, self._names, self._caller = {}, {}, None
            await request()
            self._caller = current_thread()
            self._wait_until_idle(engine)
        finally:
            self._is_on = False
        threads = {self._names[key]: tuple(f) for key, f in self._entered.items()}
        return Walk(threads)

    def _wait_until_idle(self, engine: AsyncEngine) -> None:
        """Return when threads of earlier sessions have ended and the engine waits for work."""
        for session in engine._sessions.all[:-1]:
            session.thread.gone.result(WAIT_S)
        self._is_obeyed = False
        self._idle.clear()
        engine._thread._mailbox.post(partial(setattr, self, "_is_obeyed", True))
        assert self._idle.wait(WAIT_S)

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        """The profile hook. Thread: any."""
        if not self._is_on or event != "call":
            return
        code, thread = frame.f_code, current_thread()
        if thread is self._caller:
            return
        # An engine thread that has nothing to do waits for a command without a limit.
        takes = code is Mailbox.take.__code__
        if takes and self._is_obeyed and frame.f_locals["timeout_s"] is None:
            self._idle.set()
        if code not in self._functions:
            self._functions[code] = _function_of(code)
        function = self._functions[code]
        if function is None:
            return
        key: object = thread if isinstance(thread, OwnThread) else thread.name
        if key not in self._entered:
            same = sum(
                name.split(" ")[0] == thread.name for name in self._names.values()
            )
            self._names[key] = f"{thread.name} {same + 1}" if same else thread.name
            self._entered[key] = {}
        self._entered[key].setdefault(function)


def _function_of(code: CodeType) -> Function | None:
    """The function of *code*; None: it is none that counts."""
    path = Path(code.co_filename)
    is_body = not code.co_flags & inspect.CO_OPTIMIZED  # of a module or a class
    if is_body or code.co_name in NO_FUNCTIONS or not path.is_relative_to(PACKAGE):
        return None
    file = path.relative_to(PACKAGE)
    if file.parts[0] == "testing":
        return None
    last = max(line for _, _, line in code.co_lines() if line is not None)
    return Function(str(file), code.co_qualname, last - code.co_firstlineno + 1)


@asynccontextmanager
async def requests_of(engine: AsyncEngine) -> AsyncIterator[dict[str, Request]]:
    """The requests to *engine* that are walked, by name."""

    async def generate(text: str) -> None:
        async with engine.generate(text, PARAMS) as generation:
            async for _ in generation:
                pass

    async def chat(text: str) -> None:
        body = {
            "model": "model",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": PARAMS.max_tokens,
            "stream": True,
        }
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.text.endswith("data: [DONE]\n\n"), answer.text

    async def embed(text: str) -> None:
        await engine.embed([text, text * 2], pooling="mean")

    async def reload(_: str) -> None:
        await engine.reload()

    transport = httpx.ASGITransport(make_app({"model": engine}))
    async with httpx.AsyncClient(transport=transport, base_url="http://walk") as client:
        yield {"generate": generate, "chat": chat, "embed": embed, "reload": reload}


async def walks_of(engine: AsyncEngine, walker: Walker) -> dict[str, Walk]:
    """The walks of all requests, each of which is made once before."""
    walks = {}
    async with requests_of(engine) as requests:
        for name, request in requests.items():
            await request(f"first {name}")
            walks[name] = await walker.walk(engine, partial(request, f"a {name}"))
    return walks


async def _open_and_walk(model: str | None, walker: Walker) -> dict[str, Walk]:
    async with AsyncEngine.open(model) as engine:
        return await walks_of(engine, walker)


def main() -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a GGUF file; without it the default model")
    names = ("generate", "chat", "embed", "reload")
    parser.add_argument("--list", choices=names, help="print this walk")
    options = parser.parse_args()
    walker = Walker()
    with walker.installed():
        walks = anyio.run(_open_and_walk, options.model, walker)
    if options.list:
        print(walks[options.list])
        return 0
    print(f"{'':10}{'functions':>10}{'files':>10}{'turns':>10}{'lines a turn':>14}")
    for name, walk in walks.items():
        functions, files, turns = walk.size
        lines = sum(function.n_lines for function in walk.functions) / turns
        print(f"{name:10}{functions:10}{files:10}{turns:10}{lines:14.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
