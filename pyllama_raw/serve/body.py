"""
Bodies: their fields, and what all bodies that ask for text say in the same words.

A body is sorted by the tables of fields.py before its model checks it. A field of SamplingParams is
taken in any dialect that asks for text, under its own name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import inf, isnan, nan
from secrets import randbelow
from types import UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from pyllama_raw import SamplingParams
from pyllama_raw.errors import InvalidSampling
from pyllama_raw.options.frozen import suggestion
from pyllama_raw.options.requests import AdapterScale
from pyllama_raw.options.sampling import CONSTRAINTS, MAX_TOP
from pyllama_raw.results import Operation
from pyllama_raw.runners.guards import duration_s
from pyllama_raw.serve import fields
from pyllama_raw.serve.failures import Failure, refused, renamed
from pyllama_raw.serve.forms import READERS, Form, ResponseFormat, form_of
from pyllama_raw.serve.service import CURRENT, ServedModel, Service

ANY_SEED = 2**32 - 1

T = TypeVar("T")
# Lists and mappings stop at their first mistake, or a body of a MiB has a million of them.
Items = Annotated[list[T], Field(fail_fast=True)]
Named = Annotated[dict[str, T], Field(fail_fast=True)]
OPTIONS = {
    "priority", "deadline_s", "max_wait_s", "cache_salt", "client", "adapters",
    "policy_data", "speculation",
}  # fmt: skip
SAMPLED = {
    "n", "max_tokens", "temperature", "top_p", "stop", "seed", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "do_sample",
}  # fmt: skip
STAGES = {"typ_p": "typical"}  # llama.cpp's name of a stage; others have one name
NO_LIMIT = (-1, -2)  # of max_tokens; -2 is Ollama's word for the rest of the context
OPENAI = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}  # its defaults
Limit = Annotated[int, Field(ge=min(NO_LIMIT))]

NUMBER = re.compile(r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*")
MAX_NUMBER = 64  # characters of a number in words
NUMBERS = {int, float}
FLAGS = {"true": True, "false": False}
CONTAINERS = {dict: dict, Mapping: dict, list: list, tuple: list, Sequence: list}


# -- the fields of any body --------------------------------------------------------------


class Exact(BaseModel):
    """An object that has no other fields than these, and of others names the first."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _refuse_others(cls, values: Any) -> Any:
        if isinstance(values, dict):
            for name in values:
                if name not in cls.model_fields:
                    place = {"name": repr(name[:99])}
                    reason = "{name} is no field of it"
                    raise PydanticCustomError("extra_forbidden", reason, place)
        return values


