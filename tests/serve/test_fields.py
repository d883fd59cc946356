"""Fields of other servers: what is done, what is neutral, what is ignored and what is refused."""

import httpx
import numpy as np
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_create_params
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import input_token_count_params, response_create_params

from pyllama_raw import AsyncEngine
from pyllama_raw.serve import ServeConfig, make_app
from pyllama_raw.serve.actions import AdapterBody
from pyllama_raw.serve.body import Body
from pyllama_raw.serve.failures import Failure
from pyllama_raw.serve.gate import BodyRoute
from pyllama_raw.serve.llamacpp import NativeCompletionBody
from pyllama_raw.serve.messages import MessagesBody
from pyllama_raw.serve.openai import ChatBody, CompletionBody, read_completion
from pyllama_raw.serve.responses import ResponsesBody
from pyllama_raw.serve.tokens import DetokenizeBody, TokenizeBody
from pyllama_raw.serve.vectors import EmbeddingBody, RerankBody
from scripts.field_table import PAGE, ROWS, written
from tests.serve.support import chatting
from tests.serve.test_gate import CHAT, PATH, asking, client_of
from tests.support.last_digits import assert_near
from tests.support.tiny import tiny_model

MESSAGES = [{"role": "user", "content": "a"}]
SDK = (
    (ChatBody, chat_create_params.CompletionCreateParamsBase),
    (CompletionBody, completion_create_params.CompletionCreateParamsBase),
    (EmbeddingBody, embedding_create_params.EmbeddingCreateParams),
    (ResponsesBody, response_create_params.ResponseCreateParamsBase),
    (ResponsesBody, input_token_count_params.InputTokenCountParams),
    (MessagesBody, message_create_params.MessageCreateParamsBase),
    (MessagesBody, message_count_tokens_params.MessageCountTokensParams),
    (MessagesBody, beta_create_params.MessageCreateParamsBase),
)
VLLM = """
    add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template
    chat_template_kwargs continue_final_message documents ec_transfer_params guided_choice
    guided_decoding_backend guided_grammar guided_json guided_regex guided_whitespace_pattern
    ignore_eos include_reasoning include_stop_str_in_output kv_transfer_params length_penalty
    logits_processors logprob_token_ids media_io_kwargs min_p min_tokens mm_processor_kwargs
    prompt_logprobs priority reasoning_effort repetition_detection repetition_penalty request_id
    return_mm_kwargs return_prompt_text return_token_ids return_token_offsets
    return_tokens_as_token_ids routed_experts_prompt_start session_id skip_special_tokens
    spaces_between_special_tokens stop_token_ids stream_interval structural_tag structured_outputs
    thinking_token_budget top_k truncate_prompt_tokens truncation_side use_beam_search vllm_xargs
    watermarking
"""
SGLANG = """
    bootstrap_host bootstrap_port bootstrap_room cache_salt custom_labels custom_logit_processor
    custom_params data_parallel_rank disagg_prefill_dp_rank ebnf extra_key ignore_eos images_config
    input_ids json_schema lora_path max_dynamic_patch min_dynamic_patch min_p min_tokens
    ngram_corpus_id no_stop_trim priority regex repetition_penalty
    return_cached_tokens_details return_hidden_states return_meta_info return_prompt_token_ids
    return_routed_experts return_token_ids rid routed_dp_rank routed_experts_start_len
    separate_reasoning session_id session_params skip_special_tokens stop_regex stop_token_ids
    stream_reasoning task top_k use_audio_in_video
"""
LLAMA_SERVER = """
    adaptive_decay adaptive_target backend_sampling cache_prompt chat_format chat_parser
    dry_allowed_length dry_base dry_multiplier dry_sequence_breakers dynatemp_exponent
    dynatemp_range generation_prompt grammar grammar_lazy grammar_triggers id_slot ignore_eos
    json_schema logit_bias min_keep min_p mirostat mirostat_eta mirostat_tau n_cache_reuse
    n_discard n_indent n_keep parse_tool_calls preserved_tokens reasoning_budget_message
    reasoning_budget_tokens reasoning_control reasoning_format repeat_penalty return_progress
    sse_ping_interval stream stream_options t_max_predict_ms t_max_prompt_ms timings_per_token
    top_k typical_p verbose xtc_probability xtc_threshold
"""
OF_LLAMA_ALONE = """
    dry_penalty_last_n lora n_cmpl n_predict n_probs post_sampling_probs repeat_last_n
    response_fields return_tokens samplers speculative.n_max speculative.n_min speculative.p_min
    speculative.type top_n_sigma
"""
OF_VECTORS = """
    add_special_tokens dimensions embd_normalize encoding_format input_type lora_path
    mm_processor_kwargs normalize pooling priority prompt_name request_id rid truncate
    truncate_prompt_tokens truncation_side use_activation user
"""
TEXTS = (ChatBody, CompletionBody, NativeCompletionBody)
OTHERS = [(body, f"{VLLM} {SGLANG} {LLAMA_SERVER}".split()) for body in TEXTS]
OTHERS += [
    (NativeCompletionBody, OF_LLAMA_ALONE.split()),
    (EmbeddingBody, OF_VECTORS.split()),
    (
        RerankBody,
        [
            "query",
            "documents",
            "texts",
            "top_n",
            "return_documents",
            "priority",
            "user",
            "rid",
        ],
    ),
    (
        TokenizeBody,
        [
            "content",
            "add_special",
            "parse_special",
            "with_pieces",
            "prompt",
            "messages",
            "tools",
        ],
    ),
    (DetokenizeBody, ["tokens", "model"]),
]
OTHERS += [(body, [*kind.__annotations__]) for body, kind in SDK]


