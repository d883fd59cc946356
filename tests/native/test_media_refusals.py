"""
Every call on media that mtmd or libllama would end the process on is refused first.

All run in a process of their own, which must end well.
"""

import pytest

from tests.native.support import run_python
from tests.tiny import tiny_projector

pytestmark = pytest.mark.native

CODE = """
import sys
from array import array
from pyllama_raw.engine.media import MediaReader
from pyllama_raw.errors import PyllamaError
from pyllama_raw.media import Audio, Image
from pyllama_raw.native.bitmap import Bitmap
from pyllama_raw.native.context import Context
from pyllama_raw.native.model import Model
from pyllama_raw.native.projector import Projector
from pyllama_raw.native.row_batch import RowBatch
from tests.media import files

def guard(name, call):
    try:
        call()
    except PyllamaError as error:
        print(name, type(error).__name__, sep="|", flush=True)
    else:
        print(name, "nothing was refused", sep="|", flush=True)

def rows(n_rows, *, n_sections=1, slot=0, pos=0, n_embd=64):
    batch = RowBatch(n_embd, n_sections)
    places = array("i", [pos + i for i in range(n_rows)] * n_sections)
    batch.add(array("f", bytes(4 * n_rows * n_embd)), places, slot)
    return batch

model = Model.load(sys.argv[2], n_gpu_layers=0)
projector = Projector.load(sys.argv[1], model, use_gpu=False)
reader = MediaReader(projector, b"")
context = Context(model, n_seq_max=2, n_ctx=512, n_batch=128, n_ubatch=64)

guard("rows of n_ubatch", lambda: rows(64).decode(context, is_causal=False))
guard("more than n_ubatch", lambda: rows(65, pos=64).decode(context, is_causal=False))
guard("more than n_batch", lambda: rows(129, pos=64).decode(context, is_causal=True))
guard("no rows", lambda: RowBatch(64, 1).decode(context, is_causal=True))
guard("unknown slot", lambda: rows(1, slot=2).decode(context, is_causal=True))
guard("slot -1", lambda: rows(1, slot=-1))
guard("slot 10,000", lambda: rows(1, slot=10_000))
guard("pos -1", lambda: rows(1, pos=-1).decode(context, is_causal=True))
guard("half a row", lambda: RowBatch(64, 1).add(array("f", bytes(4)), array("i"), 0))
guard("positions", lambda: RowBatch(64, 4).add(array("f", bytes(256)), array("i", [0]), 0))
guard("all cells", lambda: [
    rows(128, slot=1, pos=128 * i).decode(context, is_causal=True) for i in range(5)
])
guard("a sample", lambda: Bitmap.sound(1))
guard("no pixel", lambda: Bitmap.image(0, 0))
guard("a long image", lambda: Bitmap.image(100_000, 1))
guard("sound", lambda: reader.layout(Audio(files.wav_file())))
guard("read sound", lambda: reader.read(Audio(files.wav_file())))
guard("a cut PNG", lambda: reader.read(Image(files.image_file("PNG")[:-40])))
guard("a cut JPEG", lambda: reader.read(Image(files.image_file("JPEG")[:-40])))
guard("an animation", lambda: reader.read(Image(files.moving("GIF"))))
guard("text", lambda: Bitmap.read(projector, b"hello, world" * 9))
guard("nothing", lambda: Bitmap.read(projector, b""))
guard("a film", lambda: Bitmap.read(projector, b"\\0\\0\\0\\x20ftypisom" + bytes(400)))
guard("WebP", lambda: Bitmap.read(projector, b"RIFF\\x20\\0\\0\\0WEBPVP8 " + bytes(99)))
guard("damaged PNG", lambda: Bitmap.read(projector, b"\\x89PNG\\r\\n\\x1a\\n" + bytes(99)))
for kind in ("PNG", "JPEG", "GIF", "BMP"):
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
    "an animation": "BadMedia",
    "text": "BadMedia",
    "nothing": "BadMedia",
    "a film": "BadMedia",
    "WebP": "BadMedia",
    "damaged PNG": "BadMedia",
    "PNG": WORKS,
    "JPEG": WORKS,
    "GIF": WORKS,
    "BMP": WORKS,
    "16 bits": WORKS,
    "CMYK": WORKS,
    "one pixel": WORKS,
    "pixels": WORKS,
    "closed": "ClosedError",
}


def test_calls_that_would_end_the_process():
    """
    Rows beyond a micro-batch, uploads that no decoder takes, and the like: typed errors.
    """
    done = run_python(CODE, *tiny_projector("gemma3"))

    assert done.returncode == 0, done.stderr[-2000:]
    found = dict(line.split("|") for line in done.stdout.splitlines())
    assert found == EXPECTED
