"""
Try projectors on images and sounds with faults in them.

    python -m scripts.mutate_media --seed 0 --count 10000
    python -m scripts.mutate_media --seed 0 --only 17 --keep fault.png

Each upload is a small file with some random faults, decoded and encoded in a process of its
own. It must work or be refused by an error of pyllama_raw: a signal, a hang or another
exception is a defect, and makes the exit status 1.
"""

from __future__ import annotations

import random
import zlib
from pathlib import Path

from pyllama_raw.engine.media_desk import MediaReader
from pyllama_raw.media import Audio, Image, MediaLimits
from pyllama_raw.native.projector import Projector, RowRun
from scripts.mutations.command import Files, search
from scripts.mutations.edits import EDITS
from scripts.mutations.trial import prepare, text_model
from tests.media import files
from tests.support.tiny import tiny_projector

EYES, EARS = ("idefics3", "qwen2vl"), ("ultravox",)
LIMITS = MediaLimits(max_parts=1, max_bytes=2**25, max_pixels=2**22, max_seconds=60)


def main() -> None:
    prepare()
    for name in (*EYES, *EARS):
        text_model(tiny_projector(name)[1])
    search(__doc__, uploads, attempt)


def attempt(path: Path) -> str:
    """Decode the upload at *path*; each 16th is encoded, too."""
    content = path.read_bytes()
    is_sound = content.startswith((b"fLaC", b"OggS", b"ID3")) or (
        content[:1] == b"\xff" and content[1:2] != b"\xd8"
    )
    if content.startswith(b"RIFF"):
        is_sound = content[8:12] != b"WEBP"
    part = (Audio if is_sound else Image)(content)
    LIMITS.check([part])
    for name in EARS if is_sound else EYES:
        file, model = tiny_projector(name)
        projector = Projector.load(file, text_model(model), use_gpu=False)
        reader = MediaReader(projector, name.encode())
        try_reader(projector, reader, part, encodes=int(path.stem) % 16 == 0)
    return str(part)


def try_reader(
    projector: Projector, reader: MediaReader, part: Image | Audio, *, encodes: bool
) -> None:
    """Decode *part*; cut it if that is short, or if its rows are wanted."""
    with reader.decode(part) as bitmap:
        if isinstance(part, Audio) and not encodes:
            return
        layout = reader.layout(part)
        with projector.cut(bitmap) as cut:
            assert isinstance(part, Audio) or layout.runs == cut.runs
            for index, run in enumerate(cut.runs):
                if isinstance(run, RowRun) and encodes:
                    projector.encode(cut, index)


def uploads(seed: int, first: int, count: int) -> Files:
    """Number, content and faults of *count* files."""
    originals = {
        "png": files.image_file("PNG"),
        "png 1": files.image_file("PNG", mode="1"),
        "png 16": files.deep_png(),
        "png palette": files.image_file("PNG", mode="P"),
        "jpeg": files.image_file("JPEG"),
        "jpeg progressive": files.image_file("JPEG", progressive=True),
        "jpeg CMYK": files.image_file("JPEG", mode="CMYK"),
        "gif": files.image_file("GIF"),
        "bmp": files.image_file("BMP"),
        "bmp palette": files.image_file("BMP", mode="P"),
        "wav": files.wav_file(4000, n_channels=2),
        "webp": files.image_file("WEBP"),
        "flac": files.sound_file("FLAC", 9000),
        "mp3": files.sound_file("MP3", 9000),
        "ogg": files.sound_file("OGG", 9000),
    }
    for index in range(first, first + count):
        rng = random.Random(f"{seed}/{index}")  # noqa: S311 -- repeats
        name = rng.choice(list(originals))
        content = bytearray(originals[name])
        if name == "png" and rng.random() < 0.5:
            content, edits = packed_png(rng), ["packed"]
        else:
            edits = []
            for _ in range(rng.choice((1, 1, 2, 4))):
                edit = rng.choice(EDITS)
                edit(rng, content)
                edits.append(edit.__name__)
        yield index, bytes(content), f"{name}: {', '.join(edits)}"


def packed_png(rng: random.Random) -> bytearray:
    """A PNG that is packed well, with any header and any content."""
    width, height = rng.randrange(1, 40), rng.randrange(1, 40)
    depth, colour = rng.choice((1, 2, 4, 8, 16)), rng.choice((0, 2, 3, 4, 6))
    order = rng.randrange(2)
    n_channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    n_bytes = height * (1 + -(-width * depth * n_channels // 8))
    if order:
        n_bytes += rng.randrange(4 * height)
    data = zlib.compress(rng.randbytes(n_bytes))
    palette = rng.randbytes(3 * rng.randrange(1, 257))
    chunks = [(b"PLTE", palette), (b"tRNS", rng.randbytes(6))][: rng.randrange(3)]
    return bytearray(
        files.png_of(
            width, height, data, *chunks, depth=depth, colour=colour, order=order
        )
    )


if __name__ == "__main__":
    main()
