"""
Whatever a directory holds: opening ends, and what is restored is what was written.

PYLLAMA_RAW_DIRECTORIES is the number of directories that are drawn.
"""

import json
import os
import tempfile
import warnings
from functools import cache
from hashlib import sha256
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from pyllama_raw.engine.disk_store import DiskStore
from pyllama_raw.engine.span_keys import SpanKeys
from pyllama_raw.engine.state_file import BODY_AT, HEADER_BYTES, MAGIC
from tests.engine.hostile import STRANGERS, seen, within_bound
from tests.engine.test_disk_store import put, state_of, tokens_of

N_DIRECTORIES = int(os.environ.get("PYLLAMA_RAW_DIRECTORIES", "100"))
LIMIT = 10**6
FOLDERS = {"model", "other"}

NAMES = st.builds(
    "{}/{}{}".format,
    st.sampled_from(["model", "model", "other"]),
    st.integers(0, 15).map("{:032x}".format),
    st.sampled_from([".plrstate", ".plrpart", ".txt"]),
)
PLACES = st.one_of(NAMES, st.sampled_from([".plrlock", "model", "other", "x"]))
FIELDS = [
    "fingerprint",
    "namespace",
    "n_tokens",
    "state_bytes",
    "tokens_digest",
    "more",
]
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=20),
    st.lists(st.integers(), max_size=2),
    st.sampled_from([4, 5, 6, 996, 1000, 1004, sha256(tokens_of(1)).hexdigest()]),
)
# What is done to the bytes of a state that was really written.
CHANGES = st.one_of(
    st.tuples(st.just("flip"), st.floats(0, 1), st.integers(1, 255)),
    st.tuples(st.just("cut"), st.floats(0, 1)),
    st.tuples(st.just("grow"), st.binary(min_size=1, max_size=50)),
    st.tuples(st.just("splice"), st.floats(0, 1)),
    st.tuples(st.just("facts"), st.dictionaries(st.sampled_from(FIELDS), VALUES)),
    st.tuples(st.just("body"), st.binary(max_size=100)),
    st.tuples(st.just("none")),
)
THINGS = st.one_of(
    st.sampled_from(sorted(STRANGERS)),
    st.tuples(st.integers(1, 3), CHANGES),
)


def changed(data: bytes, other: bytes, change: tuple) -> bytes:
    """The bytes of a state after *change*; forged headers get a digest that fits."""
    match change:
        case "flip", where, bits:
            at = int(where * (len(data) - 1))
            data = data[:at] + bytes([data[at] ^ bits]) + data[at + 1 :]
        case "cut", where:
            data = data[: int(where * len(data))]
        case "grow", more:
            data += more
        case "splice", where:
            at = int(where * len(data))
            data = data[:at] + other[at:]
        case "facts", new:
            facts = json.loads(data[BODY_AT:HEADER_BYTES]) | new
            data = with_body(data, json.dumps(facts).encode())
        case "body", body:
            data = with_body(data, body)
    return data


def with_body(data: bytes, body: bytes) -> bytes:
    body = body.ljust(HEADER_BYTES - BODY_AT)[: HEADER_BYTES - BODY_AT]
    return MAGIC + sha256(body).digest() + body + data[HEADER_BYTES:]


@cache
def originals() -> dict[int, bytes]:
    """Bytes of states as a store writes them, by seed."""
    with tempfile.TemporaryDirectory() as name:
        store = DiskStore(Path(name), "model", LIMIT)
        return {seed: put(store, seed).path.read_bytes() for seed in (1, 2, 3)}


def fill(root: Path, things: dict[str, object]) -> list[Path]:
    """Put *things* where they can be put; the paths of those that are not ours."""
    states, strangers = originals(), []
    for folder in FOLDERS - things.keys():
        (root / folder).mkdir()
    for place, thing in sorted(things.items()):
        path = root / place
        if (
            not path.parent.is_dir()
            or path.parent.is_symlink()
            or os.path.lexists(path)
        ):
            continue
        if isinstance(thing, str):
            STRANGERS[thing](path)
            strangers.append(path)
        else:
            seed, change = thing
            path.write_bytes(changed(states[seed], states[seed % 3 + 1], change))
    return strangers


def use(root: Path) -> tuple[list[tuple[bytes, bytes | None]], bytes | None]:
    """What an engine does with a directory: open, find, read, write, and read that."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        store = DiskStore(root, "model", LIMIT, lock_wait_s=0)
    pairs = []
    for known in store.scan(SpanKeys()):
        state = store.read(known.payload)
        pairs.append((known.tokens.tobytes(), None if state is None else bytes(state)))
    file = store.write(None, tokens_of(9), state_of(9))
    state = None if file is None else store.read(file)
    return pairs, None if state is None else bytes(state)


@settings(max_examples=N_DIRECTORIES)
@given(st.dictionaries(PLACES, THINGS, max_size=12))
def test_no_directory_hangs_breaks_or_misleads(things):
    """
    States of tokens are those that were written of them; what is not ours stays.
    """
    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "a" / "b"
        root.mkdir(parents=True)
        before = {path: seen(path) for path in fill(root, things)}
        written = {tokens_of(seed): state_of(seed).tobytes() for seed in (1, 2, 3)}

        found, own = within_bound(lambda: use(root))

        assert [state or written[tokens] for tokens, state in found] == [
            written[tokens] for tokens, _ in found
        ]
        assert own in (state_of(9).tobytes(), None)
        assert {path: seen(path) for path in before} == before
