"""Models that are fetched and removed while the service runs, from a hub that is a folder."""

import json
import os
import shutil
import signal
import sys
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import httpx
import pytest

from pyllama_raw.options.models import fetched_models
from pyllama_raw.runners import CachedModel, ModelCache
from pyllama_raw.serve import ServeConfig, downloads, make_app
from pyllama_raw.serve.downloads import Downloads
from tests.serve.starters import OURS, by_line, started
from tests.serve.support import serving
from tests.serve.test_models_on_demand import Sized
from tests.support.limits import LIMIT_S

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform == "win32", reason="there are no pipes with names"),
]
NAME = "o/r:Q8_0"
SIZES = {"m-Q8_0.gguf": 4000, "mmproj-m.gguf": 1000}


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The folder of the repository o/r."""
    library, repo = tmp_path / "library", tmp_path / "hub" / "o" / "r"
    library.mkdir()
    shutil.copy(Path(__file__).with_name("stub_hub.py"), library / "huggingface_hub.py")
    repo.mkdir(parents=True)
    for name, n_bytes in SIZES.items():
        (repo / name).write_bytes(bytes(n_bytes))
    (repo / "README.md").write_text("no model")
    monkeypatch.setenv("PYTHONPATH", str(library))
    monkeypatch.setenv("STUB_HUB", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return repo


@asynccontextmanager
async def router():
    """A service of the models of the cache of Hugging Face, its client and its downloads."""

    def refresh():
        return {
            model.name: CachedModel(
                lambda _, name=model.name: Sized(name), key=model, source="cache"
            )
            for model in fetched_models()
        }

    config = ServeConfig(in_place_of="llama-server")
    with anyio.fail_after(LIMIT_S):
        async with ModelCache(refresh(), budget={"CPU": 2}) as models:
            models.add("own", CachedModel(lambda _: Sized("own"), source="models_dir"))
            app = make_app(models, config, refresh=refresh)
            service = app.state.service
            async with anyio.create_task_group() as group:
                service.downloads = Downloads(group, models, service.reread)
                async with serving(app, "asyncio") as url:
                    options = {"base_url": url, "timeout": LIMIT_S}
                    async with httpx.AsyncClient(**options) as client:
                        yield client, service
                group.cancel_scope.cancel()


async def listed(client):
    models = (await client.get("/models")).json()["data"]
    return {model["id"]: model["status"]["value"] for model in models}


async def events_until(client, last, listens, events):
    """Collect events of models until one of the kind *last* has come."""
    async with client.stream("GET", "/models/sse") as answer:
        async for line in answer.aiter_lines():
            listens.set()
            if line.startswith("data: "):
                events.append(json.loads(line[6:]))
                if events[-1]["event"] == last:
                    return


@asynccontextmanager
async def events_of(client, last):
    """A block whose events, up to one of the kind *last*, are in the list when it has ended."""
    listens, events = anyio.Event(), []
    async with anyio.create_task_group() as group:
        group.start_soon(events_until, client, last, listens, events)
        await listens.wait()
        yield events


def leftovers():
    return [*Path(os.environ["HF_HUB_CACHE"]).glob("**/blobs/*")]


async def test_a_model_is_fetched_listed_and_removed(hub):
    """
    With its projector; events tell of all of it, a model that is coming is listed, and another is not loaded for it.
    """
    os.mkfifo(hub / "gate")
    async with router() as (client, _):
        async with events_of(client, "download_finished") as events:
            first = await client.post("/models", json={"model": NAME})
            coming = await listed(client)
            again = await client.post("/models", json={"model": NAME})
            with (hub / "gate").open("w"):
                (hub / "gate").unlink()
        there = (await client.get("/models")).json()["data"]
        twice = await client.post("/models", json={"model": NAME})
        async with events_of(client, "model_remove") as ends:
            removed = await client.delete("/models", params={"model": NAME})
        after = await listed(client)

    assert (first.status_code, first.json()) == (200, {"success": True})
    assert coming == {"own": "unloaded", NAME: "downloading"}
    assert [again.status_code, twice.status_code] == [400, 400]
    assert "already exists" in again.json()["error"]["message"]
    [model] = [model for model in there if model["id"] == NAME]
    assert (model["source"], model["can_remove"]) == ("cache", True)
    assert (removed.status_code, after) == (200, {"own": "unloaded"})
    assert leftovers() == []
    kinds = [event["event"] for event in events if event["model"] == NAME]
    n_progress = kinds.count("download_progress")
    progress = ["download_progress"] * n_progress
    assert kinds == ["model_status", *progress, "download_finished"]
    assert ends[-1] == {"model": NAME, "event": "model_remove"}
    files = {f"https://hub/o/r/{name}": n for name, n in SIZES.items()}
    progress = [
        e["data"]["progress"] for e in events if e["event"].endswith("progress")
    ]
    assert progress[-1] == {f: {"done": n, "total": n} for f, n in files.items()}
    assert all(p.keys() == files.keys() for p in progress)


async def test_a_download_that_is_left_leaves_nothing(hub):
    """
    By /models/unload, by DELETE, and by the end of the service: no half of a file, and no model in the list.
    """
    os.mkfifo(hub / "gate")
    async with router() as (client, _):
        async with events_of(client, "download_failed") as events:
            await client.post("/models", json={"model": NAME})
            left = await client.post("/models/unload", json={"model": NAME})
        await client.post("/models", json={"model": NAME})
        removed = await client.delete("/models", params={"model": NAME})
        names = await listed(client)
        await client.post("/models", json={"model": NAME})
    ends = leftovers()

    assert [left.status_code, removed.status_code] == [200, 200]
    assert names == {"own": "unloaded"}
    assert events[-1] == {"model": NAME, "event": "download_failed"}
    assert ends == []


def test_a_program_without_a_model_fetches_its_first_one(hub):
    """
    A signal that comes meanwhile ends both, without an error, and nothing is left.
    """
    os.mkfifo(hub / "gate")
    with started(OURS, ["--port", "0"]) as server:
        by_line(server)
        line = next(line for line in server.lines if " listening on " in line)
        server.url = line.partition(" listening on ")[2].split()[0]
        with server.client() as client:
            models = client.get("/models").json()["data"]
            fetch = client.post("/models", json={"model": NAME})
            names = [model["id"] for model in client.get("/models").json()["data"]]
        server.process.send_signal(signal.SIGTERM)
        status = server.process.wait(LIMIT_S)

    assert (models, fetch.json(), names) == ([], {"success": True}, [NAME])
    assert (status, leftovers()) == (0, [])


@pytest.mark.parametrize(
    ("name", "variables", "expected"),
    [
        ("", {}, (400, "invalid_request", "non-empty")),
        ("../../etc", {}, (400, "invalid_request", "OWNER/REPO")),
        ("o/r/m-Q8_0.gguf", {}, (400, "invalid_request", "OWNER/REPO")),
        ("o/none", {}, (400, "model_not_found", "404: there is no o/none")),
        ("o/r:Q2_K", {}, (400, "model_not_found", "no file of Q2_K; it has m-Q8_0")),
        (NAME, {"HF_HUB_OFFLINE": "1"}, (400, "offline", "--offline")),
        (NAME, {"STUB_BYTES": str(2**60)}, (507, "disk_full", "remove another one")),
    ],
)
async def test_what_cannot_be_fetched_is_refused(
    hub, monkeypatch, name, variables, expected
):
    """
    By name, before anything is on its way.
    """
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    async with router() as (client, service):
        answer = await client.post("/models", json={"model": name})
        names, coming = await listed(client), service.downloads.progress()

    error, (status, code, words) = answer.json()["error"], expected
    assert (answer.status_code, error["reason"]) == (status, code)
    assert words in error["message"]
    assert (names, coming) == ({"own": "unloaded"}, {})


async def test_a_list_that_cannot_be_read_anew_ends_nothing(hub):
    """
    Somebody may clean the cache up while it is read; the service goes on with the list that it has.
    """

    def refresh():
        raise FileNotFoundError("snapshots")

    async with router() as (client, service):
        async with events_of(client, "download_finished"):
            service.refresh = refresh
            await client.post("/models", json={"model": NAME})
        names = await listed(client)

    assert names == {"own": "unloaded"}


async def test_few_are_fetched_at_a_time(hub, monkeypatch):
    """
    One more is to be tried later, and none keeps another endpoint from its answer.
    """
    monkeypatch.setattr(downloads, "MAX_DOWNLOADS", 1)
    os.mkfifo(hub / "gate")
    async with router() as (client, _):
        await client.post("/models", json={"model": NAME})
        answer = await client.post("/models", json={"model": "o/r"})
        health = await client.get("/health")

    assert (answer.status_code, health.status_code) == (503, 200)
    assert "retry-after" in answer.headers


async def test_only_what_was_fetched_is_removed(hub):
    """
    A model of a folder stays, and what is not there is not found.
    """
    async with router() as (client, _):
        delete = partial(client.delete, "/models")
        answers = [
            await delete(params=p) for p in ({"model": "own"}, {"model": "x"}, {})
        ]
        names = await listed(client)

    assert [answer.status_code for answer in answers] == [400, 404, 400]
    assert "not from cache" in answers[0].json()["error"]["message"]
    assert names == {"own": "unloaded"}


async def test_a_service_of_one_model_fetches_none():
    """
    The answer says so, as it does where the list of models never changes.
    """
    config = ServeConfig(in_place_of="llama-server")
    async with ModelCache({"own": CachedModel(lambda _: Sized("own"))}) as models:
        async with serving(make_app(models, config), "asyncio") as url:
            async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as client:
                fetch = await client.post("/models", json={"model": NAME})
                remove = await client.delete("/models", params={"model": "own"})

    assert [fetch.status_code, remove.status_code] == [501, 501]
