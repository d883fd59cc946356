"""What comes in and what does not: keys, budgets, origins, ids; and what is written down."""

import json
from contextlib import asynccontextmanager
from functools import cache
from types import SimpleNamespace

import anyio
import httpx
import pytest

from pyllama_raw.core.memory.cache import PrefixCache
from pyllama_raw.core.memory.snapshots import SnapshotKind
from pyllama_raw.errors import ConfigError
from pyllama_raw.runners import ModelCache
from pyllama_raw.serve import ServeConfig, make_app
from pyllama_raw.serve.failures import Failure
from pyllama_raw.serve.gate import Gate
from pyllama_raw.serve.keys import ADMIN, VARIABLE, Bucket, Keys
from pyllama_raw.serve.service import Service, retry_s
from tests.serve.support import LIMIT_S, chatting
from tests.support.loops import anyio_backend  # noqa: F401

pytestmark = pytest.mark.anyio

OPEN = {"/livez", "/readyz", "/health", "/v1/health"}
CHAT = {"messages": [{"role": "user", "content": "a chat"}], "max_tokens": 3, "seed": 1}
PATH = "/v1/chat/completions"


@asynccontextmanager
async def asking(headers=None, cache=None, **options):
    """A client of an application that needs no server."""
    with anyio.fail_after(LIMIT_S):
        async with chatting(cache=cache) as engine:
            app = make_app({"a": engine}, ServeConfig(**options))
            async with client_of(app, headers) as client:
                yield app, client


def client_of(app, headers=None):
    """A client that needs no server."""
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(
        transport=transport,
        base_url="http://here",
        headers=headers,
        timeout=LIMIT_S,
    )


@cache
def described():
    """Methods and paths of all routes; to describe them takes longer than to ask them all."""
    paths = make_app({"a": chatting()}).openapi()["paths"]
    return [(method, path) for path, methods in paths.items() for method in methods]


def requests_of_all():
    """Methods and paths of all routes, with values for what is named, and of some others."""
    for method, path in described():
        yield method, path.replace("{", "").replace("}", "")
    yield from [("get", "/openapi.json"), ("get", "/docs"), ("get", "/nothing")]


@pytest.fixture
def keys_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"# ours\nalice sk-1\nsk-2  # of nobody\n{ADMIN} sk-admin\n")
    return str(file)


async def test_a_body_for_a_process_stays_no_longer_than_its_request():
    """
    An idle connection has its last exchange, and would keep the body with it.
    """
    exchanges, contents = [], []

    async def application(scope, receive, send):
        exchanges.append(scope["state"]["exchange"])
        contents.append(exchanges[-1].content)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    service = Service(ModelCache({}), ServeConfig(), has_processes=True)
    with anyio.fail_after(LIMIT_S):
        async with client_of(Gate(application, service)) as client:
            await client.post("/v1/completions", content=b"{}" * 9)
    after = [exchange.content for exchange in exchanges]

    assert (contents, after) == ([b"{}" * 9], [b""])


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer sk-3"},
        {"authorization": "Basic sk-1"},
        {"authorization": b"Bearer \xff"},
        {"x-api-key": "alice sk-1"},
    ],
)
async def test_a_wrong_key_opens_probes_alone(headers, keys_file):
    """
    Whatever the route is, and whether or not there is one.
    """
    async with asking(headers, api_keys_file=keys_file) as (_, client):
        statuses = {
            (path, (await client.request(method, path)).status_code)
            for method, path in requests_of_all()
        }

    assert {path for path, status in statuses if status == 401} >= {PATH, "/nothing"}
    assert {path for path, status in statuses if status != 401} == OPEN & {
        path for path, _ in statuses
    }
    assert {status for path, status in statuses if path in OPEN} == {200}


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "bearer sk-1"},
        {"x-api-key": "sk-2"},
        {"authorization": "Bearer none", "x-api-key": "sk-1"},
        {"authorization": "sk-1"},
        {"x-api-key": "Bearer sk-1"},
    ],
)
async def test_each_key_opens_all_but_changes(headers, keys_file, monkeypatch):
    """
    By either header, with the word in front or without; keys of the environment, too.
    """
    monkeypatch.setenv(VARIABLE, "sk-9, bob sk-8")
    async with asking(headers, api_keys_file=keys_file) as (_, client):
        first = await client.post(PATH, json=CHAT)
        other = await client.post(PATH, json=CHAT, headers={"x-api-key": "sk-8"})
        denied = await client.delete("/lora-adapters/x")
        allowed = await client.delete(
            "/lora-adapters/x", headers={"authorization": "Bearer sk-admin"}
        )

    assert (first.status_code, other.status_code) == (200, 200)
    assert (denied.status_code, denied.json()["error"]["code"]) == (
        403,
        "admin_key_needed",
    )
    assert (allowed.status_code, allowed.json()["error"]["code"]) == (
        404,
        "adapter_not_found",
    )


