"""The OpenAPI description, and requests that schemathesis draws from it."""

import sys
from pathlib import Path

import anyio
import httpx
import pytest

from pyllama_raw import AsyncEngine, EngineConfig, ModelConfig
from pyllama_raw.serve import ServeConfig, make_app
from pyllama_raw.serve.keys import ADMIN, VARIABLE
from scripts.try_llama_tests import FILL
from tests.serve.support import chatting, serving
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.anyio

LIMIT_S = 900
COMMAND = [
    *[Path(sys.executable).with_name("schemathesis"), "run"],
    *["--request-timeout", "60", "--max-time", "300"],
    # What is allowed depends on the model, too: its context, its vocabulary, its verbs.
    *["--exclude-checks", "positive_data_acceptance", "--no-color"],
    *["--header", "Authorization: Bearer sk-1"],
    *["--phases", "examples,coverage,fuzzing,stateful"],
]
# A client may give a deadline that is over at once.
CHECKS = '[checks]\nnot_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", 504]\n'


@pytest.mark.native
@pytest.mark.nightly
async def test_no_request_that_is_described_is_answered_otherwise(
    monkeypatch, tmp_path
):
    """
    No 5xx, no status or type of content that is not described, no body that the
    description forbids is taken, and the service lives on.
    """
    monkeypatch.setenv(VARIABLE, f"{ADMIN} sk-1")
    checks, config = tmp_path / "checks.toml", ServeConfig(any_model=True)
    checks.write_text(CHECKS)
    filling = EngineConfig(model=ModelConfig(kv_overrides=FILL))
    with anyio.fail_after(LIMIT_S):
        async with (
            AsyncEngine.open(tiny_model("llama"), filling) as engine,
            AsyncEngine.open(tiny_model("bert")) as embedder,
            AsyncEngine.open(tiny_model("bert-rank")) as reranker,
        ):
            app = make_app({"a": engine, "e": embedder, "r": reranker}, config)
            async with serving(app, "asyncio") as url:
                command = [*COMMAND, f"{url}/openapi.json"]
                command[1:1] = ["--config-file", checks]
                done = await anyio.run_process(command, check=False)
                result = await engine.complete("It goes on.")

    assert done.returncode == 0, done.stdout.decode()[-4000:]
    assert result.token_ids


@pytest.mark.native
async def test_every_path_is_described():
    """
    With what it answers if something goes wrong, and without what it never answers.
    """
    async with AsyncEngine.open(tiny_model("llama")) as engine:
        paths = make_app({"a": engine}).openapi()["paths"]
    statuses = {
        (path, method): {*operation["responses"]}
        for path, methods in paths.items()
        for method, operation in methods.items()
    }

    assert ("/v1/chat/completions", "post") in statuses
    assert {*map(frozenset, statuses.values())} == {frozenset({"200", "4XX", "5XX"})}


async def test_what_is_missing_is_named_by_its_place():
    """
    A pair of a list that has one value.
    """
    async with chatting() as engine:
        transport = httpx.ASGITransport(make_app({"a": engine}))
        async with httpx.AsyncClient(
            transport=transport,
            base_url="http://here",
            timeout=LIMIT_S,
        ) as client:
            asked = {"prompt": "", "logit_bias": [[1, 2.0], [""]]}
            answer = await client.post("/completion", json=asked)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("logit_bias[1]")
