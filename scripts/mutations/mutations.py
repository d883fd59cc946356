"""
What can be wrong with a model file, drawn at random.

A mutation changes a File in place, or the bytes of one, and says what it did.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from scripts.mutations import metadata, tensors
from scripts.mutations.gguf_file import File

Mutation = Callable[[random.Random, File], str]

MUTATIONS: tuple[tuple[Mutation, int], ...] = (
    (metadata.change_number, 20),
    (metadata.change_id, 5),
    (metadata.add_key, 14),
    (metadata.remove_key, 4),
    (metadata.change_type, 6),
    (metadata.change_array, 8),
    (metadata.change_tokens, 6),
    (metadata.change_name, 5),
    (metadata.change_text, 3),
    (metadata.huge_array, 2),
    (metadata.change_header, 3),
    (tensors.retype, 8),
    (tensors.retype_all, 3),
    (tensors.reshape, 6),
    (tensors.move, 2),
    (tensors.rename, 3),
    (tensors.drop_tensor, 3),
    (tensors.fill_data, 3),
)


def flip(rng: random.Random, raw: bytes, n_meta: int) -> tuple[bytes, str]:
    """Some bytes are others, most often of the metadata and the tensor table."""
    changed = bytearray(raw)
    end = n_meta if rng.random() < 0.9 else len(raw)
    places = sorted(rng.randrange(end) for _ in range(rng.choice((1, 1, 2, 4, 16))))
    for place in places:
        changed[place] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    return bytes(changed), f"flipped {places}"


def cut(rng: random.Random, raw: bytes, n_meta: int) -> tuple[bytes, str]:
    """The file ends early."""
    n_bytes = rng.randrange(rng.choice((n_meta, len(raw))))
    return raw[:n_bytes], f"cut to {n_bytes}"


def mutate(
    rng: random.Random,
    file: File,
    mutations: Sequence[tuple[Mutation, int]] = MUTATIONS,
) -> tuple[bytes, str]:
    """The bytes of *file*, which is changed, with one or two faults, and what they are."""
    n_data = sum(len(tensor.data) for tensor in file.tensors)
    how = rng.random()
    if how < 0.1:
        raw = file.encode()
        change = flip if how < 0.07 else cut
        return change(rng, raw, max(len(raw) - n_data, 1))
    changes = []
    for _ in range(2 if how > 0.85 else 1):
        kinds, shares = zip(*mutations, strict=True)
        mutation = rng.choices(kinds, shares)[0]
        changes.append(f"{mutation.__name__} {mutation(rng, file)}")
    return file.encode(), "; ".join(changes)