def test_the_table_of_the_docs_is_what_the_code_does():
    """
    `python -m scripts.field_table` writes it.
    """
    page = PAGE.read_text("utf-8")

    assert written(page) == page


@pytest.mark.anyio
async def test_each_body_has_a_row_of_the_table():
    """
    But that of an operator, who sends no fields of other servers.
    """
    async with chatting() as engine:
        routes = make_app({"a": engine}).routes
    fields = [
        field.field_info.annotation
        for route in routes
        if isinstance(route, BodyRoute)
        for field in route.dependant.body_params
    ]
    bodies = {kind for kind in fields if isinstance(kind, type)}

    rows = {body for _, body, _ in ROWS}
    assert {body for body in bodies if issubclass(body, Body)} - rows == {AdapterBody}


@pytest.mark.parametrize(("body", "names"), OTHERS)
def test_each_field_of_the_usual_servers_has_its_rule(body, names):
    """
    Of OpenAI and Anthropic by the types of their own clients, so a new one is noticed.
    """
    assert {*names} - {*body.kinds_of} - {*body.rules} == set()


NEUTRAL = [
    *[{"max_tokens": -1, "stop": "e"}, {"top_k": -1}, {"top_p": 0}, {"stop": ""}],
    *[{"stop": [""]}, {"n": 1.0}, {"seed": 1.0}, {"seed": "1"}, {"max_tokens": "3"}],
    *[{"max_tokens": 3.0}, {"stream": "false"}, {"modalities": ["text"]}],
    *[{"functions": []}, {"function_call": "none"}, {"top_logprobs": 0}],
    *[{"bad_words": []}, {"use_beam_search": False}, {"length_penalty": 1.0}],
    *[{"best_of": 1}, {"repetition_penalty": 1.0}, {"echo": False}, {"options": {}}],
    *[{"spaces_between_special_tokens": True}, {"web_search_options": None}],
    *[{"structured_outputs": {}}, {"guided_regex": ""}, {"never_heard_of": None}],
    *[{"logit_bias": []}, {"stream_options": []}, {"chat_template_kwargs": []}],
    *[{"n_probs": 0}, {"n_predict": 3}, {"num_return_sequences": 1}, {"system": ""}],
    *[{"repeat_last_n": -1}, {"dry_penalty_last_n": -1}, {"sampling_params": {}}],
    *[{"include": []}, {"truncation": "disabled"}, {"text": {}}, {"n_cmpl": 1.0}],
    *[{"model": ""}, {"prompt_logprobs": None}],
    *[{"stream": 0}, {"logprobs": 1}, {"do_sample": 1}, {"verbose": 0}],
]


