"""What makes llama-server or mtmd end the process is served or refused: each in a process."""

import pytest

from tests.native.support import run_python

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("media_library")]

PREAMBLE = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pyllama_raw import Audio, Engine, Image, PyllamaError, SamplingParams
from tests.api.media_engines import GREEDY, config, opened, picture
from tests.media.files import wav_file
from tests.native.test_projector import ultravox_of
from tests.support.tiny import tiny_projector

def told(engine, prompt, params=GREEDY):
    try:
        result = engine.complete(prompt, params)
    except PyllamaError as error:
        return type(error).__name__
    return f"{result.usage.completion_tokens} {result.finish_detail}"

def say(*arguments):
    print(told(*arguments), flush=True)
"""


def told(code: str, *args: object) -> list[str]:
    done = run_python(PREAMBLE + code, *map(str, args))
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def test_a_projector_whose_sizes_do_not_agree_fails_its_requests(tmp_path):
    """
    Each is an error, and the engine goes on.
    """
    code = """
path = ultravox_of(8, Path(sys.argv[1]) / "eight.gguf")
with opened("ultravox", path) as engine:
    for prompt in (["a", Audio(wav_file(8000)), "b"],) * 2 + ("a",):
        say(engine, prompt)
"""
    assert told(code, tmp_path) == ["EncodeFailed", "EncodeFailed", "6 max_tokens"]


@pytest.mark.parametrize("name", ["llava", "gemma3", "qwen2vl"])
def test_a_full_slot_with_an_image_ends_where_text_is_shifted(name):
    """
    Positions of images cannot be moved: the output ends with its slot, and the engine goes on.
    """
    code = """
name = sys.argv[1]
path, model = tiny_projector(name)
options = config(path, context={"n_ctx": 256})
scheduler = options.scheduler.model_copy(update={"n_slots": 1, "context_full": "shift"})
long = SamplingParams(max_tokens=300, temperature=0, ignore_eos=True)
with Engine.open(model, options.model_copy(update={"scheduler": scheduler})) as engine:
    usage = engine.complete(["a", picture(), "b"], long).usage
    print(usage.prompt_tokens + usage.completion_tokens)
    say(engine, "a", long)
"""
    shifted = "300 max_tokens" if name == "llava" else "254 slot"  # others cannot
    assert told(code, name) == ["256", shifted]


def test_many_images_and_many_requests_with_some():
    """
    Twenty images in a prompt, and five prompts with one each at once.
    """
    code = """
with opened("llava") as engine:
    say(engine, ["a", *[picture(i) for i in range(20)], "b"])
    with ThreadPoolExecutor(5) as pool:
        print(*pool.map(lambda i: told(engine, [picture(i), "b"]), range(5)), sep="\\n")
    say(engine, ["a", *[picture(i) for i in range(32)], "b " * 9000])
"""
    assert told(code) == ["6 max_tokens"] * 6 + ["PromptTooLong"]


def test_uploads_that_no_decoder_takes_leave_nothing_to_collect():
    """
    Files with a good beginning and nothing in them are errors of their requests, and what
    these leave behind can be collected.
    """
    code = r"""
import gc, struct, zlib
bmp = b"BM" + struct.pack("<IIIIiiHHI", 70, 0, 54, 40, 2, 2, 1, 24, 3) + bytes(36)
gif = b"GIF89a\2\0\2\0\0\0\0,\0\0\0\0\2\0\2\0\0\2\0;"
mp3 = b"\xff\xfb\x50\xc0" + bytes(204)
def png(*chunks):
    parts = [struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)
head = struct.pack(">IIBBBBB", 2, 2, 8, 3, 0, 0, 0)
palette = png((b"IHDR", head), (b"IDAT", zlib.compress(bytes(6))), (b"IEND", b""))
for name, kind, contents in ("llava", Image, [bmp, gif, palette]), ("ultravox", Audio, [mp3 * 3]):
    with opened(name) as engine:
        for content in contents * 3:
            try:
                say(engine, [kind(content), "a"])
            except PyllamaError as error:
                print(type(error).__name__)
            gc.collect()
        say(engine, "a")
"""
    lines = told(code)
    assert set(lines) == {"BadMedia", "6 max_tokens"}
    assert len(lines) == 3 * 4 + 2


def test_any_limits_of_rows_are_served():
    """
    The fewest rows and the most that can be asked for.
    """
    code = """
for low, high in (1, 1), (1, 2**16), (300, 300):
    limits = {"image_min_tokens": low, "image_max_tokens": high}
    with opened("qwen2vl", **limits) as engine:
        say(engine, [picture(), "b"])
"""
    assert told(code) == ["6 max_tokens"] * 3
