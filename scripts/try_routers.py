"""
Try two servers behind the routers of vLLM and of SGLang, which an environment of its own has.

    pip install vllm-router sglang-router
    python -m scripts.try_routers OTHER/bin

Each endpoint that a router forwards answers through it, a worker without room is passed over
for the other one, and two groups of prompts find what each has in common.
"""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from time import sleep
from typing import Any

import httpx

from scripts.try_llama_tests import free_port
from tests.support.tiny import tiny_model

ROUTERS = {  # the first words of the command, and what it does not forward
    "vllm-router": ((), set[str]()),
    "sglang-router": (("launch",), {"/tokenize"}),
}
LIMIT_S = 60.0
MODELS = {"chat": tiny_model("llama"), "vectors": tiny_model("bert")}
MODELS["ranks"] = tiny_model("bert-rank")
CONFIG = """
port = {port}
service.any_model = true
scheduler = {{ n_slots = 1, max_waiting = 0, context_full = "shift" }}
models.chat.path = "{chat}"
models.vectors.path = "{vectors}"
models.ranks.path = "{ranks}"
"""
CHAT = {"model": "chat", "messages": [{"role": "user", "content": "It goes on."}]}
TEXT = {"model": "chat", "prompt": "It goes on.", "max_tokens": 4}
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT | {"max_tokens": 4}),
    ("/v1/chat/completions", CHAT | {"max_tokens": 4, "stream": True}),
    ("/v1/completions", TEXT),
    ("/v1/completions", TEXT | {"stream": True}),
    ("/v1/embeddings", {"model": "vectors", "input": ["one", "two"]}),
    ("/v1/rerank", {"query": "which?", "documents": ["one", "two"]}),
    ("/rerank", {"model": "ranks", "query": "which?", "documents": ["one", "two"]}),
    ("/tokenize", {"model": "chat", "prompt": "It goes on."}),
]


def main() -> int:
    """The number of routers that failed."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument(
        "folder", type=Path, help="where the commands of the routers are"
    )
    folder = parser.parse_args().folder
    return sum(not works(folder / name) for name in ROUTERS)


def works(router: Path) -> bool:
    """Whether all that is promised is so behind *router*."""
    print(router.name)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        workers = [stack.enter_context(worker(folder)) for _ in range(2)]
        for replica in workers:
            wait_for(replica)
        url = stack.enter_context(routed(router, workers))
        wait_for(url)
        skipped = ROUTERS[router.name][1]
        requests = [replica for replica in ASKED if replica[0] not in skipped]
        done = [answers(url, path, body) for path, body in requests]
        done += [hits(url), passes_over(url, workers)]
    return all(done)


@contextmanager
def worker(folder: Path) -> Iterator[str]:
    """A server of one slot without a queue, as its address."""
    port = free_port()
    config = folder / f"{port}.toml"
    config.write_text(CONFIG.format(port=port, **MODELS))
    with running([sys.executable, "-m", "pyllama_raw", "serve", "--config", config]):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def routed(router: Path, workers: list[str]) -> Iterator[str]:
    """*router* in front of *workers*, as its address."""
    port, other = str(free_port()), str(free_port())
    words = [*ROUTERS[router.name][0], "--host", "127.0.0.1", "--port", port]
    words += ["--prometheus-port", other, "--policy", "cache_aware"]
    # vllm-router tries the worker that knows the prompt until this many tries have failed
    words += ["--cb-failure-threshold", "2"]
    with running([router, *words, "--worker-urls", *workers]):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def running(command: list[Any]) -> Iterator[None]:
    """A process that ends with the block."""
    quiet = subprocess.DEVNULL
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    process = subprocess.Popen(command, stdout=quiet, stderr=quiet, env=environment)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def answers(url: str, path: str, body: dict[str, Any]) -> bool:
    """Whether a request is answered; prints the beginning."""
    answer = httpx.post(url + path, json=body, timeout=LIMIT_S)
    print(f"  {path:24}{answer.status_code} {answer.text[:100]!r}")
    return answer.status_code == 200


def passes_over(url: str, workers: list[str]) -> bool:
    """Whether the worker with room answers all, and 503 comes where neither has any."""
    path = "/v1/completions"
    with ExitStack() as stack:
        stack.enter_context(occupied(workers[0] + path))
        direct = httpx.post(workers[0] + path, json=TEXT, timeout=LIMIT_S)
        passed = [httpx.post(url + path, json=TEXT, timeout=LIMIT_S) for _ in range(6)]
        stack.enter_context(occupied(workers[1] + path))
        none = httpx.post(url + path, json=TEXT, timeout=LIMIT_S)
    statuses = [direct.status_code, *(answer.status_code for answer in passed)]
    statuses.append(none.status_code)
    print(f"  one full: it, then the router, then both full: {statuses}")
    return statuses == [503, *[200] * 6, 503]


@contextmanager
def occupied(url: str) -> Iterator[None]:
    """The only slot of the worker at *url* has a request that goes on and on."""
    endless = TEXT | {"max_tokens": 10**6, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", url, json=endless, timeout=LIMIT_S) as stream:
        parts = stream.iter_raw()  # the stream is closed with it
        next(parts)
        yield


def hits(url: str) -> bool:
    """Whether prompts that begin alike find it computed; prints how much they find."""
    groups = ["one two three " * 30, "four five six " * 30]
    n_prompt = n_cached = 0
    for turn in range(6):
        for begin in groups:
            body = TEXT | {"prompt": f"{begin}{turn}"}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT_S)
            usage = answer.json()["usage"]
            n_prompt += usage["prompt_tokens"]
            n_cached += usage["prompt_tokens_details"]["cached_tokens"]
    print(f"  {n_cached} of {n_prompt} prompt tokens were cached")
    return 2 * n_cached > n_prompt


def wait_for(url: str) -> None:
    """Return when it is ready; raises TimeoutError."""
    for _ in range(int(LIMIT_S / 0.2)):
        with suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health").status_code == 200:
                return
        sleep(0.2)
    raise TimeoutError(url)


if __name__ == "__main__":
    sys.exit(main())
