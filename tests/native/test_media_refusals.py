"""
Every call on media that mtmd or libllama would end the process on is refused first.

What libraries would abort on runs in a process of its own, which must end well.
"""

import pytest

from pyllama_raw.errors import ProjectorLoadFailed
from pyllama_raw.native.model import Model
from pyllama_raw.native.projector import Projector
from scripts.mutations.gguf_file import read
from tests.native.support import run_python
from tests.support.tiny import PROJECTORS, tiny_projector

pytestmark = pytest.mark.native

CODE = """
import sys
from array import array
from pyllama_raw.engine.media_desk import MediaReader
from pyllama_raw.errors import PyllamaError
from pyllama_raw.media import Audio, Image
from pyllama_raw.native.projector import Bitmap
from pyllama_raw.native.context import Context
from pyllama_raw.native.model import Model
from pyllama_raw.native.projector import Projector
from pyllama_raw.native.batch import RowBatch
from tests.media import files

def guard(name, call):
    try:
        call()
    except PyllamaError as error:
        print(name, type(error).__name__, sep="|", flush=True)
    else:
        print(name, "nothing was refused", sep="|", flush=True)

def rows(n_rows, *, n_sections=1, slot=0, pos=0, n_embd=64, is_causal=True):
    batch = RowBatch(n_embd, n_sections, is_causal=is_causal)
    places = array("i", [pos + i for i in range(n_rows)] * n_sections)
    batch.add(array("f", bytes(4 * n_rows * n_embd)), places, slot)
    return batch

model = Model.load(sys.argv[2], n_gpu_layers=0)
projector = Projector.load(sys.argv[1], model, use_gpu=False)
reader = MediaReader(projector, b"")
context = Context(model, n_seq_max=2, n_ctx=512, n_batch=128, n_ubatch=64)

guard("rows of n_ubatch", lambda: context.decode(rows(64, is_causal=False)))
guard("more than n_ubatch", lambda: context.decode(rows(65, pos=64, is_causal=False)))
guard("more than n_batch", lambda: context.decode(rows(129, pos=64)))
guard("no rows", lambda: context.decode(RowBatch(64, 1)))
guard("unknown slot", lambda: context.decode(rows(1, slot=2)))
guard("slot -1", lambda: rows(1, slot=-1))
guard("slot 10,000", lambda: rows(1, slot=10_000))
guard("pos -1", lambda: context.decode(rows(1, pos=-1)))
guard("half a row", lambda: RowBatch(64, 1).add(array("f", bytes(4)), array("i"), 0))
guard("positions", lambda: RowBatch(64, 4).add(array("f", bytes(256)), array("i", [0]), 0))
guard("all cells", lambda: [
    context.decode(rows(128, slot=1, pos=128 * i)) for i in range(5)
])
guard("a sample", lambda: Bitmap.sound(1))
guard("no pixel", lambda: Bitmap.image(0, 0))
guard("a long image", lambda: Bitmap.image(100_000, 1))
guard("sound", lambda: reader.layout(Audio(files.wav_file())))
guard("read sound", lambda: reader.read(Audio(files.wav_file())))
guard("a cut PNG", lambda: reader.read(Image(files.image_file("PNG")[:-40])))
guard("a cut JPEG", lambda: reader.read(Image(files.image_file("JPEG")[:-40])))
guard("an animation", lambda: reader.read(Image(files.moving("GIF"))))
guard("text", lambda: Image(b"hello, world" * 9))
guard("a film", lambda: Image(b"\\0\\0\\0\\x20ftypisom" + bytes(400)))
for kind in ("PNG", "JPEG", "GIF", "BMP", "WEBP"):
    guard(kind, lambda: reader.read(Image(files.image_file(kind))))
guard("16 bits", lambda: reader.read(Image(files.deep_png())))
guard("CMYK", lambda: reader.read(Image(files.image_file("JPEG", mode="CMYK"))))
guard("one pixel", lambda: reader.read(Image(files.image_file("PNG", 1, 1))))
guard("pixels", lambda: reader.read(Image(files.pixels(9, 9))))
projector.close()
guard("closed", lambda: reader.read(Image(files.pixels(9, 9))))
"""

