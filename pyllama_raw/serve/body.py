"""
Fields of bodies that ask for text, in the words of OpenAI's API and in our own.

Rules:
1. A field of SamplingParams is taken in any dialect, under its own name.
2. A field that nobody knows is refused, because it may be meant to change the output. Those
   in HARMLESS change none and are let be, as are those of IDLE with the value that routers add.
"""

from __future__ import annotations

from datetime import datetime
from secrets import randbelow
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from pyllama_raw import SamplingParams
from pyllama_raw.serve.config import ServeConfig
from pyllama_raw.serve.failures import refused
from pyllama_raw.serve.service import Found

HARMLESS = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "verbosity", "reasoning_effort", "parallel_tool_calls",
}  # fmt: skip
HARMLESS |= {  # of llama.cpp's server: they keep, tell or plan something, or end sooner
    "backend_sampling", "cache_prompt", "id_slot", "n_cache_reuse", "n_discard", "n_indent",
    "n_keep", "return_progress", "sse_ping_interval", "t_max_predict_ms",
    "t_max_prompt_ms", "timings_per_token", "verbose",
}  # fmt: skip
IDLE = {  # fields that routers of vLLM and SGLang add, with what happens here anyway
    "include_reasoning": True,
    "no_stop_trim": False,
    "return_hidden_states": False,
    "separate_reasoning": True,
    "skip_special_tokens": True,
    "stream_reasoning": True,
}
ANY_SEED = 2**32 - 1

T = TypeVar("T")
# Lists and mappings stop at their first mistake, or a body of a MiB has a million of them.
Items = Annotated[list[T], Field(fail_fast=True)]
Named = Annotated[dict[str, T], Field(fail_fast=True)]
OPTIONS = {
    "priority", "deadline_s", "max_wait_s", "cache_salt", "client", "adapters",
    "policy_data",
}  # fmt: skip
SAMPLED = {
    "n", "max_tokens", "temperature", "top_p", "stop", "seed", "presence_penalty",
    "frequency_penalty",
}  # fmt: skip


def _seed(given: int) -> int:
    """*given* in 32 bits; if all are set, as those of -1, they stand for any number."""
    seed = given % 2**32
    return seed if seed != ANY_SEED else randbelow(ANY_SEED)


class Exact(BaseModel):
    """An object that has no other fields than these, and of others names the first."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _refuse_others(cls, values: Any) -> Any:
        if isinstance(values, dict):
            for name in values:
                if name not in cls.model_fields:
                    reason, shown = (
                        "{name} is no field of it",
                        {"name": repr(name[:99])},
                    )
                    raise PydanticCustomError("extra_forbidden", reason, shown)
        return values


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool = False


class ResponseFormat(BaseModel):
    """The form that the text must have."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None

    def params(self) -> dict[str, Any]:
        """Fields of SamplingParams. Raises Failure if there is no schema."""
        if self.type == "text":
            return {}
        if self.type == "json_object":
            return {"json_schema": self.schema_ or {"type": "object"}}
        schema = (self.json_schema or {}).get("schema", self.schema_)
        if not isinstance(schema, dict):
            raise refused("response_format", "json_schema needs json_schema.schema")
        return {"json_schema": schema}


class Body(BaseModel):
    """A body for one of the models."""

    model_config = ConfigDict(
        extra="ignore", strict=True, use_attribute_docstrings=True
    )

    model: str | None = None
    """A name of `/v1/models`; left out: the first model that can do what is asked."""


class ServedBody(Body):
    """A body of work that waits for its turn."""

    priority: int | None = None
    deadline_s: float | None = None
    max_wait_s: float | None = None

    def served(self, config: ServeConfig) -> dict[str, Any]:
        """Options of serving the request."""
        given = self.model_dump(include=OPTIONS, exclude_none=True)
        return config.time_limits | given


