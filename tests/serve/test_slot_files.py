"""Files of slots over HTTP, in llama-server's words."""

import os
from errno import EACCES, EISDIR, ENOSPC, EROFS

import anyio
import pytest

from pyllama_raw import (
    AsyncEngine,
    CacheConfig,
    ContextConfig,
    EngineConfig,
    SchedulerConfig,
)
from pyllama_raw.serve import ServeConfig, make_app
from tests.serve.test_gate import client_of
from tests.support.limits import LIMIT_S
from tests.support.tiny import tiny_model

pytestmark = [pytest.mark.native, pytest.mark.anyio]
BODY = {"prompt": "Once upon a time there was a fox " * 4, "n_predict": 4}
BODY |= {"temperature": 0}
CONFIG = EngineConfig(
    context=ContextConfig(n_ctx=512, n_threads=1, n_threads_batch=1),
    scheduler=SchedulerConfig(n_slots=2),
    cache=CacheConfig(max_disk_bytes=250_000),
)


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
async def client(tmp_path):
    async with AsyncEngine.open(tiny_model("llama"), CONFIG) as engine:
        config = ServeConfig(
            in_place_of="llama-server", slot_save_path=str(tmp_path / "slots")
        )
        async with client_of(make_app({"a": engine}, config)) as client:
            with anyio.fail_after(LIMIT_S):
                yield client


async def act(client, action, name="fox.bin", slot=0):
    path = f"/slots/{slot}?action={action}"
    return await client.post(path, json={"filename": name})


async def test_a_slot_is_saved_erased_and_restored(client, tmp_path):
    """
    The answers tell what was moved, and the next prompt that begins alike is not computed again.
    """
    first = (await client.post("/completion", json=BODY)).json()
    saved = (await act(client, "save")).json()
    erased = await client.post("/slots/0?action=erase")
    cold = (await client.post("/completion", json=BODY)).json()
    await client.post("/slots/0?action=erase")
    restored = (await act(client, "restore", slot=1)).json()
    warm = (await client.post("/completion", json=BODY)).json()

    n_bytes = (tmp_path / "slots" / "fox.bin").stat().st_size
    [save_ms] = saved.pop("timings").items()
    [restore_ms] = restored.pop("timings").items()
    n_saved = first["tokens_evaluated"] + 3
    assert saved == {
        "id_slot": 0, "filename": "fox.bin", "n_saved": n_saved, "n_written": n_bytes,
    }  # fmt: skip
    assert restored == {
        "id_slot": 1, "filename": "fox.bin", "n_restored": n_saved, "n_read": n_bytes,
    }  # fmt: skip
    assert (save_ms[0], restore_ms[0]) == ("save_ms", "restore_ms")
    assert min(save_ms[1], restore_ms[1]) > 0
    assert erased.status_code == 200
    assert [cold["content"], warm["content"]] == [first["content"]] * 2
    assert (cold["timings"]["cache_n"], warm["timings"]["prompt_n"]) == (0, 2)


async def test_a_client_saves_the_slot_that_it_named(client):
    """
    Chats and completions have it if it is free; a number beyond the last one begins anew, and -1 is any.
    """
    paths = {"/completion": BODY, "/v1/completions": BODY}
    counts, ignored = [], []
    for slot, (path, body) in enumerate(paths.items()):
        words = body | {"prompt": f"{path} {body['prompt']}", "id_slot": slot + 2}
        answer = await client.post(path, json=words)
        ignored.append(answer.headers.get("x-ignored-fields"))
        counts.append(
            (await act(client, "save", f"{slot}.bin", slot)).json()["n_saved"]
        )
    last = await client.post("/completion", json=BODY | {"id_slot": -1})

    assert min(counts) > 40
    assert ignored == [None, None]
    assert last.headers["x-ignored-fields"] == "id_slot"


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../fox", "a/b", "a\\b", "/fox", ".fox", "a..b", "fox.", " fox", "fox ",
     "a\0b", "a\nb", "C:fox", "a*", "x" * 256, "ü" * 128, None, 7, ["fox"]],
)  # fmt: skip
async def test_a_file_has_a_name_and_no_folder(client, tmp_path, name):
    """
    All else is refused, and nothing is written.
    """
    await client.post("/completion", json=BODY)
    answers = [await act(client, action, name) for action in ("save", "restore")]

    assert [answer.status_code for answer in answers] == [400, 400]
    assert {answer.json()["error"]["param"] for answer in answers} == {"filename"}
    assert [*tmp_path.rglob("*")] == []