class Body(BaseModel):
    """A body for one of the models."""

    model_config = ConfigDict(
        extra="ignore", strict=True, use_attribute_docstrings=True
    )

    rules: ClassVar[fields.Rules] = fields.ANY
    takes: ClassVar[Mapping[str, FieldInfo]] = {}  # fields beside those of the class
    # Fields that are read to say why they are refused.
    refuses: ClassVar[tuple[str, ...]] = ()
    # Types of JSON that a field may have, by all names of the field.
    kinds_of: ClassVar[dict[str, frozenset[type]]]
    with_default: ClassVar[set[str]]  # names of fields that have another one than null

    # What the model must be able to do. None: anything.
    need: ClassVar[Operation | None] = None

    model: str | None = None
    """A name of `/v1/models`; left out or empty: the first model that can do what is asked."""
    keep_alive: float | str | None = None
    """
    Seconds that the model stays loaded without use afterwards, where models are loaded on demand;
    also as "5m". Below 0: for ever.
    """

    @property
    def keep_alive_s(self) -> float | None:
        """Seconds of `keep_alive`. Raises Failure."""
        value = self.keep_alive
        if isinstance(value, str):
            sign = -1 if value.startswith("-") else 1
            # A text of megabytes would become as many parts.
            is_short = len(value) <= MAX_NUMBER
            seconds = duration_s(value.lstrip("+-")) if is_short else None
            value = nan if seconds is None else sign * seconds
        if value is not None and isnan(value):
            raise refused("keep_alive", "give seconds, or a time such as 5m or 1h30m")
        return inf if value is not None and value < 0 else value

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.kinds_of, cls.with_default = {}, set()
        # A rule of the dialect wins over what all bodies take.
        takes = {name: f for name, f in cls.takes.items() if name not in cls.rules}
        for name, field in {**takes, **cls.model_fields}.items():
            alias = field.validation_alias
            names = (name,) if alias is None else getattr(alias, "choices", (alias,))
            kinds = frozenset(_kinds_of(field.annotation))
            cls.kinds_of |= dict.fromkeys(map(str, names), kinds)
            if not field.is_required() and field.default is not None:
                cls.with_default |= {*map(str, names)}

    @model_validator(mode="before")
    @classmethod
    def _sort(cls, values: Any, info: ValidationInfo) -> Any:
        """
        Take the fields that are done here, under our names.

        The context of the validation says how, and gets the names of fields that are ignored.
        Raises Failure if a field is not known, or not done.
        """
        if not isinstance(values, dict):
            return values
        own: dict[str, Any] = {}
        ignored, is_lenient = info.context or fields.Sorting([])
        for name, value in values.items():
            # A body's own field comes first: `user` of one body may be idle in another.
            if name in cls.kinds_of:
                # Clients write null for what they leave out.
                if value is not None or name not in cls.with_default:
                    own[name] = read_plain(value, cls.kinds_of[name])
                continue
            match cls.rules.get(name):
                # It changes no output, so it is left out, and the answer names it.
                case fields.Ignored():
                    ignored.append(name)
                # Our name wins, if the body has both.
                case fields.Alias(name=ours):
                    if value is not None and values.get(ours) is None:
                        own[ours] = read_plain(value, cls.kinds_of[ours])
                # Only a value that asks for what happens anyway is let be.
                case fields.Neutral() as rule:
                    if rule.has(value):
                        continue
                    if not is_lenient or name in fields.DONE_THERE:
                        raise refused(name, rule.reason, "unknown_parameter")
                    ignored.append(name)
                # llama-server passes over what it does not know.
                case None if is_lenient:
                    if len(ignored) < fields.MAX_NAMES and fields.NAMES.fullmatch(name):
                        ignored.append(name)
                # Nobody knows it, so it may be meant to change the output.
                case None if value is not None:
                    hint = suggestion(name, cls.kinds_of)
                    raise refused(name, fields.UNKNOWN + hint, "unknown_parameter")
        options = own.get("stream_options")
        if isinstance(options, dict):
            idle = (name for name in fields.STREAM_OPTIONS if name in options)
            ignored += [f"stream_options.{name}" for name in idle]
        return own


def read_plain(value: object, kinds: frozenset[type]) -> object:
    """
    *value* as a number or a flag, if it is written as another one or in words.

    An empty list is an empty object where there is no list: PHP writes both alike.
    """
    if value == [] and dict in kinds and list not in kinds:
        return {}
    if isinstance(value, float) and int in kinds and float not in kinds:
        return int(value) if value.is_integer() else value
    # Perl and Lua have no flags, so their clients write 0 and 1.
    if type(value) is int and value in (0, 1) and bool in kinds and not kinds & NUMBERS:
        return bool(value)
    if not isinstance(value, str) or str in kinds or len(value) > MAX_NUMBER:
        return value
    if bool in kinds and value.lower() in FLAGS:
        return FLAGS[value.lower()]
    if kinds & NUMBERS and NUMBER.fullmatch(value):
        if value.strip().lstrip("+-").isdecimal():
            return int(value)
        return read_plain(float(value), kinds)
    return value


