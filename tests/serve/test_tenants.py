"""Tenants of a service: what a key is charged, what it may ask for, and what it sees of others."""

import json

import anyio
import pytest

from pyllama_raw import AsyncEngine
from pyllama_raw.errors import EngineStalled, QueueFull
from pyllama_raw.serve import ServeConfig, make_app
from pyllama_raw.serve.failures import failure_of
from pyllama_raw.serve.keys import ADMIN, MONITOR, Key
from pyllama_raw.serve.service import Exchange, Service
from pyllama_raw.testing import FakeExecutor, fake_limits
from scripts.service_clients import Clients
from tests.engine.support import HeldSteps
from tests.serve.support import LIMIT_S, chatting, serving
from tests.serve.test_clients import until_left
from tests.serve.test_gate import CHAT, PATH, asking, client_of
from tests.serve.wire import chat
from tests.support.loops import anyio_backend  # noqa: F401
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.anyio

ADMINS, MONITORS = {"x-api-key": "sk-admin"}, {"x-api-key": "sk-monitor"}
ALICE, BOB = {"x-api-key": "sk-1"}, {"x-api-key": "sk-2"}


@pytest.fixture
def keys_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"{ADMIN} sk-admin\n{MONITOR} sk-monitor\nalice sk-1\nbob sk-2\n")
    return str(file)


async def test_an_answer_that_is_left_counts_what_was_computed(
    anyio_backend_name, tmp_path
):
    """
    Whole, though nobody has read a token of it: in the access log, and against the key.
    """
    log, steps = tmp_path / "log", HeldSteps()
    executor = FakeExecutor(fake_limits(), on_step=steps)
    config = ServeConfig(access_log=str(log), tokens_per_minute=10)
    with anyio.fail_after(LIMIT_S):
        async with chatting(executor) as engine:
            app = make_app({"a": engine}, config)
            async with serving(app, anyio_backend_name) as url:
                clients = Clients(int(url.rsplit(":", 1)[1]))
                async with clients.exchange() as one:
                    await one.send(chat(max_tokens=100, stream=False, ignore_eos=True))
                    steps.allow(8)
                    for _ in range(9):
                        await anyio.to_thread.run_sync(steps.wait_for_one)
                for _ in range(3):  # a round trip is enough to hear of the end
                    await clients.health()
                steps.allow(1000)
                await until_left(engine)
                while not (lines := lines_of(log, PATH)):
                    await anyio.lowlevel.checkpoint()
    [line] = lines

    assert line["left"]
    assert line["prompt_tokens"] > 0
    assert line["output_tokens"] >= 5


def lines_of(log, path):
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [line for line in lines if line["path"] == path]


@pytest.mark.native
async def test_vectors_and_ranks_count_against_the_tokens_of_a_key():
    """
    With the tokens that their answers tell.
    """
    config = ServeConfig(tokens_per_minute=5)
    statuses = {}
    for name, path, body in (
        ("bert", "/v1/embeddings", {"input": ["some text"] * 4}),
        ("bert-rank", "/v1/rerank", {"query": "a", "documents": ["some text"] * 4}),
    ):
        async with AsyncEngine.open(tiny_model(name)) as engine:
            app = make_app({"a": engine}, config)
            async with client_of(app) as client:
                answers = [await client.post(path, json=body) for _ in range(2)]
        statuses[path] = [answer.status_code for answer in answers]

    assert statuses == {"/v1/embeddings": [200, 429], "/v1/rerank": [200, 429]}


def options_of(key, options, **config):
    """What becomes of *options* for a key, and the fields that are named as ignored."""

    service = Service({}, ServeConfig(**config))
    exchange = Exchange("id", "POST", "/", key)
    return service.text_options_of(exchange, options), exchange.ignored


async def test_the_client_is_the_owner_of_the_key():
    """
    Whatever a body says, which a policy can still read; without keys it is what the body says.
    """
    bob = Key("bob", b"")

    assert options_of(bob, {}) == ({"client": "bob"}, [])
    assert options_of(bob, {"client": "alice"}) == (
        {"client": "bob", "policy_data": {"client": "alice"}},
        [],
    )
    assert options_of(bob, {"client": "a", "policy_data": {"client": "b", "x": 1}}) == (
        {"client": "bob", "policy_data": {"client": "b", "x": 1}},
        [],
    )
    assert options_of(None, {"client": "alice"}) == ({"client": "alice"}, [])