async def test_what_cannot_be_moved_is_refused_by_name(client, tmp_path):
    """
    A slot that holds nothing, a file that is another one, no such slot, and a folder that is full.
    """
    empty = await act(client, "save", slot=1)
    await client.post("/completion", json=BODY)
    await act(client, "save")
    (tmp_path / "slots" / "other.bin").write_bytes(b"other" * 1000)
    other = await act(client, "restore", "other.bin")
    missing = await act(client, "restore", "missing.bin")
    no_slot = await act(client, "save", slot=2)
    (tmp_path / "slots" / "large.bin").write_bytes(bytes(200_000))
    full = await act(client, "save", "more.bin")
    body = await client.post("/slots/0?action=save", content=b"{")

    refused = [empty, other, missing, no_slot, body]
    assert [answer.status_code for answer in refused] == [400] * 5
    assert [answer.json()["error"]["param"] for answer in refused] == [
        *("id_slot", "filename", "filename", "id_slot", "filename"),
    ]
    assert (full.status_code, full.json()["error"]["reason"]) == (507, "disk_full")


async def test_moves_come_one_after_the_other(client, tmp_path):
    """
    Many at once take the memory and the disk of one: the folder has no more than its limit and a file.
    """
    await client.post("/completion", json=BODY)
    answers = []

    async def save(number):
        answers.append(await act(client, "save", f"{number}.bin"))

    async with anyio.create_task_group() as group:
        for number in range(8):
            group.start_soon(save, number)

    n_bytes = {f.stat().st_size for f in (tmp_path / "slots").iterdir()}
    [size] = n_bytes
    n_files = -(-CONFIG.cache.max_disk_bytes // size)
    statuses = sorted(answer.status_code for answer in answers)
    assert statuses == [200] * n_files + [507] * (8 - n_files)


@pytest.mark.parametrize(
    ("number", "expected"),
    [(ENOSPC, (507, "disk_full")), (EROFS, (500, "internal_error")),
     (EACCES, (500, "internal_error")), (EISDIR, (400, "invalid_request"))],
)  # fmt: skip
async def test_who_is_at_fault_for_a_file_that_is_not_written(
    client, tmp_path, monkeypatch, number, expected
):
    """
    The disk, the folder, or the client with a name that is taken by a folder; no half of a file stays.
    """

    def fail(descriptor):
        raise OSError(number, os.strerror(number))

    await client.post("/completion", json=BODY)
    monkeypatch.setattr(os, "fsync", fail)
    answer = await act(client, "save")

    assert (answer.status_code, answer.json()["error"]["reason"]) == expected
    assert [*(tmp_path / "slots").iterdir()] == []


async def test_a_key_has_files_of_its_own(tmp_path):
    """
    Nobody reads or replaces those of another key; keys that see all share one folder; all count together.
    """
    keys = tmp_path / "keys"
    keys.write_text("alice key-a\nbob key-b\nmonitor key-m\n")
    folder = tmp_path / "slots"
    config = ServeConfig(
        in_place_of="llama-server", slot_save_path=str(folder), api_keys_file=str(keys)
    )

    async def tried(client, key, action):
        client.headers["authorization"] = f"Bearer {key}"
        return (await act(client, action)).status_code

    with anyio.fail_after(LIMIT_S):
        async with AsyncEngine.open(tiny_model("llama"), CONFIG) as engine:
            headers = {"authorization": "Bearer key-a"}
            async with client_of(make_app({"a": engine}, config), headers) as client:
                await client.post("/completion", json=BODY)
                alone = [await tried(client, "key-a", "save")]
                alone += [
                    await tried(client, key, "restore") for key in ("key-b", "key-m")
                ]
                saves = [await tried(client, key, "save") for key in ("key-b", "key-m")]
                names = {path.name for path in folder.rglob("*.bin")}
                n_files = len([*folder.rglob("*.bin")])
                (folder / "large.bin").write_bytes(bytes(250_000))
                full = await tried(client, "key-b", "save")

    assert alone == [200, 400, 400]
    assert (saves, names, n_files) == ([200, 200], {"fox.bin"}, 3)
    assert full == 507


async def test_without_a_folder_slots_have_no_files():
    """
    The answer says which flag gives one, and it is nothing to a request which slot it has.
    """
    config = ServeConfig(in_place_of="llama-server")
    async with AsyncEngine.open(tiny_model("llama"), CONFIG) as engine:
        async with client_of(make_app({"a": engine}, config)) as client:
            answer = await act(client, "save")
            text = await client.post("/completion", json=BODY | {"id_slot": 0})

    assert text.headers["x-ignored-fields"] == "id_slot"
    assert answer.status_code == 501
    assert "--slot-save-path" in answer.json()["error"]["message"]
