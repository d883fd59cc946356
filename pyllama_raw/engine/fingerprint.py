"""A name for all that must be equal for a state to be of use in another process."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from pyllama_raw.engine.state_file import MAGIC
from pyllama_raw.native.libllama import llama_version

HEAD_BYTES = 2**20  # of the model file; all metadata of most models
WITHOUT_EFFECT = {"n_threads", "n_threads_batch", "n_batch", "n_ubatch", "fast_kernels"}


def fingerprint(
    path: Path, model_fields: Mapping[str, object], context_fields: Mapping[str, object]
) -> str:
    """
    32 hexadecimal digits for the model at *path*, loaded and used with these fields.

    A file that was changed in place, moved or touched counts as another model.
    """
    status = path.stat()
    with path.open("rb") as stream:
        head = sha256(stream.read(HEAD_BYTES)).hexdigest()
    used = {k: v for k, v in context_fields.items() if k not in WITHOUT_EFFECT}
    facts = [
        [MAGIC.decode(), llama_version(), sys.byteorder],
        [str(path.resolve()), status.st_size, status.st_mtime_ns, head],
        dict(model_fields),
        used,
    ]
    return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
