"""
Random bodies for all endpoints of a server: wrong types at every depth, many values, odd texts.

    python -m scripts.fuzz_bodies --count 10000 --seed 1

Each case comes from its seed alone, so `--seed N --count 1` repeats one. The test of the suite
(tests/serve/test_fuzzed_bodies.py) sends a few hundred; PYLLAMA_RAW_TEST_CASES says how many.

Memory is that of the process as the system tells it, with the client in it: a few seconds behind
`--warm-up` other bodies of the same kind, because engines make contexts, processes and kept
constraints once, and a few seconds behind the last body.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import httpx
from fastapi import FastAPI
from pydantic import BaseModel

from pyllama_raw import AsyncEngine, EngineConfig
from pyllama_raw.serve import ListenConfig, ServeConfig, make_app, serve
from scripts.mutations.edits import any_value, damage

LIMIT_S = 120
MAX_BYTES = 2**20
LATE_S = 0.5  # that the event loop may be late
KEPT_BYTES = 64 * 2**20  # that the process may have more after all of it
SETTLE_S = 4.0  # until memory is looked at
WARM_UP = 500  # bodies
PIECES = (
    b"{}",
    b"[]",
    b"null",
    b"0",
    b'""',
    b'"a"',
    b'{"type":"text","text":""}',
    b"[1]",
)


class Case(NamedTuple):
    """A request."""

    path: str
    body: bytes


def endpoints(app: FastAPI) -> dict[str, type[BaseModel]]:
    """The models of bodies by path."""
    models = {}
    for route in app.routes:
        params = getattr(getattr(route, "dependant", None), "body_params", ())
        if params and "{" not in route.path and route.path != "/lora-adapters":
            models[route.path] = params[0].field_info.annotation
    return models


def cases(models: dict[str, type[BaseModel]], seed: int, count: int) -> Iterator[Case]:
    """Requests, each by a seed of its own."""
    for number in range(seed, seed + count):
        draw = random.Random(number)  # noqa: S311
        path = draw.choice(sorted(models))
        yield Case(path, _body(draw, models[path]))


def _body(draw: random.Random, model: type[BaseModel]) -> bytes:
    kind = draw.random()
    if kind < 0.05:  # no JSON
        return draw.randbytes(draw.randrange(200))
    names = sorted(model.model_fields)
    fields = {name: value for name, value in _usual(draw).items() if name in names}
    for name in draw.sample(names, min(draw.randrange(4), len(names))):
        fields[name] = any_value(draw, draw.randrange(1, 5))
    if kind < 0.3:
        return _many(draw, fields, draw.choice([*names, "metadata", "x"]))
    if kind < 0.6:
        damage(draw, fields)
    return json.dumps(fields).encode()


def _usual(draw: random.Random) -> dict[str, Any]:
    """What any of the endpoints would answer."""
    text = draw.choice(("a", "a b c", "word " * draw.randrange(50)))
    blocks = [{"type": "text", "text": text}]
    content = draw.choice((text, blocks))
    role = draw.choice(("user", "system", "assistant"))
    return {
        "messages": [
            {"role": "user", "content": content},
            {"role": role, "content": text},
        ],
        "prompt": draw.choice((text, [text, text], [1, 2, 3])),
        "input": text,
        "query": text,
        "documents": [text, text],
        "content": text,
        "tokens": [1, 2, 3],
        "input_prefix": text,
        "input_suffix": text,
        "max_tokens": draw.randrange(1, 4),
        "max_output_tokens": 2,
        "n_predict": 2,
        "stream": draw.random() < 0.3,
    }


def _many(draw: random.Random, fields: dict[str, Any], name: str) -> bytes:
    """*fields* with a long list, mapping, text or nest as *name*."""
    n_bytes = int(2 ** draw.uniform(8, 20)) - 1000
    fields.pop(name, None)
    head = json.dumps(fields).encode()[:-1] + b"," + json.dumps(name).encode() + b":"
    piece, n_bytes = draw.choice(PIECES), max(n_bytes, 100)
    kind = draw.randrange(5)
    if kind == 0:
        n = n_bytes // 14
        inner = b"{" + b",".join(b'"%d":%b' % (i, piece[:9]) for i in range(n)) + b"}"
        if len(piece) > 9:
            inner = b"{" + b",".join(b'"%d":0' % i for i in range(n)) + b"}"
    elif kind == 1:
        inner = (
            b'"'
            + draw.choice((b"a", b"a ", b"\\n", b"\\ud83d\\ude00", b"1,"))
            * (n_bytes // 12)
            + b'"'
        )
    elif kind == 2:
        inner = b"[" * (n_bytes // 2) + b"]" * (n_bytes // 2)
    else:
        n = n_bytes // (len(piece) + 1)
        inner = b"[" + b",".join([piece] * n) + b"]"
    return head + inner + b"}"


class Report(NamedTuple):
    """What came of it."""

    statuses: Counter[int]
    failures: list[str]
    late_s: float
    n_bytes: int  # in memory
    kept_bytes: int = 0  # more than before


async def send(app: FastAPI, url: str, seed: int, count: int) -> Report:
    """Send *count* cases, one after the other; look at the loop meanwhile, and at memory behind."""
    statuses, failures, late = Counter[int](), list[str](), [0.0, 0.0]
    models, numbers = endpoints(app), iter(range(seed, seed + count))

    async def watch() -> None:
        while True:
            began, computed = anyio.current_time(), time.process_time()
            await anyio.sleep(0.01)
            waited = anyio.current_time() - began - 0.01
            # Other processes may be the reason that nothing went on.
            late[0] = max(late[0], min(waited, time.process_time() - computed))
            late[1] = max(late[1], late[0])

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as client:
            for number, case in zip(numbers, cases(models, seed, count), strict=True):
                late[0] = 0.0
                headers = {"content-type": "application/json"}
                answer = await client.post(
                    case.path, content=case.body, headers=headers
                )
                statuses[answer.status_code] += 1
                place = f"seed {number} {case.path} {len(case.body)} bytes"
                if answer.status_code in (500, 503):
                    failures.append(
                        f"{place}: {answer.status_code} {answer.text[:300]}"
                    )
                if late[0] > LATE_S:
                    failures.append(f"{place}: the event loop was {late[0]:.2f} s late")
            await client.get("/livez")
        await anyio.sleep(SETTLE_S)
        group.cancel_scope.cancel()
    return Report(statuses, failures, late[1], memory())


def memory() -> int:
    """Bytes of this process in memory; 0 where the system does not say."""
    try:
        pages = Path("/proc/self/statm").read_text().split(None, 2)[1]
    except OSError:
        return 0
    return int(pages) * 4096


@asynccontextmanager
async def running(app: FastAPI) -> Any:
    """The server of the command at a free port."""
    address: list[str] = []
    listening = anyio.Event()

    def say(line: str) -> None:
        address.append(line.rsplit(maxsplit=1)[-1])
        listening.set()

    async with anyio.create_task_group() as group:
        group.start_soon(serve, app, ListenConfig(port=0), say)
        await listening.wait()
        yield address[0]
        group.cancel_scope.cancel()


async def fuzz(
    models: dict[str, Path], seed: int, count: int, n_warm: int = WARM_UP
) -> Report:
    """Send *n_warm* cases and then *count* others to a server of *models* in this process."""
    config = EngineConfig()
    async with anyio.create_task_group():
        engines = {
            name: AsyncEngine.open(path, config) for name, path in models.items()
        }
        services = {name: await engine.__aenter__() for name, engine in engines.items()}
        try:
            app = make_app(services, ServeConfig(any_model=True, deadline_s=20))
            async with running(app) as url:
                before = await send(app, url, seed + count, n_warm)
                report = await send(app, url, seed, count)
                growth = report.n_bytes - before.n_bytes
                return report._replace(kept_bytes=growth)
        finally:
            for engine in services.values():
                await engine.aclose()


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", type=Path, help="GGUF files")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="bodies before it")
    options = parser.parse_args()
    models = {path.stem: path for path in options.models}
    report = anyio.run(fuzz, models, options.seed, options.count, options.warm_up)
    print(
        dict(report.statuses),
        f"loop late {report.late_s:.2f} s,",
        f"{report.kept_bytes >> 20} MiB kept",
    )
    print("\n".join(report.failures))


if __name__ == "__main__":
    main()