WORKS = "nothing was refused"
EXPECTED = {
    "rows of n_ubatch": WORKS,
    "more than n_ubatch": "InvalidBatch",
    "more than n_batch": "InvalidBatch",
    "no rows": "InvalidBatch",
    "unknown slot": "InvalidBatch",
    "slot -1": "InvalidBatch",
    "slot 10,000": "InvalidBatch",
    "pos -1": "InvalidBatch",
    "half a row": "InvalidBatch",
    "positions": "InvalidBatch",
    "all cells": "NoKVSpace",
    "a sample": "BadMedia",
    "no pixel": "BadMedia",
    "a long image": "BadMedia",
    "sound": "Unsupported",
    "read sound": "Unsupported",
    "a cut PNG": "BadMedia",
    "a cut JPEG": "BadMedia",
    "an animation": WORKS,
    "text": "BadMedia",
    "a film": "BadMedia",
    "PNG": WORKS,
    "JPEG": WORKS,
    "GIF": WORKS,
    "BMP": WORKS,
    "WEBP": WORKS,
    "16 bits": WORKS,
    "CMYK": WORKS,
    "one pixel": WORKS,
    "pixels": WORKS,
    "closed": "ClosedError",
}


@pytest.mark.usefixtures("media_library")
def test_calls_that_would_end_the_process():
    """
    Rows beyond a micro-batch, uploads that no decoder takes, and the like: typed errors.
    """
    done = run_python(CODE, *tiny_projector("gemma3"))

    assert done.returncode == 0, done.stderr[-2000:]
    found = dict(line.split("|") for line in done.stdout.splitlines())
    assert found == EXPECTED


MEMORY = """
import resource, sys
from pathlib import Path
from pyllama_raw.errors import PyllamaError
from pyllama_raw.native.projector import Bitmap
from pyllama_raw.native.model import Model
from pyllama_raw.native.projector import Projector
from tests.native.media_support import rows_of

def limit(n_more):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = resource.RLIM_INFINITY if n_more is None else used + n_more
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))

def told(call):
    try:
        print(call())
    except PyllamaError as error:
        print(type(error).__name__, flush=True)

model = Model.load(sys.argv[2], n_gpu_layers=0)
projector = Projector.load(sys.argv[1], model, use_gpu=False, max_tokens=2**14)
small = projector.cut(Bitmap.image(100, 60, bytes(18000)))
large = projector.cut(Bitmap.image(4200, 3000, bytes(37_800_000)))
before = rows_of(projector, small)
limit(2**23)
for cut in (large, large, small):
    told(lambda: rows_of(projector, cut) == before)
limit(2**24)
told(lambda: Projector.load(sys.argv[1], model, use_gpu=False))
limit(None)
told(lambda: rows_of(projector, small) == before)
"""


@pytest.mark.usefixtures("media_library")
def test_an_encode_without_memory_fails_alone():
    """
    ggml would write to the buffers that it did not get, with the next encode.
    """
    done = run_python(MEMORY, *tiny_projector("qwen2vl"))

    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [
        "EncodeFailed",
        "EncodeFailed",
        "True",
        "ProjectorLoadFailed",
        "True",
    ]


def test_weights_that_memory_does_not_hold_are_refused(tmp_path):
    """
    mtmd copies weights to memory, and the system ends a process that has too many.
    """
    source, model_path = tiny_projector("llava")
    file = read(source)
    table = next(t for t in file.tensors if t.name == b"v.position_embd.weight")
    file.tensors = [t for t in file.tensors if t is not table] + [table]
    table.dims[1] = 2**35
    path = tmp_path / "large.gguf"
    path.write_bytes(file.encode())
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size + 4 * table.dims[0] * table.dims[1])

    with Model.load(model_path) as model:
        with pytest.raises(ProjectorLoadFailed, match="weights have 4096"):
            Projector.load(path, model, use_gpu=False)


SIZES = """
import sys
from pyllama_raw.errors import PyllamaError
from pyllama_raw.native.projector import Bitmap
from pyllama_raw.native.model import Model
from pyllama_raw.native.projector import Projector
from tests.native.media_support import rows_of

model = Model.load(sys.argv[2], n_gpu_layers=0)
projector = Projector.load(sys.argv[1], model, use_gpu=False)
for n_x, n_y in (1, 1), (2, 3), (27, 29), (1, 300), (300, 1), (41, 2000), (500, 357):
    try:
        with projector.cut(Bitmap.image(n_x, n_y, bytes(3 * n_x * n_y))) as cut:
            rows = rows_of(projector, cut)
            assert sum(map(len, rows.values())) > 0
    except PyllamaError as error:
        print(n_x, n_y, type(error).__name__, flush=True)
print("alive")
"""


@pytest.mark.usefixtures("media_library")
@pytest.mark.parametrize("name", [n for n, p in PROJECTORS.items() if p.size])
def test_images_of_any_shape_are_encoded(name):
    """
    Graphs assert squares and multiples of patches: what the projector cuts has them, or it
    refuses a shape.
    """
    refused = ["1 300 BadMedia", "300 1 BadMedia"] if name == "idefics3" else []

    done = run_python(SIZES, *tiny_projector(name))

    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [*refused, "alive"]
