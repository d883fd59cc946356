"""What makes llama-server or mtmd end the process is served or refused: each in a process."""

import pytest

from tests.native.support import run_python

pytestmark = pytest.mark.native

PREAMBLE = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pyllama_raw import Audio, Engine, PyllamaError, SamplingParams
from tests.api.media_engines import GREEDY, config, opened, picture
from tests.media.files import wav_file
from tests.native.test_projector import ultravox_of
from tests.tiny import tiny_projector

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
