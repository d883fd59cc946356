"""
The bytes of a file that holds the state of one slot.

A block of HEADER_BYTES, the token ids as C ints, the state. The block is MAGIC, the
digest of its rest, and JSON with the sizes and digests of what follows: so the digest of
the block stands for the whole file, and no byte can change unseen. Byte order is that of
the machine, and part of the fingerprint.

Anybody can make a digest that fits. So what the block says is checked as well, before
memory is taken for it: the file has exactly the size that follows from it.
"""

from __future__ import annotations

import json
import os
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from io import BufferedReader
from pathlib import Path

from pyllama_raw.core.namespace import Adapted
from pyllama_raw.native.arrays import new_bytes

HEADER_BYTES = 4096
TOKEN_BYTES = array("i").itemsize
MAX_TOKENS = 2**24  # more than the context of any model
MAGIC = b"PLRSTAT2"  # the last character is the version of this layout
BODY_AT = len(MAGIC) + sha256().digest_size

SLICE_BYTES = 2**18

State = memoryview
Rest = Callable[[float], None]


def no_rest(_worked_s: float) -> None:
    """Work on at once."""


def slices(state: State, rest: Rest) -> Iterator[State]:
    """
    Parts of *state*, to be worked on one by one, for half a millisecond or so each.

    Args:
        rest: called after each, with the seconds that a CPU worked for it.
    """
    for start in range(0, len(state), SLICE_BYTES):
        worked_s = time.thread_time()
        yield state[start : start + SLICE_BYTES]
        rest(time.thread_time() - worked_s)


class BadFile(Exception):
    """The file is not what it should be; never leaves the engine."""


@dataclass(frozen=True, slots=True)
class Header:
    """What the block says."""

    fingerprint: str  # of the model file and the context
    namespace: str | Adapted | None
    n_tokens: int
    state_bytes: int
    tokens_digest: str
    state_digest: str

    @property
    def file_bytes(self) -> int:
        return HEADER_BYTES + TOKEN_BYTES * self.n_tokens + self.state_bytes

    def block(self) -> bytes:
        """Raises BadFile if it does not fit, as with a very long namespace."""
        body = json.dumps(asdict(self)).encode().ljust(HEADER_BYTES - BODY_AT)
        if len(body) > HEADER_BYTES - BODY_AT:
            raise BadFile(f"a header of {len(body)} bytes")
        return MAGIC + sha256(body).digest() + body


# What JSON may hold for each field; a boolean is no int here.
_TYPES: dict[str, tuple[type, ...]] = {
    "fingerprint": (str,),
    "namespace": (str, list, type(None)),
    "n_tokens": (int,),
    "state_bytes": (int,),
    "tokens_digest": (str,),
    "state_digest": (str,),
}


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A complete file, as it was when it was written or indexed."""

    path: Path
    n_bytes: int
    digest: bytes  # of its header block


def make_header(
    fingerprint: str,
    namespace: str | Adapted | None,
    tokens: bytes,
    state: State,
    rest: Rest,
) -> Header:
    """Computes the digest of *state*, about a second for 1.5 GB without *rest*."""
    digest = sha256()
    for part in slices(state, rest):
        digest.update(part)
    return Header(
        fingerprint,
        namespace,
        len(tokens) // TOKEN_BYTES,
        state.nbytes,
        sha256(tokens).hexdigest(),
        digest.hexdigest(),
    )


def digest_of(block: bytes) -> bytes:
    """What stands for the file that begins with *block*."""
    return block[len(MAGIC) : BODY_AT]


def read_header(stream: BufferedReader, fingerprint: str) -> tuple[Header, bytes]:
    """
    The header and its digest; *stream* is at the tokens then.

    Raises:
        BadFile: it is damaged or forged, or belongs to another *fingerprint* or a file
            of another size.
    """
    block = stream.read(HEADER_BYTES)
    digest, body = digest_of(block), block[BODY_AT:]
    if not block.startswith(MAGIC) or sha256(body).digest() != digest:
        raise BadFile("a damaged header")
    header = _parsed(body)
    if header.fingerprint != fingerprint:
        raise BadFile("of another context")
    if header.file_bytes != os.fstat(stream.fileno()).st_size:
        raise BadFile("a wrong size")
    return header, digest


def _parsed(body: bytes) -> Header:
    try:
        facts = json.loads(body)
    except (ValueError, RecursionError) as error:  # RecursionError: [[[[...
        raise BadFile("a header that is no JSON") from error
    if not isinstance(facts, dict) or facts.keys() != _TYPES.keys():
        raise BadFile("a header of other fields")
    if not all(type(facts[name]) in types for name, types in _TYPES.items()):
        raise BadFile("a header of other types")
    header = Header(**facts | {"namespace": _namespace(facts["namespace"])})
    if not 1 <= header.n_tokens <= MAX_TOKENS or header.state_bytes < 0:
        raise BadFile("a header of other numbers")
    return header


def _namespace(value: str | list[object] | None) -> str | Adapted | None:
    """JSON has no tuples."""
    match value:
        case [str(digest), None | str() as salt]:
            return Adapted(digest, salt)
        case list():
            raise BadFile("a header of other types")
    return value


def read_tokens(stream: BufferedReader, header: Header) -> array[int]:
    """
    The token ids; *stream* is at the state then.

    Raises:
        BadFile: they are damaged.
    """
    data = stream.read(TOKEN_BYTES * header.n_tokens)
    if sha256(data).hexdigest() != header.tokens_digest:
        raise BadFile("damaged tokens")
    return array("i", data)


def read_state(stream: BufferedReader, header: Header, rest: Rest) -> State:
    """
    What follows the tokens, to the end of the file.

    Raises:
        BadFile: it is damaged.
    """
    state, digest = new_bytes(header.state_bytes), sha256()
    for part in slices(state, rest):
        if stream.readinto(part) != len(part):
            raise BadFile("a wrong size")
        digest.update(part)
    if stream.read(1):
        raise BadFile("a wrong size")
    if digest.hexdigest() != header.state_digest:
        raise BadFile("a damaged state")
    return state