@pytest.mark.parametrize(
    ("owner", "priority", "least", "becomes"),
    [
        *[("bob", -5, 0, 0), ("bob", 0, 0, 0), ("bob", 3, 0, 3), ("bob", -5, -2, -2)],
        *[(ADMIN, -5, 0, -5), (MONITOR, -5, 0, 0), (None, -5, 0, -5), ("bob", 1, 5, 5)],
    ],
)
async def test_a_key_is_no_more_urgent_than_the_service_allows(
    owner, priority, least, becomes
):
    """
    But that of admin; the answer names the field if it is another one then.
    """
    key = None if owner is None else Key(owner, b"")
    options, ignored = options_of(key, {"priority": priority}, least_priority=least)

    assert options["priority"] == becomes
    assert ignored == ([] if priority == becomes else ["priority"])


async def test_a_key_sees_its_own_requests_only(keys_file):
    """
    Those of monitor and admin see all, by slot, with the name of the model.
    """
    steps = HeldSteps()
    executor, seen = FakeExecutor(fake_limits(), on_step=steps), {}
    with anyio.fail_after(LIMIT_S):
        async with chatting(executor) as engine:
            app = make_app({"a": engine}, ServeConfig(api_keys_file=keys_file))
            async with client_of(app) as client, anyio.create_task_group() as group:

                async def ask():
                    await client.post(PATH, json=CHAT, headers=ALICE)

                group.start_soon(ask)
                await anyio.to_thread.run_sync(steps.wait_for_one)
                steps.allow(1)
                keys = {
                    "alice": ALICE,
                    "bob": BOB,
                    "monitor": MONITORS,
                    "admin": ADMINS,
                }
                async with anyio.create_task_group() as askers:
                    for name, headers in keys.items():

                        async def look(name=name, headers=headers):
                            seen[name] = (
                                await client.get("/slots", headers=headers)
                            ).json()

                        askers.start_soon(look)
                    steps.allow(1000)
    busy = {
        name: [s for s in slots if s["is_processing"]] for name, slots in seen.items()
    }

    assert seen["bob"] == []
    assert len(seen["monitor"]) == len(seen["admin"]) == engine.info.n_slots
    assert {slot["model"] for slot in seen["monitor"]} == {"a"}
    assert seen["alice"] == busy["alice"]


async def test_facts_of_all_need_a_right_and_paths_stay_at_home(keys_file):
    """
    A probe without a key names no model.
    """
    async with asking(api_keys_file=keys_file) as (_, client):
        metrics = [
            (await client.get("/metrics", headers=headers)).status_code
            for headers in (BOB, MONITORS, ADMINS)
        ]
        props = [
            (await client.get("/props", headers=h)).json() for h in (BOB, MONITORS)
        ]
        adapters = await client.get("/lora-adapters", headers=BOB)
        changed = await client.delete("/lora-adapters/x", headers=MONITORS)
        livez = (await client.get("/livez")).json()
    async with asking() as (_, client):
        open_livez = (await client.get("/livez")).json()
        open_metrics = (await client.get("/metrics")).status_code

    assert metrics == [403, 200, 200]
    assert {"stats", "devices"} & {*props[0]} == set()
    assert "/" not in props[0]["model_path"]
    assert {"default_generation_settings", "modalities", "total_slots"} <= {*props[0]}
    assert "stats" in props[1]
    assert (adapters.status_code, changed.status_code) == (200, 403)
    assert livez == {"status": "ok"}
    assert (open_livez["models"], open_metrics) == ({"a": "ready"}, 200)


def test_a_refusal_tells_nothing_of_the_queue():
    """
    How much waits and runs is that of others.
    """
    stalled = EngineStalled(
        n_running=7, n_waiting=7, n_slots=7, n_cells_used=7, n_cells=7
    )
    messages = [
        failure_of(error, 1).message
        for error in (QueueFull("max_waiting", 7, 7), stalled)
    ]

    assert [message for message in messages if "7" in message] == []