async def test_without_keys_all_may_come_in_and_none_may_change():
    """
    An address that is open to all is no reason to let anybody load files.
    """
    async with asking() as (_, client):
        asked = await client.post(PATH, json=CHAT)
        changed = await client.put("/lora-adapters", json={"name": "a", "path": "b"})

    assert (asked.status_code, changed.status_code) == (200, 403)


@pytest.mark.parametrize("text", ["", "# none\n", "a b c\n", None])
async def test_a_file_without_a_key_is_refused(text, tmp_path):
    """
    Because a service that lets all in is not what was asked for.
    """
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match="keys"):
        async with asking(api_keys_file=str(file)):
            pass


async def test_a_key_may_have_the_sign_of_a_comment(tmp_path):
    """
    Only at the beginning of a line or behind a blank it begins one: no key is cut to a part.
    """
    file = tmp_path / "keys"
    file.write_text("# clients\nbob part#whole # of Bob\n")
    config = ServeConfig(api_keys_file=str(file))

    keys = Keys(config)

    assert keys.check({"x-api-key": "part#whole"}, None).name == "bob"
    with pytest.raises(Failure):
        keys.check({"x-api-key": "part"}, None)


async def test_keys_do_not_share_a_cache(keys_file):
    """
    By option: the second request of a key finds the prefix of its first, that of another
    does not, whatever salt it gives.
    """
    chat = CHAT | {"messages": [{"role": "user", "content": "a prefix " * 6}]}
    cached = []
    cache = PrefixCache(SnapshotKind.RANGE, max_bytes=10**6, max_entries=100)
    options = {"api_keys_file": keys_file, "salt_by_key": True}
    async with asking(cache=cache, **options) as (_, client):
        for key, salt in (
            *[("sk-1", None), ("sk-1", None), ("sk-2", None)],
            *[("sk-1", "s"), ("sk-1", "s"), ("sk-2", "s")],
        ):
            asked = chat | {"cache_salt": salt}
            answer = await client.post(PATH, json=asked, headers={"x-api-key": key})
            n_cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert answer.headers["x-cached-tokens"] == str(n_cached)
            cached.append(n_cached > 0)

    assert cached == [False, True, False, False, True, False]


async def test_a_client_waits_by_its_own_rate(keys_file):
    """
    429 with the seconds to wait, and others are served meanwhile.
    """
    async with asking(api_keys_file=keys_file, requests_per_minute=2) as (_, client):
        by_key = [
            (await client.post(PATH, json=CHAT, headers={"x-api-key": key}))
            for key in ("sk-1", "sk-1", "sk-1", "sk-2")
        ]

    assert [answer.status_code for answer in by_key] == [200, 200, 429, 200]
    assert by_key[2].json()["error"]["type"] == "rate_limit_error"
    assert 1 <= int(by_key[2].headers["retry-after"]) <= 30


