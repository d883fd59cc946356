"""
Requests in the words of services that are like OpenAI's.

A parameter that is not set is not sent, so the service's own default holds, also for max_tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyllama_raw import Prompt
from pyllama_raw.options.sampling import SamplingParams
from pyllama_raw.runners.capabilities import VERBS, RunnerCapabilities, are_messages

SHARED = frozenset(
    {"max_tokens", "temperature", "top_p", "seed", "stop", "n", "frequency_penalty"}
    | {"presence_penalty", "logit_bias", "logprobs", "json_schema"}
)
TRANSLATED = frozenset({"max_tokens", "logprobs", "json_schema"})
NOTHING: tuple[Any, ...] = (None, [], {})
OF_CHATS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
OF_LLAMA = frozenset(
    {"top_k", "min_p", "typical_p", "top_n_sigma", "repeat_penalty", "grammar"}
    | {"xtc_probability", "xtc_threshold", "dry_multiplier", "dry_base"}
    | {"dry_allowed_length", "mirostat", "mirostat_tau", "mirostat_eta", "ignore_eos"}
    | {"dynatemp_range", "dynatemp_exponent"}
)
RENAMED = {"template_kwargs": "chat_template_kwargs"}


@dataclass(frozen=True, slots=True)
class Dialect:
    """The words of one kind of service."""

    max_tokens: str = "max_completion_tokens"
    """The field for the limit of tokens in chats; completions have max_tokens."""
    reasoning: tuple[str, ...] = ("reasoning_content", "reasoning")
    """Fields in which reasoning may come."""
    sampling: frozenset[str] = SHARED
    """Names of SamplingParams that it takes."""
    options: frozenset[str] = OF_CHATS
    """Names of RequestOptions that it takes."""
    extra: tuple[tuple[str, Any], ...] = ()
    """Further fields of every request."""
    schema: str = "response_format"
    """The field for a JSON schema in completions; chats have response_format."""
    ranks: bool = False
    """Whether it has `/rerank`."""
    pooling: bool = False
    """Whether its `/embeddings` takes the way of pooling."""

    @property
    def capabilities(self) -> RunnerCapabilities:
        """The abilities that its words can ask for."""
        return RunnerCapabilities(
            verbs=VERBS if self.ranks else VERBS - {"rank"},
            logprobs=True,
            tools="tools" in self.options,
            json_schema=True,
            grammars="grammar" in self.sampling,
            n=True,
            token_ids=True,
            sampling=self.sampling,
            options=self.options,
        )

    def request(
        self,
        model: str,
        prompt: Prompt,
        params: SamplingParams,
        options: Mapping[str, Any],
    ) -> tuple[str, dict[str, Any]]:
        """The path of a request, and its body."""
        is_chat = are_messages(prompt)
        fields = params.model_dump(include=params.model_fields_set, mode="json")
        body: dict[str, Any] = {"model": model, "stream": True, **dict(self.extra)}
        body["stream_options"] = {"include_usage": True}
        body |= {
            name: value
            for name, value in fields.items()
            if name not in TRANSLATED and value not in NOTHING
        }
        if "max_tokens" in params.model_fields_set:
            body[self.max_tokens if is_chat else "max_tokens"] = params.max_tokens
        if params.json_schema is not None:
            schema, field = fields["json_schema"], "response_format"
            if not is_chat and self.schema != field:
                body[self.schema] = schema
            else:
                named_schema = {"name": "output", "schema": schema, "strict": True}
                body[field] = {"type": "json_schema", "json_schema": named_schema}
        if params.logprobs is not None:
            listed = {"logprobs": True, "top_logprobs": params.logprobs}
            body |= listed if is_chat else {"logprobs": params.logprobs}
        body |= {RENAMED.get(n, n): v for n, v in options.items() if v is not None}
        choice = body.get("tool_choice", "auto")
        if choice not in ("auto", "none", "required"):
            body["tool_choice"] = {"type": "function", "function": {"name": choice}}
        content = prompt if isinstance(prompt, str) else list(prompt)
        if is_chat:
            return "chat/completions", body | {"messages": content}
        return "completions", body | {"prompt": content}


OPENAI = Dialect()
COMPATIBLE = Dialect(max_tokens="max_tokens")
LLAMA_SERVER = Dialect(
    max_tokens="max_tokens",
    sampling=SHARED | OF_LLAMA,
    options=OF_CHATS | {"template_kwargs"},
    schema="json_schema",
    ranks=True,
)
PYLLAMA = Dialect(
    max_tokens="max_tokens",
    sampling=frozenset(SamplingParams.model_fields) - {"prompt_logprobs"},
    options=OF_CHATS
    | {"template_kwargs", "priority", "deadline_s", "cache_salt", "client"}
    | {"adapters", "policy_data"},
    ranks=True,
    pooling=True,
)
