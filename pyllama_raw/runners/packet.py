"""
Tensor packets at the edge of a runner: text as uint8 of the shape [1, n].

A packet is raw bytes with a shape and a type; as JSON it has its bytes as `data`, a list, or as
`data_base64` (`base64` is the same). A text of no bytes has no packet, because no dimension may
be 0: an output without text sends none.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any, Self, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pyllama_raw.errors import InvalidRequest, reading, shown
from pyllama_raw.options.requests import (
    MAX_DEADLINE_S,
    MAX_PRIORITY,
    RequestOptions,
)
from pyllama_raw.options.sampling import SamplingParams
from pyllama_raw.runners.runner import ModelRunner

SIZES = {  # bytes of a value
    "float32": 4,
    "float64": 8,
    "float16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "string": 1,
}
ALIASES = {
    "fp32": "float32",
    "fp64": "float64",
    "fp16": "float16",
    "i32": "int32",
    "i64": "int64",
    "u8": "uint8",
    "utf8": "string",
}
WORDS = ("data", "data_base64", "base64")
MAX_NEW_TOKENS = 512
MAX_DIMENSIONS = 8
MAX_SIZE = 2**48  # of a dimension; more bytes fit no memory
ANY_SEED = 2**32 - 1  # seeds are below it; longer ones are folded
NAMES = {
    "max_new_tokens": "max_tokens",
    "stop_ids": "stop_token_ids",
    "repetition_penalty": "repeat_penalty",
}
OWN = ("timeout_ms", "priority")
FORMS = "a shape of numbers, and bytes as a list of 0 to 255 or in base64"
STRICT = ConfigDict(strict=True, extra="ignore")

Byte = Annotated[int, Field(ge=0, le=255)]


class _PacketFields(BaseModel):
    """A packet as JSON, whatever it says."""

    model_config = STRICT

    shape: Annotated[list[int], Field(max_length=MAX_DIMENSIONS, fail_fast=True)]
    dtype: Annotated[str, Field(max_length=16)] = "uint8"
    data: Annotated[list[Byte], Field(fail_fast=True)] | bytes | None = None
    data_base64: str | None = None
    base64: str | None = None


class _Metadata(BaseModel):
    """Fields of metadata that are no parameters of sampling."""

    model_config = STRICT

    timeout_ms: Annotated[float, Field(gt=0, le=1000 * MAX_DEADLINE_S)] | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None


@dataclass(frozen=True, slots=True)
class TensorPacket:
    """
    Bytes with a shape of at most 8 dimensions.

    Raises:
        InvalidRequest: they do not fit each other.
    """

    shape: tuple[int, ...]
    """The sizes of its dimensions, above 0."""
    dtype: str
    """The type of a value: float32, float64, float16, int32, int64, uint8 or string."""
    data: bytes
    """The values, one behind the other."""

    def __post_init__(self) -> None:
        # A caller may give anything, whatever the types say.
        shape, name, data = cast("Any", (self.shape, self.dtype, self.data))
        dtype = ALIASES.get(name.lower(), name.lower()) if isinstance(name, str) else ""
        if dtype not in SIZES:
            allowed = f"one of {', '.join(SIZES)}. Unsupported dtype: {name!s:.40}"
            raise InvalidRequest("dtype", name, allowed)
        object.__setattr__(self, "dtype", dtype)
        if not isinstance(shape, tuple) or len(shape) > MAX_DIMENSIONS:
            allowed = f"a tuple of at most {MAX_DIMENSIONS} sizes"
            raise InvalidRequest("shape", shape, allowed)
        for size in shape:
            if type(size) is not int or not 0 < size <= MAX_SIZE:
                allowed = f"sizes above 0. Invalid shape dimension: {shown(size)}"
                raise InvalidRequest("shape", shape, allowed)
        if not isinstance(data, bytes):
            raise InvalidRequest("data", data, "bytes")
        n_values = prod(self.shape)
        n_bytes = n_values * SIZES[dtype]
        if len(self.data) != n_bytes:
            raise InvalidRequest(
                "data",
                f"{len(self.data)} bytes",
                f"what the shape says. Data length mismatch: expected {n_bytes} bytes "
                f"({n_values} {dtype} values) but got {len(self.data)} bytes",
            )

    @classmethod
    def of(cls, text: str) -> Self | None:
        """*text* as a packet; None if it is empty. Raises InvalidRequest for half characters."""
        with reading("text", text, "a text of whole characters"):
            data = text.encode()
        return cls((1, len(data)), "uint8", data) if data else None

    @classmethod
    def read(cls, packet: Mapping[str, Any]) -> Self:
        """
        The packet that JSON tells.

        Raises:
            InvalidRequest: it is none, whatever it is.
        """
        try:
            fields = _PacketFields.model_validate(packet)
        except (ValidationError, RecursionError) as error:
            raise _misfit("packet", packet, error, FORMS) from None
        forms = [form for form in WORDS if getattr(fields, form) is not None]
        if len(forms) != 1:
            allowed = "only one of `data` or `data_base64`, and one of them"
            raise InvalidRequest("packet", forms, allowed)
        value = getattr(fields, forms[0])
        with reading(forms[0], value, FORMS):
            data = b64decode(value, validate=True) if forms[0] != "data" else value
        return cls(tuple(fields.shape), fields.dtype, bytes(data))

    def told(self) -> dict[str, Any]:
        """The packet as JSON."""
        return {"shape": [*self.shape], "dtype": self.dtype, "data": [*self.data]}

    @property
    def text(self) -> str:
        """The bytes as text."""
        try:
            return self.data.decode()
        except UnicodeDecodeError as error:
            allowed = f"UTF-8. Input is not valid UTF-8: {error}"
            raise InvalidRequest("data", "other bytes", allowed) from error


def asked_by(metadata: Mapping[str, Any]) -> tuple[SamplingParams, RequestOptions]:
    """
    Parameters and options that *metadata* of a packet tell.

    `timeout_ms` ends an output with the reason DEADLINE and the text so far. Any field of
    SamplingParams goes, too.

    Raises:
        InvalidRequest: one is not known, not allowed or given twice.
    """
    with reading("metadata", metadata, "names and values"):
        items: list[tuple[Any, Any]] = [*metadata.items()]
    params: dict[str, Any] = {}
    for name, value in items:
        field = NAMES.get(name, name) if isinstance(name, str) else ""
        if field not in SamplingParams.model_fields and field not in OWN:
            allowed = "timeout_ms, priority, or a field of SamplingParams"
            raise InvalidRequest(shown(name), value, allowed)
        if field in params:
            raise InvalidRequest(name, value, f"only one of {name} and {field}")
        params[field] = value
    try:
        fields = _Metadata.model_validate(params)
    except ValidationError as error:
        raise _misfit("metadata", metadata, error, "other values") from None
    options: RequestOptions = {}
    if fields.timeout_ms is not None:
        options["deadline_s"] = fields.timeout_ms / 1000
    if fields.priority is not None:
        options["priority"] = fields.priority
    for name in OWN:
        params.pop(name, None)
    if fields.seed is not None:
        params["seed"] = fields.seed % ANY_SEED
    return SamplingParams(**({"max_tokens": MAX_NEW_TOKENS} | params)), options


def _misfit(
    name: str,
    value: object,
    error: ValidationError | RecursionError,
    allowed: str,
) -> InvalidRequest:
    """The first mistake that pydantic has found in *value*, by its field."""
    if isinstance(error, RecursionError):
        return InvalidRequest(name, value, allowed)
    first = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(map(str, first["loc"])) or name
    return InvalidRequest(field, first["input"], f"{allowed} ({first['msg']})")


async def infer(
    runner: ModelRunner, packet: TensorPacket, metadata: Mapping[str, Any]
) -> AsyncGenerator[TensorPacket, None]:
    """
    The output for the text in *packet*, a packet for each piece of text.

    Use it within `aclosing()`, whose end ends the request.
    """
    params, options = asked_by(metadata)
    async with runner.generate(packet.text, params, **options) as run:
        async for delta in run:
            if (piece := TensorPacket.of(delta.text)) is not None:
                yield piece


def model_info(runner: ModelRunner) -> dict[str, Any] | None:
    """Facts of a model, as services of packets tell them. None: it is not loaded."""
    n_slots = runner.capabilities.n_slots
    if n_slots is None:
        return None
    tensor = {"name": "text", "shape": [-1], "dtype": "uint8"}
    return {
        "name": runner.name,
        "framework": "gguf",
        "version": None,
        "inputs": [tensor],
        "outputs": [tensor],
        "peak_concurrency": n_slots,
    }