async def test_tokens_are_charged_when_they_are_known():
    """
    What has begun ends; the next one waits until the debt is paid.
    """
    async with asking(tokens_per_minute=5) as (_, client):
        answers = [await client.post(PATH, json=CHAT) for _ in range(2)]

    assert [answer.status_code for answer in answers] == [200, 429]
    assert 60 < int(answers[1].headers["retry-after"]) <= 72  # 5 too many, and 1


def test_a_bucket_fills_evenly_and_is_never_too_full():
    """
    It may be overdrawn.
    """
    bucket = Bucket(60, 0.0)
    waits = [bucket.wait_s(1, 0.0)]
    bucket.take(70)
    waits += [bucket.wait_s(1, 0.0), bucket.wait_s(1, 5.0), bucket.wait_s(1, 11.0)]
    waits += [bucket.wait_s(60, 1000.0), bucket.wait_s(61, 2000.0)]

    assert waits == [0.0, 11.0, 6.0, 0.0, 0.0, 1.0]


def test_the_wait_for_a_place_is_the_engine_s_own_estimate():
    """
    That of the first engine with a slot, in whole seconds: one at least, sixty at most.
    """
    waits = [[None], [0.0], [3.2], [70.0], [3.2, 2.0]]
    seconds = [
        retry_s([SimpleNamespace(queue_s=wait) for wait in engines])
        for engines in waits
    ]

    assert seconds == [1, 1, 4, 60, 2]


async def test_browsers_of_other_origins_are_let_in_by_option():
    """
    A question of a browser needs no key; without the option nobody answers it.
    """
    question = {"origin": "http://a", "access-control-request-method": "POST"}
    asks = question | {"access-control-request-headers": "authorization,x-stainless-os"}
    async with asking() as (_, client):
        off = await client.options(PATH, headers=asks)
    async with asking(cors_origins=("http://a",)) as (_, client):
        on = await client.options(PATH, headers=asks)
        other = await client.options(PATH, headers=asks | {"origin": "http://b"})
        answer = await client.post(PATH, json=CHAT, headers={"origin": "http://a"})
        plain = await client.post(PATH, json=CHAT)

    allow = "access-control-allow-origin"
    assert (off.status_code, allow in off.headers) == (405, False)
    assert (on.status_code, on.headers[allow]) == (200, "http://a")
    allowed = on.headers["access-control-allow-headers"]
    assert allowed == "authorization,x-stainless-os"
    assert (other.status_code, allow in other.headers) == (200, False)
    assert allow not in plain.headers
    assert (answer.status_code, answer.headers[allow]) == (200, "http://a")


@pytest.mark.parametrize(
    ("origins", "let_in", "others"),
    [
        (["*"], ["http://a", "localhost", "null"], []),
        (
            ["localhost", "http://b"],
            [
                "http://localhost",
                "https://127.0.0.1:80",
                "http://[::1]:3000",
                "http://b",
            ],
            [
                "http://localhost.a",
                "http://notlocalhost",
                "http://127x0.0.1",
                "http://bb",
            ],
        ),
        (
            ["https://*.a.org"],
            ["https://x.a.org", "https://x.y.a.org"],
            [
                "https://a.org",
                "https://x.a.org.b",
                "https://xaaorg",
                "https://b/.a.org",
            ],
        ),
    ],
)
async def test_origins_are_patterns(origins, let_in, others):
    """
    Each that is let in may bring cookies, unless all pages are let in.
    """
    asks = {"access-control-request-method": "POST"}
    async with asking(cors_origins=origins) as (_, client):
        answers = [
            await client.options(PATH, headers=asks | {"origin": origin})
            for origin in (*let_in, *others)
        ]

    allow = "access-control-allow-origin"
    assert [each.headers.get(allow) for each in answers] == [
        *let_in,
        *(None for _ in others),
    ]
    cookies = {each.headers.get("access-control-allow-credentials") for each in answers}
    assert cookies == {None if "*" in origins else "true"}