@pytest.mark.anyio
@pytest.mark.parametrize("fields", NEUTRAL)
async def test_a_value_that_changes_nothing_is_taken(fields):
    """
    And nothing is said of it, because nothing was ignored.
    """
    async with asking() as (_, client):
        answer = await client.post(PATH, json=CHAT | fields)

    assert (answer.status_code, "x-ignored-fields" in answer.headers) == (200, False)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"modalities": ["audio"]}, "modalities"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"length_penalty": 0}, "length_penalty"),
        ({"length_penalty": True}, "length_penalty"),
        ({"options": {"num_ctx": 5}}, "options"),
        ({"sampling_params": {"top_k": 5}}, "sampling_params"),
        ({"truncation": "auto"}, "truncation"),
        ({"logit_bias": [[5, 1.0]]}, "logit_bias"),
        ({"system": "b"}, "system"),
        ({"n_cmpl": 0}, "n"),
        ({"never_heard_of": 0}, "never_heard_of"),
        ({"temprature": 1}, "temprature"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": -3}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"n": True}, "n"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"novel": 1}}, "structured_outputs.novel"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {}, "regex": "a"}, "regex"),
        ({"grammar": {"type": "lark", "value": "a"}}, "grammar.type"),
        ({"reasoning": {"exclude": True}}, "reasoning.exclude"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
async def test_a_value_that_is_not_done_is_refused_by_its_name(fields, param):
    """
    A 400, whatever server knows the field.
    """
    async with asking() as (_, client):
        answer = await client.post(PATH, json=CHAT | fields)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["logprobs", "top_logprobs", "n_probs"])
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/responses", {"input": "a"}), ("/v1/messages", CHAT)],
)
async def test_log_probabilities_that_no_answer_tells_are_refused(path, body, name):
    """
    Where a dialect has no place for them; their neutral values are taken.
    """
    neutral = False if name == "logprobs" else 0
    async with asking() as (_, client):
        answer = await client.post(path, json=body | {name: 2, "max_tokens": 1})
        plain = await client.post(path, json=body | {name: neutral, "max_tokens": 1})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    assert plain.status_code == 200


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, CHAT),
        (f"{PATH}/input_tokens", CHAT),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("/completion", {"prompt": "a", "n_predict": 1}),
        ("/v1/messages", CHAT),
        ("/v1/responses", {"input": "a", "max_output_tokens": 1}),
        ("/apply-template", CHAT),
        ("/tokenize", {"content": "a"}),
        ("/detokenize", {"tokens": [1]}),
    ],
)
async def test_what_is_ignored_is_named_in_a_header(path, body):
    """
    In each dialect, also of a stream; names that a client makes up never come there.
    """
    idle = {"num_ctx": 5, "user": "me", "api_key": "secret"}
    async with asking() as (_, client):
        answer = await client.post(path, json=body | idle)
        streamed = await client.post(PATH, json=CHAT | idle | {"stream": True})
        unknown = await client.post(path, json=body | {"\n": 1, "x" * 999: 1})

    ignored = "num_ctx, user, api_key"
    assert (answer.status_code, answer.headers["x-ignored-fields"]) == (200, ignored)
    assert streamed.headers["x-ignored-fields"] == ignored
    assert (unknown.status_code, "x-ignored-fields" in unknown.headers) == (400, False)


SCHEMA = {"type": "object"}


