"""Headers of models, states of the cache, images and sounds."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from pyllama_raw.errors import (
    BadMedia,
    ConfigError,
    InvalidRequest,
    ModelLoadFailed,
    PyllamaError,
    SnapshotFailed,
)
from scripts.fuzz_targets.target import Target, Try


def _scratch() -> Path:
    """A folder in memory, which the process that tries the target leaves to its parent."""
    return Path(tempfile.mkdtemp(prefix="plrfuzz", dir=tempfile.gettempdir()))


def _gguf() -> Try:
    """The header of a model, an adapter or a projector."""
    from pyllama_raw.native.gguf import check_gguf
    from pyllama_raw.native.model import read_adapter
    from pyllama_raw.native.projector import check_projector
    from tests.support.tiny import tiny_model

    model, path = check_gguf(str(tiny_model("llama"))), _scratch() / "a.gguf"

    def attempt(data: bytes) -> None:
        path.write_bytes(data[1:])
        match data[:1]:
            case b"a":
                read_adapter(str(path), model)
            case b"p":
                check_projector(str(path), on_host=True)
            case _:
                check_gguf(str(path))

    return attempt


def _gguf_seeds() -> list[bytes]:
    from scripts.mutations.gguf_file import File, read
    from tests.support.tiny import tiny_adapter, tiny_model, tiny_projector

    def small(file: File) -> bytes:
        """Without most of a vocabulary and of the data, which the reader looks at last."""
        return file.encode()[:30_000]

    paths = {
        b"m": tiny_model("llama"),
        b"p": tiny_projector("qwen2vl")[0],
        b"a": tiny_adapter(_adapter()),
    }
    seeds = [kind + small(read(path)) for kind, path in paths.items()]
    return [*seeds, b"m" + b"GGUF\3\0\0\0" + bytes(16)]


def _adapter() -> str:
    from tests.support.tiny import ADAPTERS

    return next(iter(ADAPTERS))


def _index() -> Try:
    """The index of a cache directory with some states; the first byte says which file is changed."""
    from pyllama_raw.engine.disk_store import DiskStore
    from pyllama_raw.engine.state_files import SpanKeys, parts_of

    original = _store()
    files = sorted(original.iterdir())
    root = _scratch() / "store"

    def attempt(data: bytes) -> None:
        if data[:1] == b"p":
            parts_of(memoryview(data[1:]))
            return
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(original, root)
        name = files[0].name if data[:1] == b"s" else "plrstates.sqlite"
        (root / name).write_bytes(data[1:])
        store = DiskStore(root, "model", 2**20, wait_s=0.0)
        keys = SpanKeys()
        for entry in store.scan(keys):
            store.read(entry.payload)  # type: ignore[arg-type]
        store.write(None, bytes(64), memoryview(bytes(100)))
        store.scan(keys)
        store.close()

    return attempt


def _store() -> Path:
    """A directory that holds three states."""
    from array import array

    from pyllama_raw.engine.disk_store import DiskStore

    folder = _scratch() / "original"
    store = DiskStore(folder, "model", 2**20)
    for number in range(3):
        tokens = array("i", range(number, number + 16)).tobytes()
        store.write("tenant" if number else None, tokens, memoryview(bytes(100)))
    store.close()
    return folder


def _index_seeds() -> list[bytes]:
    from pyllama_raw.engine.state_files import make_head

    folder = _store()
    states = sorted(folder.glob("*.plrstate"))
    parts = make_head([(3, 128), (4, 20)]) + b"abcdefg"
    return [
        b"i" + (folder / "plrstates.sqlite").read_bytes(),
        b"s" + states[0].read_bytes(),
        b"p" + parts,
    ]


def _images() -> Try:
    from pyllama_raw.media import Image, MediaLimits

    limits = MediaLimits(max_parts=1, max_bytes=2**25, max_pixels=2**22, max_seconds=60)

    def attempt(data: bytes) -> None:
        image = Image(data)
        limits.check([image])
        assert len(image.pixels()) == 3 * image.width * image.height

    return attempt


def _sounds() -> Try:
    from pyllama_raw.media import Audio, MediaLimits

    limits = MediaLimits(max_parts=1, max_bytes=2**25, max_pixels=2**22, max_seconds=60)

    def attempt(data: bytes) -> None:
        sound = Audio(data)
        limits.check([sound])
        assert len(sound.samples(16000)) == sound.n_samples(16000)

    return attempt


def _image_seeds() -> list[bytes]:
    from tests.media import files

    return [
        files.image_file("PNG", 8, 6),
        files.image_file("PNG", 8, 6, mode="1"),
        files.deep_png(6, 6),
        files.image_file("PNG", 8, 6, mode="P"),
        files.image_file("JPEG", 8, 6),
        files.image_file("JPEG", 16, 16, progressive=True),
        files.image_file("JPEG", 8, 6, mode="CMYK"),
        files.image_file("GIF", 8, 6),
        files.image_file("BMP", 8, 6),
        files.image_file("BMP", 8, 6, mode="P"),
        files.image_file("WEBP", 8, 6),
        files.moving("GIF"),
    ]


def _sound_seeds() -> list[bytes]:
    from tests.media import files

    wav = files.wav_file(200, n_channels=2)
    kinds = [files.sound_file(kind, 2000) for kind in ("FLAC", "MP3", "OGG")]
    forms = [
        files.sound_file("WAV", 200, subtype=form)
        for form in ("FLOAT", "PCM_24", "ULAW", "IMA_ADPCM")
    ]
    return [wav, *kinds, *forms]


IMAGE_WORDS = (b"IHDR", b"IDAT", b"PLTE", b"tRNS", b"IEND", b"eXIf", b"\xff\xd8", b"\xff\xda", b"\xff\xc2", b"\xff\xe1", b"Exif\0\0", b"II*\0", b"GIF89a", b"BM", b"RIFF", b"WEBPVP8X", b"ANMF", b"\xff\xff\xff\xff", b"\0\0\0\0")  # fmt: skip
SOUND_WORDS = (b"RIFF", b"WAVE", b"fmt ", b"data", b"LIST", b"fact", b"RF64", b"ds64", b"fLaC", b"OggS", b"vorbis", b"OpusHead", b"ID3", b"TAG", b"\xff\xfb", b"\xff\xff\xff\xff", b"\0\0\0\0")  # fmt: skip

TARGETS = (
    Target("gguf", _gguf, _gguf_seeds, (ModelLoadFailed, PyllamaError), words=(b"general.alignment", b"general.architecture", b"llama.block_count", b"split.count", b"\xff" * 8, b"\0" * 8, b"\1\0\0\0"), max_bytes=2**15),
    Target("index", _index, _index_seeds, (ConfigError, SnapshotFailed), words=(b"CREATE TABLE ", b"states", b"\0" * 8, b"\xff" * 4), max_bytes=2**15),
    Target("images", _images, _image_seeds, (BadMedia, InvalidRequest), words=IMAGE_WORDS, max_bytes=2**14),
    Target("sounds", _sounds, _sound_seeds, (BadMedia, InvalidRequest), words=SOUND_WORDS, max_bytes=2**14),
)  # fmt: skip
