"""
Try projectors with faults in them on an image or a sound.

    python -m scripts.mutate_projector --seed 0 --count 5000
    python -m scripts.mutate_projector --seed 0 --only 17 --keep fault.gguf

Each file is a tiny projector with one or two random faults, loaded in a process of its own,
where two threads encode. It must work or be refused by an error of pyllama_raw: a signal, a
hang or another exception is a defect, and makes the exit status 1.
"""

from __future__ import annotations

import copy
import random
from pathlib import Path

from pyllama_raw.native.projector import Projector, RowRun
from scripts.mutations import metadata, tensors
from scripts.mutations.command import Files, search
from scripts.mutations.gguf_file import ARRAY, F32, STRING, U32, File, Value, read
from scripts.mutations.mutations import Mutation, mutate
from scripts.mutations.trial import prepare, text_model
from tests.native.media_support import sample
from tests.support.tiny import PROJECTORS, tiny_projector

NAMES = tuple(PROJECTORS)
# Keys that files may have beside those of the tiny projectors.
OPTIONAL = (
    "use_gelu use_silu has_vision_encoder has_audio_encoder minicpmv_version "
    "*.attention.head_count_kv *.attention.head_dim *.feature_layer "
    "*.projector.scale_factor *.projector.stack_factor *.projector.window_size "
    "vision.image_min_pixels vision.image_max_pixels vision.preproc_min_tiles "
    "vision.preproc_max_tiles vision.preproc_image_size vision.spatial_merge_size "
    "vision.mm_patch_merge_type vision.image_grid_pinpoints vision.n_wa_pattern "
    "vision.wa_layer_indexes vision.window_size audio.chunk_size"
)
TYPES = (
    "mlp ldp ldpv2 resampler adapter qwen2vl_merger qwen2.5vl_merger qwen3vl_merger "
    "gemma3 gemma3nv gemma4v phi4 idefics3 pixtral ultravox internvl llama4 qwen2a qwen3a "
    "glma qwen2.5o voxtral lfm2 kimivl lightonocr cogvlm janus_pro hunyuanvl x"
)


def main() -> None:
    prepare()
    for name in NAMES:
        text_model(tiny_projector(name)[1])
    search(__doc__, files, attempt)


def files(seed: int, first: int, count: int) -> Files:
    """Number, content and faults of *count* files."""
    originals = {name: read(tiny_projector(name)[0]) for name in NAMES}
    for index in range(first, first + count):
        rng = random.Random(f"{seed}/{index}")  # noqa: S311 -- repeats
        name = NAMES[index % len(NAMES)]
        content, changes = mutate(rng, copy.deepcopy(originals[name]), MUTATIONS)
        yield index, content, f"{name}: {changes}"


def attempt(path: Path) -> str:
    """Load the projector at *path*, and encode with it."""
    model = text_model(tiny_projector(NAMES[int(path.stem) % len(NAMES)])[1])
    projector = Projector.load(path, model, n_threads=2, use_gpu=False)
    with sample(projector) as bitmap, projector.cut(bitmap) as cut:
        for index in [i for i, r in enumerate(cut.runs) if isinstance(r, RowRun)][:8]:
            projector.encode(cut, index)
    return f"{sum(run.n_cells for run in cut.runs)} cells"


def add_key(rng: random.Random, file: File) -> str:
    """A key that other projectors have."""
    name = rng.choice(OPTIONAL.split()).replace("*", rng.choice(("vision", "audio")))
    key = f"clip.{name}".encode()
    kind = rng.choice((U32, U32, F32, 7, STRING, ARRAY))
    if kind == ARRAY:
        numbers = [
            metadata.random_scalar(rng, U32) for _ in range(rng.choice((0, 1, 2, 4)))
        ]
        file.values[key] = Value(ARRAY, numbers, U32)
    else:
        file.values[key] = Value(kind, metadata.random_scalar(rng, kind))
    return f"{key.decode()}: {str(file.values[key].data)[:60]} as {kind}"


def change_kind(rng: random.Random, file: File) -> str:
    """It says that it is another projector."""
    key, name = b"clip.projector_type", rng.choice(TYPES.split())
    file.values[key] = Value(STRING, name.encode())
    return name


MUTATIONS: tuple[tuple[Mutation, int], ...] = (
    (metadata.change_number, 30),
    (add_key, 14),
    (change_kind, 6),
    (metadata.remove_key, 5),
    (metadata.change_type, 5),
    (metadata.change_array, 4),
    (metadata.change_text, 2),
    (metadata.huge_array, 2),
    (metadata.change_header, 2),
    (tensors.retype, 14),
    (tensors.retype_all, 4),
    (tensors.reshape, 14),
    (tensors.move, 1),
    (tensors.rename, 3),
    (tensors.drop_tensor, 6),
    (tensors.fill_data, 4),
)


if __name__ == "__main__":
    main()
