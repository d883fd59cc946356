"""
Replicas on Ray: what the router keeps of the cache, and what a call through Ray costs.

24 chats of 3 turns, 8 turns at a time, over HTTP: one server alone, one replica on Ray, and
two replicas under round robin and under our rule. The hit rate of two replicas is compared
with that of one engine, and the throughput of one replica with that of the server alone.

Needs `pip install 'ray[serve]'`; threads of each engine are --threads, 1 without it.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import anyio
import httpx
from load.measure import NO_DRAFTS, Report, arguments, percentile, run_script, say
from peers.on_ray import ray_cluster, run
from peers.ours import pyllama_raw_server

from pyllama_raw import ContextConfig, EngineConfig, SchedulerConfig
from pyllama_raw.serve.deployment import Deployment

N_CLIENTS, N_SLOTS, N_CTX, N_OUTPUT = 8, 8, 8192, 24
ALONE, ONE, TURNS, OURS = "server", "ray x1", "ray x2 round_robin", "ray x2 ours"


class Ran(NamedTuple):
    """One run of all chats."""

    seconds: float
    n_prompt: int
    n_cached: int
    ttft_s: list[float]

    @property
    def hits(self) -> float:
        """Part of the prompts that was cached."""
        return self.n_cached / self.n_prompt

    @property
    def turns_s(self) -> float:
        """Turns a second."""
        return len(self.ttft_s) / self.seconds


async def chats(url: str, options: Namespace, seed: int) -> Ran:
    """All turns in random order; a turn waits for the one before it in its chat."""
    rng = Random(seed)  # noqa: S311 - it is to be repeated
    talks = [[_message(rng, 60)] for _ in range(options.chats)]
    order = [i for i in range(options.chats) for _ in range(options.turns)]
    rng.shuffle(order)
    locks, waiting = [anyio.Lock() for _ in talks], iter(order)
    n_prompt = n_cached = 0
    ttft_s: list[float] = []

    async def client() -> None:
        nonlocal n_prompt, n_cached
        for index in waiting:
            async with locks[index]:
                talk = talks[index]
                text, usage, first_s = await ask(http, talk)
                talk += [{"role": "assistant", "content": text}, _message(rng, 30)]
                n_prompt += usage["prompt_tokens"]
                n_cached += usage["prompt_tokens_details"]["cached_tokens"]
                ttft_s.append(first_s)

    async with httpx.AsyncClient(base_url=url, timeout=300) as http:
        await ask(http, [{"role": "user", "content": "warm up"}])
        started = perf_counter()
        async with anyio.create_task_group() as group:
            for _ in range(N_CLIENTS):
                group.start_soon(client)
        return Ran(perf_counter() - started, n_prompt, n_cached, ttft_s)


async def ask(
    http: httpx.AsyncClient, talk: list[dict[str, str]]
) -> tuple[str, dict[str, Any], float]:
    """The text, the usage and the seconds until the first token of one streamed turn."""
    text, usage, first_s, started = "", {}, 0.0, perf_counter()
    body = {"messages": talk, "max_tokens": N_OUTPUT, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            first_s = first_s or perf_counter() - started
            part = httpx.Response(200, content=line[6:]).json()
            if part["choices"]:
                text += part["choices"][0]["delta"].get("content") or ""
            usage = part.get("usage") or usage
    return text, usage, first_s


def _message(rng: Random, n_words: int) -> dict[str, str]:
    words = (f"w{rng.randrange(1000)}" for _ in range(n_words))
    return {"role": "user", "content": " ".join(words)}


@contextmanager
def system(name: str, deployment: Deployment, url: str | None) -> Iterator[str]:
    """The system *name*; *url* is that of the cluster, which serves it from now on."""
    ((model, config),) = zip(
        deployment.models.values(), deployment.configs.values(), strict=True
    )
    if url is None:
        assert model is not None
        with pyllama_raw_server(Path(model), config) as alone:
            yield alone
        return
    n = 1 if name == ONE else 2
    run(
        deployment,
        n_replicas=n,
        router="round_robin" if name == TURNS else "prefix_affinity",
    )
    yield url


def measure(options: Namespace, report: Report) -> None:
    """Rounds of all systems, one after the other."""
    model = str(options.model)
    config = EngineConfig(
        speculation=NO_DRAFTS,
        context=ContextConfig(n_ctx=N_CTX, n_threads=options.threads),
        scheduler=SchedulerConfig(n_slots=N_SLOTS),
    )
    deployment = Deployment(models={"m": model}, configs={"m": config})
    runs: dict[str, list[Ran]] = {}
    with ray_cluster() as cluster:
        for index in range(options.rounds):
            for name in (ALONE, ONE, TURNS, OURS):
                say(f"round {index + 1} of {options.rounds}: {name}")
                with system(
                    name, deployment, None if name == ALONE else cluster
                ) as url:
                    figures = anyio.run(chats, url, options, index)
                runs.setdefault(name, []).append(figures)
    for name, runs_of_rule in runs.items():
        report.add(
            system=name,
            turns_s=median(ran.turns_s for ran in runs_of_rule),
            hits=median(ran.hits for ran in runs_of_rule),
            ttft_p50_ms=1e3 * median(median(ran.ttft_s) for ran in runs_of_rule),
            ttft_p99_ms=1e3
            * median(percentile(ran.ttft_s, 99) for ran in runs_of_rule),
        )
    hits = {
        name: median(ran.hits for ran in runs_of_rule)
        for name, runs_of_rule in runs.items()
    }
    speed = {
        name: median(r.turns_s for r in runs_of_rule)
        for name, runs_of_rule in runs.items()
    }
    report.claim("hits to one engine's", hits[OURS] / hits[ALONE], ">=", 0.9)
    report.claim("hits to round robin's", hits[OURS] / hits[TURNS], ">=", 1.0)
    report.claim("throughput through Ray", speed[ONE] / speed[ALONE], ">=", 0.9)


def main() -> int:
    """Run the script."""
    parser = arguments(__doc__)
    parser.add_argument("--chats", type=int, default=24, help="of them (24)")
    parser.add_argument("--turns", type=int, default=3, help="of each (3)")
    parser.set_defaults(threads=1)  # of each engine
    # Processes of Ray look like those of others, so nobody can tell whether there were others.
    return run_script("ray_replicas", measure, parser, timed=False)


if __name__ == "__main__":
    sys.exit(main())
