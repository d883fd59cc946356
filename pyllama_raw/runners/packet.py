"""
Tensor packets at the edge of a runner: text as uint8 of the shape [1, n].

A packet is raw bytes with a shape and a type; as JSON it has its bytes as `data`, a list, or as
`data_base64` (`base64` is the same). A text of no bytes has no packet, because no dimension may
be 0: an output without text sends none.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Self

from pyllama_raw.errors import InvalidRequest
from pyllama_raw.options.requests import RequestOptions
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
MAX_NEW_TOKENS = 512
ANY_SEED = 2**32 - 1  # seeds are below it; longer ones are folded
NAMES = {"max_new_tokens": "max_tokens", "stop_ids": "stop_token_ids"}
WORDS = ("data", "data_base64", "base64")


@dataclass(frozen=True, slots=True)
class TensorPacket:
    """
    Bytes with a shape.

    Raises:
        InvalidRequest: they do not fit each other.
    """

    shape: tuple[int, ...]
    dtype: str
    data: bytes

    def __post_init__(self) -> None:
        dtype = ALIASES.get(self.dtype.lower(), self.dtype.lower())
        if dtype not in SIZES:
            said = f"one of {', '.join(SIZES)}. Unsupported dtype: {self.dtype}"
            raise InvalidRequest("dtype", self.dtype, said)
        object.__setattr__(self, "dtype", dtype)
        for size in self.shape:
            if size <= 0:
                said = f"sizes above 0. Invalid shape dimension: {size}"
                raise InvalidRequest("shape", self.shape, said)
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
        """*text* as a packet; None if it is empty."""
        data = text.encode()
        return cls((1, len(data)), "uint8", data) if data else None

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Self:
        """The packet that JSON tells."""
        given = [word for word in WORDS if told.get(word) is not None]
        if len(given) != 1:
            said = "only one of `data` or `data_base64`, and one of them"
            raise InvalidRequest("packet", given, said)
        value = told[given[0]]
        try:
            data = (
                bytes(value) if given[0] == "data" else b64decode(value, validate=True)
            )
            shape = tuple(map(int, told["shape"]))
        except (ValueError, TypeError, KeyError) as error:
            said = "a shape, and bytes as a list of 0 to 255 or in base64"
            raise InvalidRequest("packet", given[0], said) from error
        return cls(shape, str(told.get("dtype", "uint8")), data)

    def told(self) -> dict[str, Any]:
        """The packet as JSON."""
        return {"shape": [*self.shape], "dtype": self.dtype, "data": [*self.data]}

    @property
    def text(self) -> str:
        """The bytes as text."""
        try:
            return self.data.decode()
        except UnicodeDecodeError as error:
            said = f"UTF-8. Input is not valid UTF-8: {error}"
            raise InvalidRequest("data", "other bytes", said) from error


def asked_by(metadata: Mapping[str, Any]) -> tuple[SamplingParams, RequestOptions]:
    """
    Parameters and options that *metadata* of a packet tell.

    `timeout_ms` ends an output with the reason DEADLINE and the text so far. Any field of
    SamplingParams goes, too.

    Raises:
        InvalidRequest: one is not known or not allowed.
    """
    given = {NAMES.get(name, name): value for name, value in metadata.items()}
    options: RequestOptions = {}
    if (timeout_ms := given.pop("timeout_ms", None)) is not None:
        options["deadline_s"] = timeout_ms / 1000
    if (priority := given.pop("priority", None)) is not None:
        options["priority"] = priority
    if (seed := given.get("seed")) is not None:
        given["seed"] = int(seed) % ANY_SEED
    for name in given.keys() - SamplingParams.model_fields.keys():
        said = "timeout_ms, priority, or a field of SamplingParams"
        raise InvalidRequest(name, given[name], said)
    return SamplingParams(**({"max_tokens": MAX_NEW_TOKENS} | given)), options


async def infer(
    runner: ModelRunner, packet: TensorPacket, metadata: Mapping[str, Any]
) -> AsyncIterator[TensorPacket]:
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
