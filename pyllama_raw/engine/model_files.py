"""
The files of a model, how a change of one is noticed, and the name of what they compute.

The name stands for all that must be equal for a state to be of use in another process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from pyllama_raw.engine.state_file import LAYOUT
from pyllama_raw.native.gguf_header import split_names
from pyllama_raw.native.kernels import table
from pyllama_raw.native.libllama import library_digest, state_version, system_info

MAX_HEAD_BYTES = 2**23  # read of the metadata of a model; most have less
MAX_PART_BYTES = 2**20  # of a further file: a list of its tensors
N_BLOCKS = 512  # read of the tensors of a model, all its files together
MIN_BLOCKS = 8  # of each file
BLOCK_BYTES = 4096
WITHOUT_EFFECT = {"n_threads", "n_threads_batch", "n_batch", "n_ubatch"}


class ModelFile(NamedTuple):
    """
    A file as the file system knows it.

    Copying another file over it, or to its place, changes the times or the inode. So do
    a copy of all files from a backup, a new owner and another name: too often rather than
    too seldom, because a wrong state is worse than a cold cache.
    """

    path: str
    n_bytes: int
    inode: int
    mtime_ns: int
    ctime_ns: int


def model_files(path: Path) -> tuple[ModelFile, ...]:
    """The file at *path*, or all parts of a split model; () if it cannot be found."""
    try:  # libllama, too, finds the other parts by their names
        parts = list(takewhile(Path.exists, map(Path, split_names(str(path)))))
        return tuple(map(_look_at, parts if path in parts else [path]))
    except (OSError, ValueError):  # NUL in the path: whoever loads it says so
        return ()


def _look_at(path: Path) -> ModelFile:
    status = path.stat()
    return ModelFile(
        str(path.resolve()),
        status.st_size,
        status.st_ino,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )


def fingerprint(
    files: Sequence[ModelFile],
    tensor_bytes: int,
    model_fields: Mapping[str, object],
    context_fields: Mapping[str, object],
) -> str:
    """
    32 hexadecimal digits for the model in *files*, loaded and used with these fields, here.

    A file that was changed in place, moved or touched counts as another model. File
    systems exist that keep neither inodes nor times, so samples of the contents count,
    too: all metadata, and blocks at equal distances in the tensors. The layout of a state is
    libllama's, whose files therefore count. Last bits depend on the instructions that the
    library and our kernels use, so these count as well.

    Args:
        tensor_bytes: of all files; what else is in them is metadata.

    Raises:
        OSError: a file cannot be read.
    """
    # Tensors are at the end of a file, so no more than this comes before them.
    n_head = max(sum(file.n_bytes for file in files) - tensor_bytes, BLOCK_BYTES)
    # A split model repeats little of its metadata, so less is read of the other parts.
    heads = [
        min(n_head, MAX_HEAD_BYTES if i == 0 else MAX_PART_BYTES)
        for i in range(len(files))
    ]
    n_blocks = max(N_BLOCKS // len(files), MIN_BLOCKS)
    # Threads and sizes of batches change no state.
    used = {k: v for k, v in context_fields.items() if k not in WITHOUT_EFFECT}
    # The layout of a state, the kernels that computed it, the model, and how it is used.
    facts = [
        [LAYOUT, state_version(), library_digest()],
        [sys.byteorder, system_info(), table()],
        [[*f, _sample(f, n, n_blocks)] for f, n in zip(files, heads, strict=True)],
        dict(model_fields),
        used,
    ]
    return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _sample(file: ModelFile, n_head: int, n_blocks: int) -> str:
    """The digest of the first *n_head* bytes and of blocks that are spread over the rest."""
    n_between = max(file.n_bytes - n_head - BLOCK_BYTES, 0)
    with Path(file.path).open("rb", buffering=0) as stream:
        digest = sha256(stream.read(n_head))
        # At equal distances, the last block included.
        for i in range(n_blocks):
            at = n_head + n_between * i // (n_blocks - 1)
            digest.update(os.pread(stream.fileno(), BLOCK_BYTES, at))
    return digest.hexdigest()