def _kinds_of(annotation: Any) -> list[type]:
    """The types of JSON that *annotation* allows, not those inside of lists and objects."""
    kinds = get_args(annotation)
    origin = get_origin(annotation)
    if origin in CONTAINERS:
        return [CONTAINERS[origin]]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [dict]
    if origin is Annotated:
        return _kinds_of(kinds[0])
    if origin in (Union, UnionType):
        return [plain for kind in kinds for plain in _kinds_of(kind)]
    if origin is Literal:
        return [type(kind) for kind in kinds]
    return [annotation] if annotation in (int, float, bool, str) else []


# -- bodies of work, and of text ---------------------------------------------------------


class ServedBody(Body):
    """A body of work that waits for its turn."""

    priority: int | None = None
    deadline_s: float | None = None
    max_wait_s: float | None = None

    def served(self, service: Service) -> dict[str, Any]:
        """Options of serving the request; the service has limits of time for others."""
        options = self.model_dump(include=OPTIONS, exclude_none=True)
        return service.time_limits | options


def scales_of(
    by_name: Mapping[str, float] | None,
    model: ServedModel,
    service: Service,
    by_number: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """
    The scales of adapters for a request: those that its body names, and those of its model.

    Args:
        by_name, by_number: of the body; None: it has no such field.
    """
    usual = by_number
    # Scales of the service are for requests that name no adapter in any way.
    if usual is None:
        usual = {} if by_name else service.scales.get(model.name, {})
    return {**usual, **model.adapters, **(by_name or {})}


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool | None = None


class LoraScale(BaseModel):
    """An adapter by its place in `/lora-adapters`."""

    id: Annotated[int, Field(ge=0)]
    scale: AdapterScale


def _seed(number: int) -> int:
    """*number* in 32 bits; if all are set, as those of -1, they stand for any number."""
    seed = number % 2**32
    return seed if seed != ANY_SEED else randbelow(ANY_SEED)


class TextBody(ServedBody):
    """A body that asks for text."""

    model_config = ConfigDict(extra="allow")

    rules: ClassVar[fields.Rules] = fields.TEXT
    need: ClassVar[Operation | None] = Operation.GENERATE
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
    n_probs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None
    """llama.cpp's name of log-probabilities, with as many likely tokens; 0: none."""
    samplers: Items[str] | None = None
    """llama.cpp's name of `stages`: the samplers that run, in this order."""
    lora: Items[LoraScale] | None = None
    """Scales of adapters by their places in `/lora-adapters`; those left out are off."""
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
    speculation: bool = True
    id_slot: Any = None
    """llama.cpp's name of a slot, which is had if it is free and slots have files; -1: any."""

    @cached_property
    def form(self) -> Form:
        """The form that the text must have. Raises Failure."""
        values = {name: getattr(self, name, None) for name in READERS}
        is_free = all(value in (None, "") for value in values.values())
        return Form({}, {}) if is_free else form_of(values)

    @property
    def unnamed(self) -> dict[str, Any]:
        """Fields of SamplingParams that OpenAI's API does not name."""
        extra = self.model_extra or {}
        return {
            name: value
            for name, value in extra.items()
            if value is not None and name not in READERS
        }

    def options(self, model: ServedModel, service: Service) -> Any:
        """
        Options of serving the request, with the adapters of the model that it names.

        Raises:
            Failure: `lora` has an id that no adapter has.
        """
        options = self.served(service)
        by_number = None
        if self.lora is not None:
            names = [info.name for info in model.engine.adapters()]
            try:
                by_number = {names[lora.id]: lora.scale for lora in self.lora}
            except IndexError as error:
                reason = f"each id is that of an adapter, and there are {len(names)}"
                raise refused("lora", reason) from error
        if self.id_slot is not None:
            # Who cannot save a slot has nothing of its number, and others would lose what is in it.
            exchange, has_files = CURRENT.get(), service.config.slot_save_path
            if has_files and type(self.id_slot) is int and self.id_slot >= 0:
                options["slot"] = self.id_slot % model.engine.info.n_slots
            elif exchange is not None:
                exchange.ignored.append("id_slot")
        scales = scales_of(self.adapters, model, service, by_number)
        if scales or self.lora is not None:
            options["adapters"] = scales
        return options

    @property
    def has_output(self) -> bool:
        """Whether any token is to be told: the engine makes one at least."""
        return self.max_tokens != 0

    def params(
        self,
        model: ServedModel,
        service: Service,
        names: Mapping[str, str],
        **dialect: Any,
    ) -> SamplingParams:
        """
        Parameters by the service's defaults and OpenAI's: temperature 1, the rest of the context.

        Args:
            names: of fields of the body, by those of SamplingParams.
            dialect: fields of SamplingParams that the dialect has other names for.

        Raises:
            Failure: a value that is not allowed.
        """
        values = self.model_dump(include=SAMPLED, exclude_none=True)
        values |= self.unnamed | dialect
        if self.samplers is not None:
            values["stages"] = [STAGES.get(name, name) for name in self.samplers]
        if self.n_probs:
            values.setdefault("logprobs", self.n_probs)
        is_llama = service.config.in_place_of is not None
        if is_llama and not self.has_output:
            values["max_tokens"] = 1
        if self.logit_bias is not None:
            try:
                biases = {int(token): bias for token, bias in self.logit_bias.items()}
            except ValueError as error:
                raise refused("logit_bias", f"names are token ids: {error}") from error
            values["logit_bias"] = biases
        values |= self.form.params
        n_ctx = model.engine.info.n_ctx_slot
        defaults = {"max_tokens": n_ctx} | service.sampling
        if self.form.params:  # a form that the service has for others gives way
            defaults = {n: v for n, v in defaults.items() if n not in CONSTRAINTS}
        # Where the service takes the defaults of the model file, OpenAI's would hide them.
        if not (is_llama or (defaults | values).get("from_model")):
            defaults = OPENAI | defaults
        return checked_params(defaults | adapted(values, n_ctx), names)


def adapted(values: Mapping[str, Any], n_ctx: int) -> dict[str, Any]:
    """*values* with those of SamplingParams in place of those that other servers have."""
    values = dict(values)
    if values.get("max_tokens") in NO_LIMIT:
        values["max_tokens"] = n_ctx
    if values.get("top_k") == -1:
        values["top_k"] = 0
    # A share of nothing holds the most likely token alone; so does a choice without a draw.
    if values.get("top_p") == 0 or values.get("do_sample") is False:
        values.pop("top_p", None)
        values["temperature"] = 0.0
    values.pop("do_sample", None)
    for name in ("top_n_sigma", "adaptive_target"):  # -1 is off
        if isinstance(value := values.get(name), int | float) and value < 0:
            del values[name]
    for name in ("penalty_last_n", "dry_last_n"):  # -1 is all of it
        if values.get(name) == -1:
            values[name] = None
    # The penalty of others counts all tokens, ours the last ones unless it is told otherwise.
    if (penalty := values.pop("repetition_penalty", None)) is not None and penalty != 1:
        values.setdefault("repeat_penalty", penalty)
        values.setdefault("penalty_last_n", None)
    # An empty text would end each output at once.
    if "stop" in values:
        stop = values["stop"]
        texts = [stop] if isinstance(stop, str) else stop
        values["stop"] = tuple(text for text in texts if text != "")
    return values


def checked_params(
    values: Mapping[str, Any], names: Mapping[str, str]
) -> SamplingParams:
    """
    SamplingParams of *values*; raises Failure.

    Args:
        names: of fields of the body, by those of SamplingParams.
    """
    try:
        return SamplingParams(**values)
    except InvalidSampling as error:
        name = renamed(error.name, names)
        message = str(error).replace(f"SamplingParams.{error.name}", name)
        raise Failure(400, error.code, message, name) from error