@pytest.mark.parametrize("given", ["an-id", "", "two words", "\xe9", "x" * 257])
async def test_an_id_comes_back_if_it_is_one(given):
    """
    Otherwise the service gives one; also with an error.
    """
    async with asking() as (_, client):
        headers = {"x-request-id": given.encode("latin-1")}
        answer = await client.get("/nothing", headers=headers)

    own = answer.headers["x-request-id"]
    assert (own == given) is (given == "an-id")
    assert own.isascii()
    assert answer.json()["error"]["code"] == "not_found"


async def test_each_request_is_written_down(keys_file, tmp_path):
    """
    With the tokens it took and the owner of its key, never the key.
    """
    log = tmp_path / "log"
    async with asking(api_keys_file=keys_file, access_log=str(log)) as (app, client):
        key = {"x-api-key": "sk-1", "x-request-id": "one"}
        whole = await client.post(PATH, json=CHAT, headers=key)
        stream = await client.post(PATH, json=CHAT | {"stream": True}, headers=key)
        await client.post(PATH, json=CHAT)
        metrics = app.state.service.traffic.collect()
        counted = {
            (sample.name, *sample.labels.values()): sample.value
            for family in metrics
            for sample in family.samples
            if not sample.name.endswith("_created")
        }
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    facts = ("status", "bytes", "left", "model", "prompt_tokens", "output_tokens")

    assert "sk-1" not in log.read_text()
    assert [[line[name] for name in facts] for line in lines] == [
        [200, len(whole.content), False, "a", 7, 3],
        [200, len(stream.content), False, "a", 7, 3],
        [401, lines[2]["bytes"], False, None, 0, 0],
    ]
    assert [line["client"] for line in lines] == ["alice", "alice", None]
    assert [line["id"] == "one" for line in lines] == [True, True, False]
    requests = "pyllama_raw:http_requests_total"
    assert counted[requests, "POST", PATH, "200"] == 2
    assert counted[requests, "POST", "", "401"] == 1
    assert counted["pyllama_raw:http_refused_total", "invalid_api_key"] == 1
    assert counted["pyllama_raw:http_requests_in_flight",] == 0
    assert counted["pyllama_raw:http_disconnects_total",] == 0


async def test_a_deadline_of_nothing_is_a_mistake():
    """
    And not the service's own.
    """
    body = {"messages": [{"role": "user", "content": "a"}], "deadline_s": 0}
    async with asking(deadline_s=9) as (_, client):
        answer = await client.post(PATH, json=body)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "deadline_s")


@pytest.mark.parametrize("path", [f"{PATH}/", f"/{PATH}", "/v1//chat/completions"])
async def test_a_slash_too_many_leads_to_the_same(path, keys_file):
    """
    Without a redirect, which would name an address without the encryption of a proxy; with its key.
    """
    headers = {"authorization": "Bearer sk-1"}
    async with asking(headers, api_keys_file=keys_file) as (app, client):
        answer = await client.post(f"http://here{path}", json=CHAT)
        denied = await client.delete("http://here//lora-adapters/x/")
        wrong = {"authorization": "no"}
        stranger = await client.post(f"http://here{path}", json=CHAT, headers=wrong)
        below = httpx.ASGITransport(app, root_path="/llm")
        address = "http://here/llm"
        async with httpx.AsyncClient(transport=below) as visitor:
            pages = [await visitor.get(f"{address}{end}") for end in ("", "/", "//")]

    assert (answer.status_code, denied.status_code, stranger.status_code) == (
        200,
        403,
        401,
    )
    assert {page.status_code for page in pages} == {200}


async def test_routes_that_answer_get_answer_head():
    """
    With the headers of GET and no body, as monitors ask.
    """
    async with asking() as (_, client):
        paths = [path for method, path in requests_of_all() if method == "get"]
        got = [await client.get(path) for path in (*paths, "/")]
        heads = [await client.head(path) for path in (*paths, "/")]
        other = await client.head(PATH)

    assert [head.status_code for head in heads] == [each.status_code for each in got]
    assert {head.content for head in heads} == {b""}
    assert (other.status_code, other.headers["allow"]) == (405, "POST")
