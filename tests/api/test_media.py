"""Images and sounds in prompts, through the public API, on tiny models."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pyllama_raw import Engine
from pyllama_raw.errors import BadMedia, InvalidRequest, PromptTooLong, Unsupported
from pyllama_raw.media import Audio, Image
from tests.api.media_engines import GREEDY, opened, picture
from tests.media.files import (
    deep_png,
    image_file,
    pixels,
    png_of,
    wav_file,
)
from tests.support.tiny import PROJECTORS, tiny_projector

pytestmark = pytest.mark.native

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"


@pytest.fixture(scope="module")
def llava() -> Iterator[Engine]:
    with opened("llava") as engine:
        yield engine


def sample(name: str) -> Image | Audio:
    return picture() if PROJECTORS[name].size else Audio(wav_file(8000))


def data_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def message(*parts: object) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize("name", PROJECTORS)
def test_every_projector_answers(name):
    """
    A list of text and a medium is answered, and counts its rows.
    """
    with opened(name) as engine:
        result = engine.complete(["hello ", sample(name), " there"], GREEDY)

        usage = result.usage
        assert usage.completion_tokens == 6
        assert 0 < usage.media_tokens < usage.prompt_tokens
        assert result.timings.encode_s is not None
        assert engine.stats().encodes == 1
        n_counted = engine.count(["hello ", sample(name), " there"])
        assert n_counted == usage.prompt_tokens


def test_each_way_to_give_an_image_gives_the_same(llava, tmp_path):
    """
    Bytes, a path, an array, Pillow's, a data URL: one prompt, and one encode for each file.
    """
    from PIL import Image as Pillow

    content = image_file("PNG")
    path = tmp_path / "a.png"
    path.write_bytes(content)
    array = pixels(40, 30)
    ways = [
        {"type": "image_url", "image_url": {"url": data_url(content)}},
        {"type": "image", "image": content},
        {"type": "image", "image": path},
        {"type": "image", "image": array},
        {"type": "image", "image": Pillow.fromarray(array)},
        {"type": "image", "image": Image(content)},
    ]
    before = llava.stats().encodes

    results = [
        llava.complete(
            message({"type": "text", "text": "see "}, way),
            GREEDY,
            chat_template=TEMPLATE,
        )
        for way in ways
    ]

    assert len({result.token_ids for result in results}) == 1
    assert len({result.usage.prompt_tokens for result in results}) == 1
    assert llava.stats().encodes - before <= 2  # the file, and its pixels


def test_what_a_message_writes_is_text(llava):
    """
    The marker of mtmd and the words around an image are no images.
    """
    text = "<__media__> <image> <|image_1|> <start_of_image>"

    prompts = [[picture(), text], [picture(), "."], text]
    n_rows = [llava.complete(prompt, GREEDY).usage.media_tokens for prompt in prompts]

    assert n_rows == [4, 4, 0]


REFUSED = {
    "no image": (lambda: [Image(b"hello, world"), "a"], BadMedia),
    "cut": (lambda: [Image(image_file("PNG")[:-40]), "a"], BadMedia),
    "too long": (lambda: [Image(pixels(100_000, 1)), "a"], BadMedia),
    "wrong magic": (lambda: [Image(b"GIF8" + bytes(99)), "a"], BadMedia),
    "a bomb": (lambda: [Image(bomb()), "a"], BadMedia),
    "a sound": (lambda: [Audio(wav_file()), "a"], Unsupported),
    "too many": (lambda: [picture()] * 33 + ["a"], InvalidRequest),
    "a number": (lambda: [picture(), 3], InvalidRequest),
    "nothing behind": (lambda: ["a", picture()], InvalidRequest),
    "too long a prompt": (lambda: [picture(), "a " * 5000], PromptTooLong),
    "an address": (
        lambda: shows("image_url", {"url": "https://a.b/c"}),
        InvalidRequest,
    ),
    "a file": (lambda: shows("image_url", {"url": "file:///etc/x"}), InvalidRequest),
    "a path as text": (lambda: shows("image", "/etc/passwd"), InvalidRequest),
    "no base64": (
        lambda: shows("image_url", {"url": data_url(b"a") + "?"}),
        InvalidRequest,
    ),
    "an empty one": (lambda: shows("image_url", {"url": data_url(b"")}), BadMedia),
    "a video": (lambda: shows("video", b""), InvalidRequest),
}


def shows(kind: str, value: object) -> list[dict[str, Any]]:
    return message({"type": "text", "text": "see "}, {"type": kind, kind: value})


def bomb() -> bytes:
    """A small PNG of 192 megabytes of pixels."""
    return png_of(2**13, 2**13, zlib.compress(bytes((3 * 2**13 + 1) * 2**13)))


@pytest.mark.parametrize("name", REFUSED)
def test_bad_media_are_typed_errors_of_their_request(llava, name):
    """
    Nothing else is touched, and nothing is kept of them.
    """
    make, kind = REFUSED[name]
    before = llava.stats()

    with pytest.raises(kind):
        llava.complete(make(), GREEDY)

    after = llava.stats()
    assert (after.running, after.waiting, after.media_bytes) == (0, 0, 0)
    assert after.row_bytes == before.row_bytes
    assert llava.complete("hello", GREEDY).usage.completion_tokens == 6


def test_an_upload_that_cannot_be_decoded_is_told_from_the_others(llava):
    """
    The error says which it is of its prompt, what was given and what goes; each of two
    requests that show it has its own place.
    """
    cut = Image(image_file("GIF")[:-40])
    prompts = [["a", *[picture(i) for i in range(n)], cut, "b"] for n in (2, 1)]

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(llava.complete, prompt, GREEDY) for prompt in prompts]
        errors = [future.exception(30) for future in futures]

    assert [error.index for error in errors] == [2, 1]
    for error in errors:
        assert f"{cut!r} of {len(cut.content)} bytes: it cannot" in str(error)
        assert str(error).endswith("give a whole PNG, JPEG, GIF, BMP or WebP file")


@pytest.mark.parametrize(
    "image",
    [
        Image(pixels(1, 1)),
        Image(deep_png()),
        Image(image_file("JPEG", mode="CMYK")),
        Image(image_file("GIF")),
        Image(image_file("BMP")),
        Image(image_file("WEBP")),
    ],
    ids=repr,
)
def test_unusual_images_work(llava, image):
    """
    One pixel, 16 bits, four colours.
    """
    result = llava.complete([image, "a"], GREEDY)

    assert result.usage.completion_tokens == 6


def test_an_engine_without_a_projector_refuses_media():
    """
    In lists and in chats.
    """
    with Engine.open(tiny_projector("llava")[1]) as engine:
        with pytest.raises(Unsupported, match="mmproj"):
            engine.complete([picture(), "a"], GREEDY)
        with pytest.raises(InvalidRequest, match="no images"):
            engine.complete(message({"type": "image", "image": picture()}), GREEDY)
