"""A service in the place of llama-server: what it takes, ignores and tells, on fakes."""

import json
import socket
from math import inf

import pytest

from pyllama_raw import __version__
from pyllama_raw.errors import ConfigError, PromptTooLong
from pyllama_raw.options.sampling import SamplingParams
from pyllama_raw.serve import ServeConfig, make_app
from pyllama_raw.serve.answer import LineEnd, LineLimits
from pyllama_raw.serve.config import ListenConfig
from pyllama_raw.serve.deployment import AdapterEntry
from pyllama_raw.serve.failures import JSON, Failure
from pyllama_raw.serve.listening import (
    LOADING,
    LoadingApp,
    address_of,
    bound,
    files_of,
    release,
)
from pyllama_raw.serve.llamacpp import NativeCompletionBody, _fitting, settings
from pyllama_raw.testing import fake_engine
from tests.serve.test_gate import CHAT, PATH, asking, client_of

pytestmark = pytest.mark.anyio

LLAMA = {"in_place_of": "llama-server"}


def in_place(**options):
    return asking(**LLAMA, **options)


async def frames(client, path=PATH, **body):
    """Events of a stream."""
    text = (await client.post(path, json=CHAT | {"stream": True} | body)).text
    return [
        json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")
    ]


async def test_what_llama_server_ignores_is_ignored_and_named():
    """
    Elsewhere the same body is refused. A name that could be anything is not told again.
    """
    body = CHAT | {"tfs_z": 0.5, "best_of": 3, "never_heard_of": {"a": 1}, "a b\n": 1}
    async with in_place() as (_, client):
        accepted = await client.post(PATH, json=body)
    async with asking() as (_, client):
        refused = await client.post(PATH, json=body)

    assert accepted.status_code == 200
    assert accepted.headers["x-ignored-fields"] == "tfs_z, best_of, never_heard_of"
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tfs_z")


async def test_what_llama_server_does_and_we_do_not_is_refused_by_its_name():
    """
    With the number that it has as code, and our own word as reason.
    """
    async with in_place() as (_, client):
        answer = await client.post(PATH, json=CHAT | {"reasoning_budget_tokens": 9})

    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, 400)
    assert (error["param"], error["reason"]) == (
        "reasoning_budget_tokens",
        "unknown_parameter",
    )


async def test_chats_have_the_names_of_llama_server():
    """
    n_predict, samplers and n_probs of any value.
    """
    body = {"messages": CHAT["messages"], "seed": 1, "n_predict": 2, "n_probs": 1}
    async with in_place() as (_, client):
        answer = await client.post(PATH, json=body | {"samplers": ["typ_p", "top_k"]})

    choice = answer.json()["choices"][0]
    assert answer.json()["usage"]["completion_tokens"] == 2
    assert [len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]] == [
        1,
        1,
    ]


@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
async def test_answers_name_what_runs_as_llama_server_does(path):
    """
    In the form of its builds, each chunk, too, and `/props`; elsewhere an answer has no such name.
    """
    body = CHAT | ({"prompt": "a"} if path != PATH else {})
    async with in_place() as (_, client):
        whole = (await client.post(path, json=body)).json()
        chunks = await frames(client, path, **body)
        props = (await client.get("/props")).json()
    async with asking() as (_, client):
        plain = (await client.post(path, json=body)).json()

    build = f"b0-pyllama_raw-{__version__}"
    names = {chunk["system_fingerprint"] for chunk in chunks}
    assert (whole["system_fingerprint"], names) == (build, {build})
    assert (props["build_info"], "system_fingerprint" in plain) == (build, False)


@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
async def test_the_chunk_with_the_reason_has_the_times(path):
    """
    As llama-server's has, without any option; elsewhere no chunk has more than clients ask for.
    """
    body = {"prompt": "a"} if path != PATH else {}
    async with in_place() as (_, client):
        *earlier, last = await frames(client, path, **body)
    async with asking() as (_, client):
        plain = await frames(client, path, **body)

    assert last["choices"][0]["finish_reason"] == "length"
    assert last["timings"]["predicted_n"] == 3
    assert not any("timings" in frame for frame in [*earlier, *plain])


