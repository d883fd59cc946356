"""
The bytes of a file that holds the state of one slot: the token ids as C ints, the state.

What the state is of, its key, and a digest of both stand in the index. The key is made of
the tokens that were found, so a state is only ever given for what it was written for.

Memory of which a range can be saved has a state in parts of some tokens, so that it is loaded
a part at a time: a load keeps the running streams waiting, and a long state takes longer than a
step may.

    count, then bytes and tokens of each part, then the parts
"""

from __future__ import annotations

import json
import os
import struct
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from io import FileIO
from pathlib import Path

from pyllama_raw.core.namespace import Adapted
from pyllama_raw.errors import SnapshotFailed
from pyllama_raw.native.pointers import new_bytes

LAYOUT = 0x504C5203  # "PLR"; the last byte is the version of files and index
ENTRY_BYTES = 4096  # a file counts as so many more, for its row in the index
INDEX_BYTES = 2**16  # of an index of few rows, and of its journal
TOKEN_BYTES = array("i").itemsize
SLICE_BYTES = 2**18
PART_TOKENS = 128
_COUNT, _ENTRY = struct.Struct("<I"), struct.Struct("<QI")
_SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

State = memoryview
Pause = Callable[[float], None]


def no_pause(_worked_s: float) -> None:
    """Work on at once."""


def slices(state: State, pause: Pause) -> Iterator[State]:
    """
    Parts of *state*, to be worked on one by one, for half a millisecond or so each.

    Args:
        pause: called after each, with the seconds that a CPU worked for it.
    """
    for start in range(0, len(state), SLICE_BYTES):
        worked_s = time.thread_time()
        yield state[start : start + SLICE_BYTES]
        pause(time.thread_time() - worked_s)


class BadFile(Exception):
    """The file is not what it should be; never leaves the engine."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A complete file, as it was when it was written or found."""

    path: Path
    state_at: int  # behind the tokens
    n_bytes: int
    key: bytes
    digest: bytes  # of key and state

    @property
    def counted_bytes(self) -> int:
        """Bytes that it takes of the limit."""
        return self.n_bytes + ENTRY_BYTES


def make_key(fingerprint: str, namespace: str | Adapted | None, tokens: bytes) -> bytes:
    """Key of what a state is of."""
    facts = [fingerprint, namespace, sha256(tokens).hexdigest()]
    return json.dumps(facts).encode()


def namespace_of(label: bytes) -> str | Adapted | None:
    """Namespace that json.dumps() made *label* of; JSON has no tuples. Raises ValueError."""
    match json.loads(label):
        # Prefixes that were computed with adapters.
        case [str(digest), None | str() as salt]:
            return Adapted(digest, salt)
        # Those without, of a salt or of nobody.
        case None | str() as salt:
            return salt
    raise ValueError("no namespace")


def digest_of(key: bytes, state: State, pause: Pause) -> bytes:
    """Takes about a second for 1.5 GB without *pause*."""
    digest = sha256(key)
    for part in slices(state, pause):
        digest.update(part)
    return digest.digest()


def write_file(path: Path, tokens: bytes, state: State, pause: Pause) -> None:
    """
    Write a new file that only its owner may read, and sync it.

    Raises:
        OSError: no file is left.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFELY
    try:
        with os.fdopen(os.open(path, flags, 0o600), "wb") as stream:
            # Tokens first, so that a look at them reads no state.
            stream.write(tokens)
            for data in slices(state, pause):
                stream.write(data)
            stream.flush()
            # Only then is the row written that makes the file count.
            os.fsync(stream.fileno())
    except OSError:
        path.unlink(missing_ok=True)
        raise


def read_state(file: StoredFile, pause: Pause) -> State:
    """
    Read what follows the tokens, to the end of *file*.

    Raises:
        BadFile: it is not what was written.
    """
    with opened(file.path, file.n_bytes) as stream:
        stream.seek(file.state_at)
        state, digest = new_bytes(file.n_bytes - file.state_at), sha256(file.key)
        for part in slices(state, pause):
            # Somebody has cut it off since it was opened.
            if stream.readinto(part) != len(part):
                raise BadFile("a wrong size")
            digest.update(part)
    if digest.digest() != file.digest:
        raise BadFile("a damaged state")
    return state


def opened(path: Path, n_bytes: int) -> FileIO:
    """
    The file at *path*; a pipe is not waited for, and no link is followed.

    Raises:
        BadFile: it has not *n_bytes*.
    """
    stream = FileIO(os.open(path, os.O_RDONLY | _SAFELY))
    if os.fstat(stream.fileno()).st_size != n_bytes:
        stream.close()
        raise BadFile("a wrong size")
    return stream


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class FileState:
    """A state that was read from a file."""

    data: State

    @property
    def nbytes(self) -> int:
        """Host memory that it takes."""
        return self.data.nbytes


def head_bytes(n_parts: int) -> int:
    """Bytes in front of the parts."""
    return _COUNT.size + n_parts * _ENTRY.size


def n_parts_of(n_tokens: int) -> int:
    """Parts of a state of *n_tokens*."""
    return -(-n_tokens // PART_TOKENS)


def make_head(sizes: Sequence[tuple[int, int]]) -> bytes:
    """Head of a file with parts of so many bytes and tokens each."""
    return _COUNT.pack(len(sizes)) + b"".join(_ENTRY.pack(*size) for size in sizes)


def parts_of(data: State) -> list[tuple[int, int, State]]:
    """
    The parts of *data*, which anybody may have written: start and stop of positions, and their
    state, which is empty if no row has these.

    Raises:
        SnapshotFailed: it is no state in parts.
    """
    try:
        (count,) = _COUNT.unpack_from(data)
        # The count may be anything, so slices are checked by what is there.
        at = head_bytes(count)
        sizes = list(_ENTRY.iter_unpack(data[_COUNT.size : at]))
    except struct.error as error:
        raise SnapshotFailed("parts_of", 0, str(error)) from error
    parts: list[tuple[int, int, State]] = []
    n_tokens = 0
    for n_bytes, n_more in sizes:
        parts.append((n_tokens, n_tokens + n_more, data[at : at + n_bytes]))
        at, n_tokens = at + n_bytes, n_tokens + n_more
    # Parts fill the file exactly.
    if at != len(data) or len(parts) != count:
        raise SnapshotFailed("parts_of", 0, "a state of another size")
    return parts
