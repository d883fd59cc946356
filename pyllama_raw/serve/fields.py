"""
Fields of bodies that are not the body's own, and what becomes of them.

Clients of one server send its fields to another, most of them with the value that changes
nothing. So a body is sorted before it is read (body.py):

1. A field of the body's own is done, as is one of SamplingParams where a body asks for text.
   Numbers may be whole floats, numbers and flags may be words, and flags 0 and 1.
2. A field with another name here is taken under ours.
3. An idle field changes no output. It is left out, and `x-ignored-fields` of the answer names it.
4. A field that has a neutral value asks for what happens anyway, so it is left out, too. With
   another value it is refused. So is null in every field.
5. All other fields are refused, because they may be meant to change the output.

The tables of this file are the only place that says so: docs/service.md shows them, and a test
compares both. Names are those of OpenAI, Anthropic, llama-server, vLLM, SGLang, TGI, Ollama,
OpenRouter and LiteLLM.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

UNKNOWN = "it is not known here, and may change the output: leave it out"
NOT_DONE = "this is not done here: leave it out"


@dataclass(frozen=True, slots=True)
class Ignored:
    """A field that changes no output, whatever its value."""


@dataclass(frozen=True, slots=True)
class Neutral:
    """A field that asks for what happens anyway, if it has one of *values*."""

    values: tuple[Any, ...] = ()
    reason: str = NOT_DONE

    def has(self, value: object) -> bool:
        """Whether *value* changes nothing; 0 and False are two values, 1 and 1.0 are one."""
        return value is None or any(
            value == neutral and isinstance(value, bool) is isinstance(neutral, bool)
            for neutral in self.values
        )


@dataclass(frozen=True, slots=True)
class Alias:
    """Another name of the field *name*."""

    name: str


class Sorting(NamedTuple):
    """The way in which a body is sorted."""

    ignored: list[str]
    """Gets the names of fields that change nothing."""
    is_lenient: bool = False
    """Whether unknown fields are ignored, as llama-server ignores them."""


Rule = Ignored | Neutral | Alias
Rules = dict[str, Rule]


def _idle(*names: str) -> dict[str, Rule]:
    return dict.fromkeys(names, Ignored())


def _refused(reason: str, *names: str) -> dict[str, Rule]:
    return dict.fromkeys(names, Neutral(("", False, [], {}), reason))


def _neutral(**values: Any) -> dict[str, Rule]:
    return {name: Neutral((value,)) for name, value in values.items()}


# -- the tables --------------------------------------------------------------------------

AT_THE_TOP = "give its fields at the top of the body"
OF_THE_SERVICE = "the service chooses this, not a request: leave it out"
NOT_KEPT = "nothing is kept here: send all"
ADAPTERS = "name adapters in `adapters`, or the model as base:adapter"

ANY: Rules = {
    # who asks, for whom, and how it is counted
    **_idle("user", "metadata", "request_id", "rid", "id", "session_id", "chat_id"),
    **_idle("message_id", "conversation_id", "parent_id", "trace_id", "custom_labels"),
    **_idle("service_tier", "store", "safety_identifier", "moderation", "usage"),
    **_idle("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    **_idle("extra_key", "cache_salt", "priority", "client", "client_metadata"),
    # where and how a client of another service sends it
    **_idle(
        "api_key", "api_base", "api_version", "base_url", "organization", "timeout"
    ),
    **_idle("extra_headers", "extra_query", "headers", "custom_llm_provider"),
    **_idle("num_retries", "max_retries", "drop_params", "caching", "force_timeout"),
    **_idle("litellm_call_id", "litellm_metadata", "litellm_trace_id", "fallbacks"),
    **_idle("provider", "route", "models", "anthropic_version", "anthropic_beta"),
    # where another server computes it
    **_idle("num_ctx", "num_gpu", "num_thread", "num_batch", "main_gpu"),
    **_idle("use_mmap", "use_mlock", "low_vram", "numa", "num_keep", "vocab_only"),
    **_idle("bootstrap_host", "bootstrap_port", "bootstrap_room", "routed_dp_rank"),
    **_idle("data_parallel_rank", "disagg_prefill_dp_rank", "ngram_corpus_id"),
    **_idle("kv_transfer_params", "ec_transfer_params"),
    # what holds the fields of others
    **_refused(AT_THE_TOP, "options", "extra_body", "model_kwargs", "parameters"),
    **_refused(AT_THE_TOP, "sampling_params"),
    **_refused(NOT_DONE, "mm_processor_kwargs", "media_io_kwargs", "images_config"),
    **_refused(ADAPTERS, "lora_path", "lora_request", "adapter_id"),
}

TEXT: Rules = ANY | {
    # names of others
    "max_new_tokens": Alias("max_tokens"),
    "num_predict": Alias("max_tokens"),
    "n_predict": Alias("max_tokens"),
    "num_return_sequences": Alias("n"),
    "n_cmpl": Alias("n"),
    "repeat_last_n": Alias("penalty_last_n"),
    "dry_penalty_last_n": Alias("dry_last_n"),
    "min_new_tokens": Alias("min_tokens"),
    "stop_sequences": Alias("stop"),
    "random_seed": Alias("seed"),
    "sampling_seed": Alias("seed"),
    "typ_p": Alias("typical_p"),
    # hints, and facts of an answer that is the same without them
    **_idle("verbosity", "reasoning_effort", "parallel_tool_calls", "prediction"),
    **_idle("verbose", "reasoning_format", "guided_decoding_backend", "watermarking"),
    **_idle("backend_sampling", "cache_prompt", "n_cache_reuse", "n_discard"),
    **_idle("n_indent", "n_keep", "return_progress", "sse_ping_interval"),
    **_idle("t_max_predict_ms", "t_max_prompt_ms", "timings_per_token"),
    **_idle("speculative.type", "speculative.n_max", "speculative.n_min"),
    **_idle(
        "speculative.p_min", "speculative.ngram_size_m", "speculative.ngram_size_n"
    ),
    **_idle("speculative.ngram_min_hits", "stream_interval", "return_mm_kwargs"),
    **_idle("return_cached_tokens_details", "reasoning_control", "truncation_side"),
    **_idle("routed_experts_start_len", "routed_experts_prompt_start"),
    # choices that are not made here
    **_neutral(use_beam_search=False, length_penalty=1.0, early_stopping=False),
    **_neutral(num_beams=1, num_beam_groups=1, best_of=1, penalty_alpha=0),
    **_neutral(no_repeat_ngram_size=0, guidance_scale=1, watermark=False),
    **_neutral(tfs_z=1, tfs=1, top_a=0, smoothing_factor=0, mirostat_mode=0),
    **_neutral(epsilon_cutoff=0, eta_cutoff=0, top_n_tokens=0, enable_search=False),
    **_neutral(grammar_lazy=False, no_stop_trim=False, safe_prompt=False),
    **_neutral(include_stop_str_in_output=False, skip_special_tokens=True),
    **_neutral(spaces_between_special_tokens=True, include_reasoning=True),
    **_neutral(
        separate_reasoning=True, stream_reasoning=True, use_audio_in_video=False
    ),
    **_neutral(incremental_output=True, result_format="message", raw=False),
    "reasoning_budget": Neutral((-1,)),
    "reasoning_budget_tokens": Neutral((-1,)),
    "thinking_budget": Neutral((-1,)),
    "thinking_budget_tokens": Neutral((-1,)),
    "thinking_token_budget": Neutral((-1,)),
    **_refused(NOT_DONE, "reasoning_budget_message", "reasoning_budget_start_tag"),
    **_refused(NOT_DONE, "reasoning_budget_end_tag", "reasoning_budget_end_tags"),
    **_refused(NOT_DONE, "bad_words", "allowed_token_ids", "logits_processors"),
    **_refused(NOT_DONE, "custom_logit_processor", "custom_params", "vllm_xargs"),
    **_refused(NOT_DONE, "stop_regex", "repetition_detection", "logprob_token_ids"),
    **_refused(NOT_DONE, "structural_tag", "guided_whitespace_pattern"),
    **_refused(NOT_DONE, "session_params", "negative_prompt", "prompt_embeds"),
    **_refused(NOT_DONE, "input_ids", "task", "documents", "prompt_mode", "truncate"),
    **_refused(NOT_DONE, "truncate_prompt_tokens", "max_dynamic_patch"),
    **_refused(NOT_DONE, "min_dynamic_patch", "plugins", "transforms", "context"),
    **_idle("preserved_tokens"),
    **_refused(NOT_DONE, "chat_format", "chat_parser", "images"),
    **_refused(NOT_DONE, "generation_prompt", "mcp_servers", "template"),
    # more in an answer than there is
    **_refused(NOT_DONE, "return_token_ids", "return_tokens_as_token_ids"),
    **_refused(NOT_DONE, "return_prompt_token_ids", "return_token_offsets"),
    **_refused(NOT_DONE, "return_prompt_text", "return_hidden_states", "details"),
    **_refused(NOT_DONE, "return_routed_experts", "return_meta_info"),
    **_refused(NOT_DONE, "return_full_text", "decoder_input_details"),
    **_refused(
        "give echo and logprobs to /v1/completions, or ask /v1/score", "prompt_logprobs"
    ),
    # what other dialects ask for in other words
    **_refused(NOT_DONE, "include", "reasoning"),
    "truncation": Neutral(("disabled",)),
    "text": Neutral(({}, {"format": {"type": "text"}}), "give a response_format"),
    "system": Neutral(("",), "give it as a message"),
    # chats of other kinds
    "modalities": Neutral((["text"],), "the answers are texts"),
    **_refused("the answers are texts", "audio"),
    "web_search_options": Neutral((), "nothing is searched here"),
    "functions": Neutral(([],), "give them as tools"),
    "function_call": Neutral(("none", "auto"), "give tools and tool_choice"),
    "chat_template": Neutral(("",), OF_THE_SERVICE),
}

COMPLETIONS: Rules = TEXT | {
    **_neutral(echo=False),
    **_idle("response_fields"),
    "add_special_tokens": Neutral(
        (True,), "give token ids, which are taken as they are"
    ),
    "tools": Neutral(([],), "ask for a chat completion"),
    "tool_choice": Neutral(("none", "auto"), "ask for a chat completion"),
    **_refused("ask for a chat completion", "messages"),
    "continue_final_message": Neutral((False,), "ask for a chat completion"),
    **_idle("chat_template_kwargs", "add_generation_prompt", "enable_thinking"),
    **_idle("think", "thinking", "parse_tool_calls"),
}
CHATS: Rules = TEXT | {
    **_neutral(echo=False, add_special_tokens=False),
    **_idle("response_fields"),
    "suffix": Neutral(("",), "ask for a completion"),
}
UNTOLD = "no log-probabilities are told here: ask for a chat completion"
NO_LOGPROBS: Rules = {
    "logprobs": Neutral((False,), UNTOLD),
    "top_logprobs": Neutral((0,), UNTOLD),
}
RESPONSES: Rules = CHATS | {
    **_idle("access_programs", "context_management", "max_tool_calls", "truncation"),
    **_idle("background_options"),
    **NO_LOGPROBS,
    "image": Neutral((), "the answers are texts"),
    "personality": Neutral((), NOT_DONE),
}
MESSAGES: Rules = CHATS | {
    **NO_LOGPROBS,
    **_idle("betas", "billing_policy", "cache_control", "compaction", "container"),
    **_idle("context_management", "diagnostics", "fallback_credit_token", "fallbacks"),
    **_idle("inference_geo", "speed", "user_profile_id", "workspace_id"),
    "thread": Neutral((), NOT_KEPT),
}
VECTORS: Rules = ANY | {
    "output_dimension": Alias("dimensions"),
    "normalized": Alias("normalize"),
    "use_activation": Alias("normalize"),
    "embedding_type": Neutral(("float",)),
    "embedding_types": Neutral((["float"],)),
    "output_dtype": Neutral(("float",)),
    "embed_dtype": Neutral(("float32",)),
    "endianness": Neutral(("native", "little")),
    "late_chunking": Neutral((False,)),
    **_refused(
        "the model is given the text as it is: write into it what the model was trained to see",
        *("input_type", "prompt_name", "task", "task_type", "instruction", "instruct"),
        *("prompt", "title"),
    ),
    **_refused(NOT_DONE, "embed_overrides", "embed_override_token_id", "messages"),
    **_refused(NOT_DONE, "softmax", "activation", "bytes_only"),
}
RANKS: Rules = ANY | {
    "return_text": Alias("return_documents"),
    "return_metadata": Neutral((False,)),
    "truncate_prompt_tokens": Neutral((), "give truncate, or max_tokens_per_doc"),
    **_refused(
        "the model is given query and document as they are: leave it out",
        *(
            "instruction",
            "instruct",
            "input_type",
            "prompt_name",
            "task",
            "rank_fields",
        ),
    ),
    **_refused("shorten the documents", "max_chunks_per_doc"),
    **_refused(NOT_DONE, "softmax", "activation"),
}
SCORES: Rules = ANY | {
    "add_special_tokens": Neutral(
        (True,), "give token ids, which are taken as they are"
    ),
    "chat_template": Neutral(("",), OF_THE_SERVICE),
    "use_activation": Neutral((True,)),
    "truncate_prompt_tokens": Neutral((), "shorten the texts"),
    **_idle("truncation_side"),
    **_refused("ask /v1/rerank", "text_1", "text_2", "queries", "documents"),
    **_refused(NOT_DONE, "softmax", "activation"),
}
TOKENS: Rules = ANY | {
    "continue_final_message": Neutral((False,)),
    "chat_template": Neutral(("",), OF_THE_SERVICE),
    **_refused(NOT_DONE, "return_token_offsets", "truncate_prompt_tokens"),
    **_idle("truncation_side"),
}
# Fields that llama-server does, and that are not done here: refused in its place, too.
DONE_THERE = {
    "reasoning_budget", "reasoning_budget_tokens", "thinking_budget_tokens",
    "reasoning_budget_message", "grammar_lazy", "chat_format", "chat_parser",
    "generation_prompt", "continue_final_message", "tools", "functions",
}  # fmt: skip
NAMES = re.compile(r"[\w.-]{1,64}", re.ASCII)  # of unknown fields that are told again
MAX_NAMES = 32
STREAM_OPTIONS = ("include_obfuscation", "continuous_usage_stats")  # idle, too