async def test_a_warm_up_makes_no_text():
    """
    n_predict of 0 computes the prompt, whole and in a stream.
    """
    async with in_place() as (_, client):
        question = {
            "messages": CHAT["messages"],
            "n_predict": 0,
            "response_fields": [""],
        }
        single = (await client.post(PATH, json=question)).json()
        streamed = await client.post(PATH, json=question | {"stream": True})

    assert single["choices"][0]["message"]["content"] == ""
    assert single["choices"][0]["finish_reason"] == "length"
    assert single["usage"]["completion_tokens"] == 0
    assert '"delta":{"content"' not in streamed.text


async def test_completions_tell_log_probabilities_in_both_forms():
    """
    The lists of old clients, and what llama-server has for new ones.
    """
    question = {"prompt": "a", "max_tokens": 2, "seed": 1, "logprobs": 1}
    async with in_place() as (_, client):
        answer = (await client.post("/v1/completions", json=question)).json()

    logprobs = answer["choices"][0]["logprobs"]
    names = [entry["token"] for entry in logprobs["content"]]
    assert names == logprobs["tokens"]
    assert len(logprobs["token_logprobs"]) == 2


async def test_defaults_are_those_of_llama_server():
    """
    Elsewhere those of a chat are OpenAI's.
    """
    modes = []
    for service in (in_place(), asking()):
        async with service as (app, client):
            props = (await client.get("/props")).json()
            modes.append(app.state.service.is_llama)
            params = props["default_generation_settings"]["params"]

    assert modes == [True, False]
    assert (params["temperature"], params["top_k"]) == (0.8, 40)


async def test_a_body_may_come_as_curl_sends_it():
    """
    llama-server does not look at the content type.
    """
    headers = {"content-type": "application/x-www-form-urlencoded"}
    async with in_place() as (_, client):
        accepted = await client.post(PATH, content=json.dumps(CHAT), headers=headers)
    async with asking() as (_, client):
        refused = await client.post(PATH, content=json.dumps(CHAT), headers=headers)

    assert (accepted.status_code, refused.status_code) == (200, 400)


async def test_models_and_props_have_the_fields_that_are_read():
    """
    The list of Ollama's form, the context of a slot, what the template can do.
    """
    options = {"aliases": {"b": "a"}, "tags": ["small"], "any_model": True}
    async with in_place(**options) as (app, client):
        models = (await client.get("/v1/models")).json()
        props = (await client.get("/props", params={"autoload": "false"})).json()
        by_alias = await client.post(PATH, json=CHAT | {"model": "b"})
        n_ctx = app.state.service.engines["a"].n_ctx_slot

    [entry], [listed] = models["data"], models["models"]
    assert (entry["owned_by"], entry["aliases"], entry["tags"]) == (
        "llamacpp",
        ["b"],
        ["small"],
    )
    assert entry["meta"]["n_ctx"] == n_ctx
    assert "status" not in entry
    assert (listed["name"], listed["model"]) == ("a", "a")
    assert props["default_generation_settings"]["n_ctx"] == n_ctx
    assert props["modalities"]["vision"] is False
    assert set(props["chat_template_caps"]) >= {"supports_tools", "supports_tool_calls"}
    assert (props["is_sleeping"], props["endpoint_slots"]) == (False, True)
    assert by_alias.json()["model"] == "a"


async def test_slots_have_the_names_of_llama_server_and_can_be_erased():
    """
    Saving is refused by its name where there is no folder for files.
    """
    async with in_place() as (_, client):
        slots = (await client.get("/slots")).json()
        full = await client.get("/slots", params={"fail_on_no_slot": "1"})
        erased = await client.post("/slots/0", params={"action": "erase"})
        saved = await client.post("/slots/0", params={"action": "save"})
        wrong = [
            await client.post(f"/slots/{number}", params={"action": "erase"})
            for number in ("99", "1" * 5000, "-1", "¹")
        ]

    assert {"id", "n_ctx", "is_processing", "speculative"} <= set(slots[0])
    assert full.status_code == 200
    assert (erased.status_code, erased.json()["id_slot"]) == (200, 0)
    assert (saved.status_code, saved.json()["error"]["type"]) == (
        501,
        "not_supported_error",
    )
    assert [(a.status_code, a.json()["error"]["param"]) for a in wrong] == [
        (400, "id_slot")
    ] * 4