@pytest.mark.parametrize(
    ("fields", "params"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_schema": SCHEMA}),
        (
            {"response_format": {"type": "json_object", "schema": {"a": 1}}},
            {"json_schema": {"a": 1}},
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": SCHEMA},
                }
            },
            {"json_schema": SCHEMA},
        ),
        (
            {"response_format": {"type": "json", "value": SCHEMA}},
            {"json_schema": SCHEMA},
        ),
        ({"response_format": {"type": "regex", "value": "a+"}}, {"regex": "a+"}),
        ({"response_format": {"type": "text"}}, {}),
        ({"json_schema": SCHEMA}, {"json_schema": SCHEMA}),
        ({"json_schema": '{"type": "object"}'}, {"json_schema": SCHEMA}),
        ({"guided_json": SCHEMA}, {"json_schema": SCHEMA}),
        ({"guided_json": '{"type": "object"}'}, {"json_schema": SCHEMA}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", 'b"']}, {"lark": 'start: "a" | "b\\""'}),
        ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"guided_grammar": 'start: "a"'}, {"lark": 'start: "a"'}),
        ({"guided_json_object": True}, {"json_schema": SCHEMA}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA}),
        ({"structured_outputs": {"regex": "a", "choice": None}}, {"regex": "a"}),
        ({"structured_outputs": {"json_object": True}}, {"json_schema": SCHEMA}),
        ({"ebnf": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"regex": "a"}, {"regex": "a"}),
        ({"grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"grammar": {"type": "json", "value": SCHEMA}}, {"json_schema": SCHEMA}),
        ({"grammar": {"type": "regex", "value": "a"}}, {"regex": "a"}),
        ({"format": "json"}, {"json_schema": SCHEMA}),
        ({"format": SCHEMA}, {"json_schema": SCHEMA}),
    ],
)
@pytest.mark.parametrize("body", [ChatBody, NativeCompletionBody])
def test_forms_of_other_servers_become_ours(body, fields, params):
    """
    Each field is one constraint, in chats and in llama.cpp's dialect.
    """
    asked = {"messages": MESSAGES} if body is ChatBody else {"prompt": "a"}
    form = body.model_validate(asked | fields).form

    assert dict(form.params) == params
    assert {*form.names.values()} == ({*fields} if params else set())


def test_a_grammar_of_llama_cpp_wins_over_its_schema():
    """
    As there.
    """
    fields = {"prompt": "a", "grammar": 'root ::= "a"', "json_schema": SCHEMA}

    assert dict(NativeCompletionBody(**fields).form.params) == {
        "grammar": 'root ::= "a"'
    }
    with pytest.raises(Failure, match="json_schema says it, too"):
        _ = ChatBody(messages=MESSAGES, json_schema=SCHEMA, guided_json=SCHEMA).form


@pytest.mark.anyio
async def test_values_of_other_servers_become_those_of_ours():
    """
    As SamplingParams of a request have them.
    """
    asked = {"prompt": "a", "repetition_penalty": 1.5, "top_p": 0, "top_k": "-1"}
    asked |= {"max_new_tokens": 7, "random_seed": 3, "stop_sequences": ["x", ""]}
    asked |= {"penalty_last_n": -1, "top_n_sigma": -1, "typ_p": 0.5}
    async with chatting() as engine:
        service = make_app({"a": engine}).state.service
        params = CompletionBody(**asked)
        made = (await read_completion(params, service))[0].params

    assert (made.repeat_penalty, made.penalty_last_n) == (1.5, None)
    assert (made.temperature, made.top_p, made.top_k) == (0, 1, 0)
    assert (made.max_tokens, made.seed, made.stop) == (7, 3, ("x",))
    assert (made.top_n_sigma, made.typical_p) == (0, 0.5)


@pytest.mark.anyio
async def test_defaults_of_the_model_file_win_over_those_of_the_dialect():
    """
    If the service asks for them.
    """
    async with chatting() as engine:
        config = ServeConfig(defaults={"from_model": True})
        service = make_app({"a": engine}, config).state.service
        body = CompletionBody(prompt="a")
        made = (await read_completion(body, service))[0].params

    assert made.model_fields_set == {"from_model", "max_tokens"}