class TextBody(ServedBody):
    """A body that asks for text."""

    model_config = ConfigDict(extra="allow")

    harmless: ClassVar[set[str]] = HARMLESS
    echoed: ClassVar[set[str]] = set()
    """Harmless fields that the answer repeats."""

    @model_validator(mode="before")
    @classmethod
    def _drop(cls, values: Any) -> Any:
        """Drop what is ignored, because it would stay while the answer waits."""
        if not isinstance(values, dict):
            return values
        ignored = cls.harmless - cls.model_fields.keys() - cls.echoed
        return {name: value for name, value in values.items() if name not in ignored}

    stream: bool | None = None
    """Whether the answer comes in events."""
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=256)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """Most tokens of an output; left out: what is left of the context."""
    temperature: float | None = None
    top_p: float | None = None
    stop: str | Items[str] | None = None
    seed: Annotated[int, AfterValidator(_seed)] | None = None
    """The same seed makes the same output; -1: any."""
    logit_bias: Named[Annotated[float, Field(ge=-100, le=100)]] | None = None
    """Numbers that are added to the logits of tokens, by token id."""
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    response_format: ResponseFormat | None = None
    cache_salt: str | None = None
    client: str | None = None
    adapters: Named[float] | None = None
    policy_data: dict[str, Any] | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the counts of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def names(self) -> dict[str, str]:
        """Fields of the body, by what the engine calls them."""
        is_given = self.response_format is not None
        return {"json_schema": "response_format"} if is_given else {}

    def options(self, found: Found, config: ServeConfig) -> Any:
        """Options of serving the request, with the adapters of the model that it names."""
        options = self.served(config)
        if found.adapters:
            options["adapters"] = {**found.adapters, **(self.adapters or {})}
        return options

    def params(self, found: Found, config: ServeConfig, **more: Any) -> SamplingParams:
        """
        Parameters by the service's defaults and OpenAI's: temperature 1, the rest of the context.

        Args:
            more: what a dialect says in other words.

        Raises:
            Failure: a field that nobody knows.
            InvalidSampling: a value that is not allowed.
        """
        given = self.model_dump(include=SAMPLED, exclude_none=True) | self._unnamed()
        if self.logit_bias is not None:
            given["logit_bias"] = _biases(self.logit_bias)
        if self.response_format is not None:
            given |= self.response_format.params()
        if isinstance(given.get("stop"), str):
            given["stop"] = (given["stop"],)
        most = {"max_tokens": found.engine.n_ctx_slot, "temperature": 1.0}
        defaults = most | {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
        return SamplingParams(**(defaults | config.sampling | given | more))

    def _unnamed(self) -> dict[str, Any]:
        """Fields of SamplingParams that OpenAI's API does not name."""
        given = self.model_extra or {}
        extra = {name: value for name, value in given.items() if value is not None}
        known = {n: v for n, v in extra.items() if n in SamplingParams.model_fields}
        for name, value in extra.items():
            if name not in known.keys() | self.harmless and value is not IDLE.get(name):
                reason = "it is not known here, and may change the output: leave it out"
                raise refused(name, reason, "unknown_parameter")
        return known


def template_variables(
    given: dict[str, Any] | None, asks: bool | None = None
) -> dict[str, Any]:
    """
    Variables of a chat template: *given*, and the day, by the names of llama.cpp's server.

    Args:
        asks: whether it asks for an answer; None: unless one has begun.

    The time of day is not told, because each prompt would begin otherwise than the one before.
    """
    today = datetime.now().astimezone()
    told: dict[str, Any] = {"date_string": f"{today:%d %b %Y}"}
    told["datetime"] = f"{today:%b %d %Y}"
    if asks is not None:
        told["add_generation_prompt"] = asks
    return told | (given or {})


def effort_variables(effort: object) -> dict[str, Any]:
    """Variables of a chat template for an *effort*, of which "none" also asks for none."""
    off = {"enable_thinking": False} if effort == "none" else {}
    return {} if effort is None else {"reasoning_effort": effort} | off


def _biases(given: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in given.items()}
    except ValueError as error:
        raise refused("logit_bias", f"names are token ids: {error}") from error
