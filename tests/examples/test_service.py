"""examples/service.py and handler.py behind real servers."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from examples import handler
from pyllama_raw.testing import FakeExecutor, fake_engine, fake_limits
from scripts.service_clients import Clients
from tests.engine.support import HeldSteps
from tests.serve.support import LIMIT_S, serving
from tests.serve.test_clients import until_left
from tests.support.loops import anyio_backend  # noqa: F401
from tests.support.tiny import tiny_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.anyio
async def test_a_plain_handler_ends_its_request_with_its_client(anyio_backend_name):
    """
    examples/handler.py, whose server cancels nothing; whoever stays gets the whole answer.
    """
    steps = HeldSteps()
    engine = fake_engine(FakeExecutor(fake_limits(), on_step=steps))
    app = Starlette(routes=[*handler.app.routes, Route("/health", answer_nothing)])
    app.state.engine = engine
    body = json.dumps({"prompt": "hello"}).encode()
    with anyio.fail_after(LIMIT_S):
        async with engine, serving(app, anyio_backend_name) as url:
            clients = Clients(int(url.rsplit(":", 1)[1]))
            async with clients.exchange() as one:
                await one.send(body, path="/ask")
                await anyio.to_thread.run_sync(steps.wait_for_one)
            for _ in range(3):
                await clients.health()
            steps.allow(1000)
            await until_left(engine)
            async with clients.exchange() as other:
                await other.send(body, path="/ask")
                await other.read_head()
                answer = await other.answer()
            stats = engine.stats()

    assert (stats.finished["cancelled"], stats.finished["length"]) == (1, 1)
    assert list(answer) == ["text"]


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/ask", "/stream"])
async def test_handlers_refuse_before_they_answer(path):
    """
    An error of the engine reaches the application's own handler as it is, with its status.
    """
    app = Starlette(
        routes=handler.app.routes, exception_handlers=handler.app.exception_handlers
    )
    async with fake_engine() as engine:
        app.state.engine = engine
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://here"
        ) as client:
            refused = await client.post(path, json={"prompt": "a" * 1000})
            answer = await client.post(path, json={"prompt": "hello"})
        stats = engine.stats()

    assert refused.status_code == 413
    assert "tokens" in refused.json()["error"]
    assert (answer.status_code, stats.finished["length"]) == (200, 1)
    assert answer.text


async def answer_nothing(_):
    return JSONResponse({})


@pytest.mark.native
def test_the_service_of_the_example_has_all_routes_and_its_own():
    """
    Until SIGTERM comes; then the process ends with 0.
    """
    command = [sys.executable, ROOT / "examples" / "service.py", "--port", "0"]
    command += ["--model", tiny_model("llama")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
        asked["ignore_eos"] = True
        with httpx.Client(base_url=url, timeout=LIMIT_S) as client:
            chat = client.post("/v1/chat/completions", json=asked).json()
            tokens = client.get("/tokens/a").json()
        process.send_signal(signal.SIGTERM)
        code = process.wait(LIMIT_S)
    finally:
        process.kill()
        process.communicate()

    assert chat["usage"]["completion_tokens"] == 2
    assert (isinstance(tokens[0], int), code) == (True, 0)