async def test_scales_of_adapters_for_all_are_finite():
    """
    Others would make each later request that names no adapter a mistake.
    """
    async with in_place() as (_, client):
        bodies = [
            f'[{{"id": 0, "scale": {scale}}}]' for scale in ("NaN", "1e999", "101")
        ]
        answers = [await client.post("/lora-adapters", content=body) for body in bodies]
        answer = await client.post("/completion", json={"prompt": "a", "n_predict": 1})

    assert [(a.status_code, a.json()["error"]["param"]) for a in answers] == [
        (400, "body")
    ] * 3
    assert answer.status_code == 200
    with pytest.raises(ConfigError, match="scale"):
        AdapterEntry(name="a", path="a", scale=float("nan"))


async def test_many_biases_are_not_told_with_each_output():
    """
    Settings name the first thousand; the outputs of one body would fill the memory with all of them.
    """
    biases = [[65 + token % 26, 0.0] for token in range(5000)]
    body = {"prompt": "a", "n_predict": 1, "n_cmpl": 2, "logit_bias": biases}
    async with in_place() as (_, client):
        answer = await client.post("/completion", json=body)
    tokens = [*range(5000)]
    params = SamplingParams(
        logit_bias=dict.fromkeys(tokens, 1.0), suppress_tokens=tokens
    )
    async with fake_engine() as engine:
        facts = settings(params, engine)

    used = [output["generation_settings"]["logit_bias"] for output in answer.json()]
    assert [len(biases) for biases in used] == [26, 26]
    assert (len(facts["logit_bias"]), len(facts["suppress_tokens"])) == (1000, 1000)


async def test_the_part_of_a_text_that_fits_is_there_after_few_tries():
    """
    However unevenly its tokens lie: proportion alone would take off a thousandth each time.
    """
    sizes = []

    class Uneven:
        n_ctx_slot = 1000

        async def tokenize(self, text, **_):
            sizes.append(len(text))
            if len(text) > 900:
                raise PromptTooLong(1001, 1000)
            return [1]

    for end in (True, False):
        assert await _fitting(Uneven(), "a" * 10**6, end=end) == [1]

    assert len(sizes) <= 20


def test_a_time_to_stay_loaded_is_a_short_text():
    """
    A text of a million parts is no time.
    """
    bodies = [
        NativeCompletionBody.model_validate({"prompt": "a", "keep_alive": text})
        for text in ("1h30m", "1s" * 10**6)
    ]

    assert bodies[0].keep_alive_s == 5400
    with pytest.raises(Failure, match="give seconds"):
        assert bodies[1].keep_alive_s


async def test_elsewhere_actions_need_the_key_of_an_operator():
    """
    Also where no client has a key.
    """
    async with asking() as (_, client):
        answers = [
            await client.post("/slots/0", params={"action": "erase"}),
            await client.post("/lora-adapters", json=[]),
        ]

    assert [answer.status_code for answer in answers] == [403, 403]


async def test_facts_may_be_closed():
    """
    Their endpoints answer 501, the page 404, and all else goes on.
    """
    closed = ["metrics", "slots", "props", "page"]
    async with in_place(closed=closed) as (_, client):
        answers = [
            await client.get(path) for path in ("/metrics", "/slots", "/", "/props")
        ]
        changed = await client.post("/props", json={})

    assert [answer.status_code for answer in answers] == [501, 501, 404, 200]
    assert changed.status_code == 501


async def test_variables_of_templates_have_defaults():
    """
    Those of a request win.
    """
    template = "{{ enable_thinking }} {{ level }}: {{ messages[0].content }}"
    config = ServeConfig(
        **LLAMA, template_kwargs={"enable_thinking": False, "level": 1}
    )
    own = {"chat_template_kwargs": {"level": 2}}
    async with fake_engine(chat_template=template) as engine:
        async with client_of(make_app(engine, config)) as client:
            usual = await client.post("/apply-template", json=CHAT)
            special = await client.post("/apply-template", json=CHAT | own)

    prompts = [answer.json()["prompt"] for answer in (usual, special)]
    assert prompts == ["False 1: a chat", "False 2: a chat"]