@pytest.mark.anyio
@pytest.mark.native
async def test_fields_of_vectors_are_done():
    """
    Norms, pooling, special tokens and cuts, as the engine makes them of the same tokens.
    """
    text = "some words here"
    async with AsyncEngine.open(tiny_model("bert")) as engine:
        ids = await engine.tokenize(text, parse_special=False)
        bare = await engine.tokenize(text, add_special=False, parse_special=False)
        raw = await engine.embed([text], normalize=False)
        cases = {
            "normalize": (False, raw),
            "embd_normalize": (-1, raw),
            "use_activation": (False, raw),
            "pooling": ("cls", await engine.embed([text], pooling="cls")),
            "add_special_tokens": (False, await engine.embed([bare])),
            "truncate_prompt_tokens": (
                3,
                await engine.embed(
                    [[*ids[: len(ids) - len(bare)], *bare[: 3 - len(ids) + len(bare)]]]
                ),
            ),
            "dimensions": (4.0, await engine.embed([text], 4)),
        }
        async with client_of(make_app({"a": engine})) as client:

            async def vector(**fields):
                answer = await client.post(
                    "/v1/embeddings", json={"input": text} | fields
                )
                return answer.json()["data"][0]["embedding"]

            made = {
                name: await vector(**{name: value})
                for name, (value, _) in cases.items()
            }
            largest = await vector(embd_normalize=0)
            taxi = await vector(embd_normalize=1)
            high = await vector(embd_normalize=64)
            long = {"input": ["words " * 3000, text], "truncate": True}
            cut = await client.post("/v1/embeddings", json=long)

    for name, (_, wanted) in cases.items():
        assert_near(made[name], wanted[0], 1e-5)
    assert np.isclose(np.abs(largest).max(), 32760)
    assert np.isclose(np.abs(taxi).sum(), 1, atol=1e-4)
    exact = np.asarray(raw[0], np.float64)
    exact /= np.linalg.norm(exact, 64)
    assert_near(high, exact, 1e-5)
    assert (cut.status_code, len(cut.json()["data"])) == (200, 2)


@pytest.mark.anyio
@pytest.mark.native
async def test_a_model_that_states_no_pooling_gives_the_mean():
    """
    Unless the body, or the service, says otherwise; so what the list of models says is true.
    """
    wanted, made = {}, {}
    async with AsyncEngine.open(tiny_model("llama")) as engine:
        for pooling in ("mean", "last"):
            wanted[pooling] = (await engine.embed(["a text"], pooling=pooling))[0]
        for config in (None, ServeConfig(pooling="last")):
            async with client_of(make_app({"a": engine}, config)) as client:
                name = "service" if config else "default"
                made[name] = await _vector(client)
                made[name, "body"] = await _vector(client, pooling="last")
                models = (await client.get("/v1/models")).json()["data"]

    assert_near(made["default"], wanted["mean"], 1e-5)
    for name in ("service", ("default", "body"), ("service", "body")):
        assert_near(made[name], wanted["last"], 1e-5)
    assert models[0]["capabilities"] == ["generate", "embed"]


@pytest.mark.anyio
@pytest.mark.native
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_leaves_no_token_is_a_mistake_of_its_client(stream):
    """
    A 400 that names the field, because no other try can end otherwise.
    """
    async with AsyncEngine.open(tiny_model("llama")) as engine:
        never = list(range(engine.info.vocab.n_tokens))
        asked = {"prompt": "a", "max_tokens": 3, "suppress_tokens": never}
        async with client_of(make_app({"a": engine})) as client:
            body = asked | {"stream": stream}
            answer = await client.post("/v1/completions", json=body)

    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "suppress_tokens")
    assert error["code"] == "sampling_failed"


async def _vector(client: httpx.AsyncClient, **fields):
    answer = await client.post("/v1/embeddings", json={"input": "a text"} | fields)
    return answer.json()["data"][0]["embedding"]
