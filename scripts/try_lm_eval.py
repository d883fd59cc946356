"""
Has lm-eval score a small task over HTTP, and compares each answer with `engine.score()`.

    pip install 'lm-eval[api]'    # in an environment of its own
    python -m scripts.try_lm_eval --python OTHER/bin/python [--model FILE] [--batch 1]

lm-eval asks `/tokenize` for token ids and sends them to `/v1/completions` with echo, one
token and log-probabilities. Nothing is fetched.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from math import fsum
from pathlib import Path
from typing import Any

CLOSE = 1e-4
NAME = "capitals"
TOLD = "told.json"
DOCS = [
    {"q": f"The capital of {country} is", "choices": choices, "answer": answer}
    for country, choices, answer in (
        ("France", ["Paris", "Rome", "a river that nobody knows"], 0),
        ("Italy", ["Paris", "Rome", "Oslo", "Madrid"], 1),
        ("Norway", ["Oslo", "Z\u00fcrich \u2014 or so"], 0),
        ("Japan", ["Kyoto, long ago", "Tokyo", "\u6771\u4eac"], 1),
    )
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""
Told = list[tuple[str, str, float, bool]]  # context, its end, logprob, greedy


def evaluate(options: Namespace) -> None:
    """Print what lm-eval made of each pair; runs where lm-eval is installed."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    folder = Path(options.folder)
    data = folder / "docs.jsonl"
    data.write_text("\n".join(map(json.dumps, DOCS)))
    (folder / f"{NAME}.yaml").write_text(TASK.format(name=NAME, data=data))
    results = simple_evaluate(
        model="local-completions",
        model_args={
            "model": "scored",
            "base_url": f"{options.url}/v1/completions",
            "tokenizer_backend": "remote",
        },
        tasks=[NAME],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        batch_size=options.batch,
        log_samples=True,
        bootstrap_iters=0,
    )
    rows = [
        (*request, *answer)
        for sample in results["samples"][NAME]
        for request, answer in zip(
            sample["arguments"], map(_pair, sample["resps"]), strict=True
        )
    ]
    (folder / TOLD).write_text(json.dumps(rows))


def _pair(answers: Any) -> tuple[float, bool]:
    [[logprob, greedy]] = answers
    return float(logprob), str(greedy) == "True"


async def compare(options: Namespace) -> int:
    """The number of pairs that differ."""
    import anyio

    from pyllama_raw import AsyncEngine
    from pyllama_raw.serve import ListenConfig, make_app, serve

    listens = anyio.Event()
    with tempfile.TemporaryDirectory() as folder:
        async with AsyncEngine.open(options.model) as engine:
            app, place = make_app({"scored": engine}), ListenConfig(port=options.port)
            async with anyio.create_task_group() as group:
                group.start_soon(serve, app, place, lambda _: listens.set())
                await listens.wait()
                url = f"http://{place.host}:{place.port}"
                inside = [
                    "--url",
                    url,
                    "--folder",
                    folder,
                    "--batch",
                    str(options.batch),
                ]
                env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
                await anyio.run_process(
                    [options.python, __file__, *inside],
                    env=env,
                    stdout=None,
                    stderr=None,
                )
                group.cancel_scope.cancel()
            text = await anyio.Path(folder, TOLD).read_text()
            row: Told = json.loads(text)
            return sum([await _differs(engine, *pair) for pair in row])


async def _differs(
    engine: Any, context: str, end: str, logprob: float, greedy: bool
) -> bool:
    n_before = len(await engine.tokenize(context, add_special=False))
    ids = await engine.tokenize(context + end, add_special=False)
    score = await engine.score(ids, 1)
    entries = score.logprobs[n_before - 1 :]
    expected = fsum(entry.logprob for entry in entries)
    is_best = all(entry.top[0][1] == entry.logprob for entry in entries)
    differs = abs(expected - logprob) > CLOSE or is_best != greedy
    mark = "differs" if differs else "equal"
    print(
        f"{mark:8}{logprob:12.6f}{expected:12.6f} {greedy!s:6}{is_best!s:6}{context + end!r}"
    )
    return differs


def main() -> int:
    """The number of answers that differ."""
    parser = ArgumentParser(description="lm-eval over HTTP against engine.score()")
    parser.add_argument("--python", help="of the environment with lm-eval")
    parser.add_argument("--model", help="a GGUF file; default: the default model")
    parser.add_argument("--port", type=int, default=8321)
    parser.add_argument("--batch", type=int, default=1, help="prompts of a request")
    parser.add_argument("--url", help="of a server; then this is lm-eval's side")
    parser.add_argument("--folder")
    options = parser.parse_args()
    if options.url:
        evaluate(options)
        return 0
    import anyio

    return anyio.run(compare, options)


if __name__ == "__main__":
    sys.exit(main())