@pytest.mark.parametrize("path", ["/models/load", "/tools", "/v1/audio/transcriptions"])
async def test_what_is_not_here_says_so(path):
    """
    501, so that a program goes on without it.
    """
    async with in_place() as (_, client):
        answer = await client.post(path, json={})

    assert (answer.status_code, answer.json()["error"]["code"]) == (501, 501)


# -- ends at a line ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "parts", "text"),
    [
        (LineLimits(2), ["  a\n  b", "\n  c\n", "d"], "  a\n  b\n  c\n"),
        (LineLimits(1), ["a\n\n b\n", "c"], "a\n\n b\n"),
        (LineLimits(2), ["a\n", " ", "b"], "a\n "),
        (LineLimits(0, -1.0), ["a", "b\nc", "d"], "ab\n"),
        (LineLimits(0, inf), ["a\nb", "c"], "a\nbc"),
    ],
)
async def test_an_output_ends_at_a_line(limits, parts, text):
    """
    Before a line with fewer blanks, and at the first end of a line behind the time.
    """
    end = LineEnd(limits)
    accepted = [end.take(part) for part in parts]

    assert "".join(accepted) == end.text == text


def test_many_likely_tokens_go_with_few_output_tokens():
    """
    4,096 for 256 tokens; what would take all the memory is refused.
    """
    assert SamplingParams(logprobs=4096, max_tokens=256).logprobs == 4096
    with pytest.raises(ConfigError, match="at most 20 with 100000 output tokens"):
        SamplingParams(logprobs=21, max_tokens=100_000)


# -- before there is a model -------------------------------------------------------------


async def test_a_service_that_loads_answers_as_llama_server_does():
    """
    503 on all paths but the page, and that it lives.
    """
    app = LoadingApp()
    async with client_of(app) as client:
        paths = ("/health", "/v1/models", "/v1/chat/completions", "/nothing")
        answers = [await client.get(path) for path in paths]
        page, alive = await client.get("/"), await client.get("/livez")
        app.app = JSON({"status": "ok"})
        ready = await client.get("/health")

    assert [answer.status_code for answer in answers] == [503] * 4
    assert all(answer.json() == LOADING for answer in answers)
    assert (page.status_code, page.headers["content-type"][:9]) == (200, "text/html")
    assert (alive.status_code, ready.json()) == (200, {"status": "ok"})


def test_hosts_may_be_several_and_files(tmp_path):
    """
    All TCP addresses have the port of the first one; a file is taken away at the end.
    """
    path = tmp_path / "server.sock"
    listen = ListenConfig(host=f"127.0.0.1, ::1,{path}", port=0)
    try:
        sockets = bound(listen)
    except OSError:
        pytest.skip("this machine has no IPv6")
    addresses = [address_of(listener) for listener in sockets]
    ports = {listener.getsockname()[1] for listener in sockets[:2]}
    release(sockets, files_of(sockets))

    assert len(ports) == 1
    assert addresses == [
        f"http://127.0.0.1:{min(ports)}",
        f"http://[::1]:{min(ports)}",
        str(path),
    ]
    assert not path.exists()


def test_a_file_of_a_killed_server_gives_way_and_that_of_a_running_one_does_not(
    tmp_path,
):
    """
    The error names the address.
    """
    path = tmp_path / "server.sock"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    listen = ListenConfig(uds=str(path))
    sockets = bound(listen)
    with pytest.raises(OSError, match=r"cannot listen at .*server\.sock"):
        bound(listen)
    release(sockets, files_of(sockets))

    assert not path.exists()


def test_a_port_that_is_taken_is_named():
    """
    With its host.
    """
    sockets = bound(ListenConfig(port=0))
    port = sockets[0].getsockname()[1]
    with pytest.raises(OSError, match=f"cannot listen at 127.0.0.1:{port}"):
        bound(ListenConfig(port=port))
    release(sockets, [])
