"""
Fields of bodies that ask for text, in the words of OpenAI's API and in our own.

A field of SamplingParams is taken in any dialect, under its own name. What becomes of other
fields: fields.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from functools import cached_property
from secrets import randbelow
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from pyllama_raw import SamplingParams
from pyllama_raw.errors import InvalidSampling
from pyllama_raw.serve import fields
from pyllama_raw.serve.config import ServeConfig
from pyllama_raw.serve.failures import Failure, refused, renamed
from pyllama_raw.serve.forms import READERS, Form, ResponseFormat, form_of
from pyllama_raw.serve.service import Found

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
    "frequency_penalty", "repetition_penalty", "do_sample",
}  # fmt: skip
NO_LIMIT = (-1, -2)  # of max_tokens; -2 is Ollama's word for the rest of the context
OPENAI = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}  # its defaults
Limit = Annotated[int, Field(ge=min(NO_LIMIT))]


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


class Body(BaseModel):
    """A body for one of the models."""

    model_config = ConfigDict(
        extra="ignore", strict=True, use_attribute_docstrings=True
    )

    rules: ClassVar[fields.Rules] = fields.ANY
    takes: ClassVar[Mapping[str, FieldInfo]] = {}  # fields beside those of the class
    refuses: ClassVar[
        tuple[str, ...]
    ] = ()  # fields that are read to say why they are refused
    sorter: ClassVar[fields.Sorter]

    model: str | None = None
    """A name of `/v1/models`; left out: the first model that can do what is asked."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.sorter = fields.Sorter({**cls.takes, **cls.model_fields}, cls.rules)

    @model_validator(mode="before")
    @classmethod
    def _sort(cls, values: Any) -> Any:
        """Take the fields that are done here; raises Failure for one that is not known."""
        return cls.sorter.sort(values) if isinstance(values, dict) else values


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

    rules: ClassVar[fields.Rules] = fields.TEXT
    takes: ClassVar[Mapping[str, FieldInfo]] = SamplingParams.model_fields

    stream: bool | None = None
    """Whether the answer comes in events."""
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=256)] | None = None
    max_tokens: Limit | None = None
    """Most tokens of an output; left out, or -1: what is left of the context."""
    temperature: float | None = None
    top_p: float | None = None
    stop: str | Items[str] | None = None
    seed: Annotated[int, AfterValidator(_seed)] | None = None
    """The same seed makes the same output; -1: any."""
    logit_bias: Named[Annotated[float, Field(ge=-100, le=100)]] | None = None
    """Numbers that are added to the logits of tokens, by token id."""
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    """`repeat_penalty` over all tokens, the prompt's, too."""
    do_sample: bool | None = None
    """False: the most likely token is taken, as by temperature 0."""
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    """vLLM's form of a text: json, json_object, regex, choice or grammar."""
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    """Texts, of which the output is one."""
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    ebnf: str | None = None
    """SGLang's name of a grammar, in GBNF or Lark."""
    format: str | dict[str, Any] | None = None
    """Ollama's form of a text: "json", or a schema."""
    cache_salt: str | None = None
    client: str | None = None
    adapters: Named[float] | None = None
    policy_data: dict[str, Any] | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the counts of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    @cached_property
    def form(self) -> Form:
        """The form that the text must have. Raises Failure."""
        given = {name: getattr(self, name, None) for name in READERS}
        return form_of(given | {n: v for n, v in self._extra.items() if n in READERS})

    @property
    def names(self) -> dict[str, str]:
        """Fields of the body, by what the engine calls them."""
        return {**self.form.names}

    @property
    def _extra(self) -> dict[str, Any]:
        """Fields of SamplingParams that OpenAI's API does not name."""
        given = self.model_extra or {}
        return {name: value for name, value in given.items() if value is not None}

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
            Failure: a value that is not allowed.
        """
        given = self.model_dump(include=SAMPLED, exclude_none=True)
        given |= {n: v for n, v in self._extra.items() if n not in READERS} | more
        if self.logit_bias is not None:
            given["logit_bias"] = _biases(self.logit_bias)
        given |= self.form.params
        defaults = {"max_tokens": found.engine.n_ctx_slot} | config.sampling
        if not (defaults | given).get("from_model"):
            defaults = OPENAI | defaults
        given = adapted(given, found.engine.n_ctx_slot)
        return checked_params(defaults | given, self.names)


def adapted(given: Mapping[str, Any], n_ctx: int) -> dict[str, Any]:
    """*given* with the values of SamplingParams in place of those that other servers have."""
    given = dict(given)
    if given.get("max_tokens") in NO_LIMIT:
        given["max_tokens"] = n_ctx
    if given.get("top_k") == -1:
        given["top_k"] = 0
    # A share of nothing holds the most likely token alone; so does a choice without a draw.
    if given.get("top_p") == 0 or given.get("do_sample") is False:
        given.pop("top_p", None)
        given["temperature"] = 0.0
    given.pop("do_sample", None)
    for name in ("top_n_sigma", "adaptive_target"):  # -1 is off
        if isinstance(value := given.get(name), int | float) and value < 0:
            del given[name]
    for name in ("penalty_last_n", "dry_last_n"):  # -1 is all of it
        if given.get(name) == -1:
            given[name] = None
    if (penalty := given.pop("repetition_penalty", None)) is not None and penalty != 1:
        given.setdefault("repeat_penalty", penalty)
        given.setdefault("penalty_last_n", None)
    if "stop" in given:
        stop = given["stop"]
        texts = [stop] if isinstance(stop, str) else stop
        given["stop"] = tuple(text for text in texts if text != "")
    return given


def checked_params(given: dict[str, Any], names: Mapping[str, str]) -> SamplingParams:
    """
    SamplingParams of *given*; raises Failure.

    Args:
        names: of fields of the body, by those of SamplingParams.
    """
    try:
        return SamplingParams(**given)
    except InvalidSampling as error:
        name = renamed(error.name, names)
        message = str(error).replace(f"SamplingParams.{error.name}", name)
        raise Failure(400, error.code, message, name) from error


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
    off = thinking_variables(thinks=False) if effort == "none" else {}
    return {} if effort is None else {"reasoning_effort": effort} | off


def thinking_variables(*, thinks: bool) -> dict[str, Any]:
    """Variables of a chat template that let the model think or not, in both of their names."""
    return {"enable_thinking": thinks, "thinking": thinks}


def _biases(given: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in given.items()}
    except ValueError as error:
        raise refused("logit_bias", f"names are token ids: {error}") from error
