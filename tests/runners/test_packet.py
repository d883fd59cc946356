"""Tensor packets: what fits, what is said of what does not, and text through a runner."""

from contextlib import aclosing
from threading import Event

import pytest

from pyllama_raw import FinishReason
from pyllama_raw.errors import InvalidRequest
from pyllama_raw.runners import LocalRunner, MockRunner, TensorPacket
from pyllama_raw.runners.packet import SIZES, asked_by, infer, model_info
from pyllama_raw.testing import FakeExecutor, fake_engine, fake_limits
from pyllama_raw.testing.runner_contract import settled
from tests.support.loops import anyio_backend  # noqa: F401


@pytest.mark.parametrize(
    ("value", "data"),
    [
        ({"shape": [1, 2], "dtype": "uint8", "data": [1, 2]}, b"\1\2"),
        ({"shape": [1, 4], "dtype": "uint8", "data_base64": "AQIDBA=="}, b"\1\2\3\4"),
        ({"shape": [1, 3], "dtype": "uint8", "base64": "AQID"}, b"\1\2\3"),
        ({"shape": [1], "dtype": "FP32", "data": [0, 0, 0, 0]}, bytes(4)),
        ({"shape": [2], "dtype": "utf8", "data": [104, 105]}, b"hi"),
    ],
)
def test_a_packet_is_read(value, data):
    """
    Bytes as a list or in base64; what is told of it is read again.
    """
    packet = TensorPacket.read(value)

    assert packet.data == data
    assert TensorPacket.read(packet.told()) == packet


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (
            {"shape": [1, 1], "data": [1], "data_base64": "AQ=="},
            "only one of `data` or",
        ),
        ({"shape": [1, 1]}, "one of them"),
        ({"shape": [1, 0], "data": []}, "Invalid shape dimension: 0"),
        ({"shape": [-1], "data": []}, "Invalid shape dimension: -1"),
        (
            {"shape": [1, 2], "data": [1, 2, 3]},
            r"Data length mismatch: expected 2 bytes \(2 uint8 values\) but got 3 bytes",
        ),
        ({"shape": [1], "dtype": "int7", "data": [1]}, "Unsupported dtype: int7"),
        ({"shape": [1], "data": [256]}, "a list of 0 to 255"),
        ({"shape": [1], "data_base64": "!"}, "in base64"),
        ({"data": [1]}, "a shape"),
    ],
)
def test_a_packet_that_does_not_fit_is_refused(value, reason):
    """
    In the words that clients of packets know.
    """
    with pytest.raises(InvalidRequest, match=reason):
        TensorPacket.read(value)


def test_sizes_of_values():
    """
    Of all types.
    """
    assert list(SIZES.values()) == [4, 8, 2, 4, 8, 1, 1]


def test_text_is_bytes_of_one_row():
    """
    No text has no packet; bytes that are no UTF-8 are no text.
    """
    assert TensorPacket.of("hé") == TensorPacket((1, 3), "uint8", b"h\xc3\xa9")
    assert TensorPacket.of("") is None
    with pytest.raises(InvalidRequest, match="Input is not valid UTF-8: "):
        _ = TensorPacket((1, 1), "uint8", b"\xff").text


def test_metadata_are_parameters_and_options():
    """
    512 tokens unless told; aliases; a seed of 64 bits is folded.
    """
    plain, none = asked_by({})
    full, options = asked_by(
        {
            "max_new_tokens": 3,
            "stop_ids": [5],
            "seed": 2**64 - 1,
            "timeout_ms": 1500,
            "priority": -1,
            "temperature": 0,
        }
    )

    assert (plain.max_tokens, none) == (512, {})
    assert (full.max_tokens, full.stop_token_ids, full.temperature) == (3, (5,), 0)
    assert full.seed == (2**64 - 1) % (2**32 - 1)
    assert options == {"deadline_s": 1.5, "priority": -1}
    with pytest.raises(InvalidRequest, match="max_tokenz"):
        asked_by({"max_tokenz": 1})


async def outputs(runner, text="hello", **metadata):
    packet = TensorPacket.of(text)
    async with aclosing(infer(runner, packet, metadata)) as packets:
        return [piece async for piece in packets]


@pytest.mark.anyio
async def test_every_piece_is_a_packet():
    """
    In their order; pieces without text are none.
    """
    async with MockRunner(["hello ", "", "world"]) as runner:
        packets = await outputs(runner)

    assert [packet.text for packet in packets] == ["hello ", "world"]


@pytest.mark.anyio
async def test_a_reader_that_leaves_ends_its_request():
    """
    Within a step: of 100 tokens most are never made.
    """
    left = Event()
    executor = FakeExecutor(
        fake_limits(), on_step=lambda step, _: step < 5 or left.wait()
    )
    async with LocalRunner(fake_engine(executor)) as runner:
        packets = infer(runner, TensorPacket.of("hello"), {"max_new_tokens": 100})
        async with aclosing(packets):
            await anext(packets)
        left.set()
        await settled(runner)
        reasons = runner.engine.stats().finished

    assert reasons[FinishReason.CANCELLED] == 1


@pytest.mark.anyio
async def test_a_model_is_told_of_once_it_is_loaded():
    """
    Texts in and out, and as many at once as there are slots.
    """
    tensor = {"name": "text", "shape": [-1], "dtype": "uint8"}
    async with LocalRunner(fake_engine()) as runner:
        info = model_info(runner)

    assert model_info(LocalRunner("a.gguf")) is None
    assert info == {
        "name": "engine",
        "framework": "gguf",
        "version": None,
        "inputs": [tensor],
        "outputs": [tensor],
        "peak_concurrency": 4,
    }
