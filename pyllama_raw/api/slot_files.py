"""
Files of slots: the state of one slot, in a file that somebody names.

The cache keeps what pays, where it likes (engine/state_files.py). Here a person says what is kept
and where it goes. Such a file has all in it: a line of JSON that says what it is of and has the
digest, then tokens and state.

Rules:
1. Moves are done at once, between two steps, by a plan without works, whose result is settled.
2. Only what others may take over is copied: text that a slot without a sequence holds.
3. A slot that is filled loses what it holds, which is saved as if its place was needed.
4. A file may be anybody's. It takes no more memory than a slot may hold, and is checked as a whole
   before the engine has any of it.
"""

from __future__ import annotations

import json
import os
import re
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from errno import EINVAL
from fcntl import LOCK_EX, LOCK_NB, flock
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from uuid import uuid4

from anyio import to_thread

from pyllama_raw.core.memory.memory import SLOT_SAVE
from pyllama_raw.core.memory.slots import Contents
from pyllama_raw.core.stats import SlotFile
from pyllama_raw.core.step import DecodeStatus, StepPlan, StepResult
from pyllama_raw.engine.info import EngineState, Operation
from pyllama_raw.engine.mailbox import check_may_wait
from pyllama_raw.engine.state_files import (
    TOKEN_BYTES,
    BadFile,
    State,
    digest_of,
    make_key,
    no_pause,
    open_safely,
    read_bytes,
    write_file,
)
from pyllama_raw.errors import InvalidRequest, SnapshotFailed, Unsupported, WrongUse
from pyllama_raw.options.arguments import checked_file, checked_number

if TYPE_CHECKING:
    from pyllama_raw.api.session import Sessions
    from pyllama_raw.core.scheduling.scheduler import Scheduler
    from pyllama_raw.core.step import Executor
    from pyllama_raw.engine.parts import EngineParts

MAGIC = b"pyllama_raw slot 1\n"
MAX_LINE = 2**12
PART = re.compile(r"\.[0-9a-f]{32}\.part")  # the name of one that is not whole
YOUNG_S = 60.0
ANOTHER = (
    "a file of a slot of this model, with these options and this library, that is whole"
)


async def save(sessions: Sessions, slot: int, path: str | Path) -> SlotFile:
    """See AsyncEngine.save_slot."""
    check_may_wait()
    began = sessions.current.thread.clock()
    file, number = checked_file("path", path), _checked_slot(sessions, slot)
    name = await _state_name(sessions)

    def copy(parts: EngineParts) -> tuple[Contents, State]:
        _check_awake(sessions)
        return copied(parts.scheduler, parts.executor, number)

    contents, state = await sessions.between_steps(copy)
    write = partial(write_slot, Path(file), name, contents, state)
    try:
        n_bytes = await to_thread.run_sync(write)
    except OSError as error:
        allowed = f"the path of a file that can be written ({error.strerror})"
        raise InvalidRequest("path", file, allowed) from error
    seconds = sessions.current.thread.clock() - began
    return SlotFile(number, len(contents.tokens), n_bytes, seconds)


async def restore(sessions: Sessions, slot: int, path: str | Path) -> SlotFile:
    """See AsyncEngine.restore_slot."""
    check_may_wait()
    began = sessions.current.thread.clock()
    file, number = checked_file("path", path), _checked_slot(sessions, slot)
    name = await _state_name(sessions)
    n_vocab = sessions.current.info.vocab.n_tokens
    limits = await sessions.between_steps(
        lambda parts: limits_of(parts.scheduler, n_vocab)
    )
    read = partial(read_slot, Path(file), name, number, limits)
    try:
        contents, state, n_bytes = await to_thread.run_sync(read)
    except (OSError, BadFile) as error:
        raise InvalidRequest("path", file, ANOTHER) from error

    def fill_slot(parts: EngineParts) -> None:
        _check_awake(sessions)
        fill(parts.scheduler, parts.executor, contents, state)

    await sessions.between_steps(fill_slot)
    seconds = sessions.current.thread.clock() - began
    return SlotFile(number, len(contents.tokens), n_bytes, seconds)


def _checked_slot(sessions: Sessions, slot: object) -> int:
    info = sessions.current.info
    sessions.current.capabilities.check(Operation.GENERATE)
    if info.config.cache.mode == "off":
        raise Unsupported("files of slots", "nothing is reused", "set cache.mode")
    _check_awake(sessions)
    return checked_number("slot", slot, 0, info.n_slots - 1)


def _check_awake(sessions: Sessions) -> None:
    if sessions.state is EngineState.SLEEPING:
        raise WrongUse("the engine sleeps, and holds nothing: wake() it before")


async def _state_name(sessions: Sessions) -> str:
    """The name of states of the model. Raises Unsupported."""
    async with sessions.session() as session:
        name = await to_thread.run_sync(session.parts.state_name)
    if name is None:
        reason = (
            "no file says what model this is, or it has changed since it was loaded"
        )
        raise Unsupported("files of slots", reason)
    return name


# -- bytes -------------------------------------------------------------------------------


def write_slot(path: Path, name: str, contents: Contents, state: State) -> int:
    """
    Write a state to the file at *path*, in place of what is there; the bytes of it.

    Args:
        name: of states of this model.

    Raises:
        OSError: what was there is there.
    """
    tokens = contents.tokens.tobytes()
    label, n_tokens = contents.namespace, len(contents.tokens)
    assert label is None or isinstance(label, str)
    digest = digest_of(make_key(name, label, tokens), state, no_pause).hex()
    facts = [name, label, n_tokens, contents.n_prompt, digest]
    head = MAGIC + json.dumps(facts).encode() + b"\n"
    # A rename would put a file in the place of a device, for all programs of the machine.
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(EINVAL, "what is there is no file")
    sweep_parts(path.parent)
    part = path.with_name(f".{uuid4().hex}.part")
    try:
        write_file(part, head + tokens, state, no_pause)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    return len(head) + len(tokens) + len(state)


def sweep_parts(folder: Path) -> None:
    """Remove what processes that were killed have left of files of slots."""
    names: list[str] = []
    with suppress(OSError):
        names = [name for name in os.listdir(folder) if PART.fullmatch(name)]  # noqa: PTH208
    for name in names:
        path = folder / name
        # A lock says that somebody writes it, and a young one has perhaps none yet.
        with suppress(OSError):
            if time.time() - path.lstat().st_mtime > YOUNG_S:
                with open_safely(path) as stream:
                    flock(stream, LOCK_EX | LOCK_NB)
                    path.unlink()


class SlotLimits(NamedTuple):
    """The most that a slot may hold, so that a file of any size takes no more memory than that."""

    n_vocab: int
    n_tokens: int
    bound: Callable[[int], int]  # no state of so many tokens is larger


def limits_of(scheduler: Scheduler, n_vocab: int) -> SlotLimits:
    """The limits of slots. Thread: the engine's."""
    bound = scheduler.memory.tiers.host.bound
    return SlotLimits(n_vocab, scheduler.limits.n_ctx_slot, bound)


def read_slot(
    path: Path, name: str, slot: int, limits: SlotLimits
) -> tuple[Contents, State, int]:
    """
    The contents of *slot* in the file at *path*, which anybody may have written, and its bytes.

    Raises:
        BadFile: it is another one, or damaged.
        OSError: it cannot be read.
    """
    with open_safely(path) as stream:
        n_bytes = os.fstat(stream.fileno()).st_size
        if stream.read(len(MAGIC)) != MAGIC:
            raise BadFile("another kind")
        line, newline, _ = (stream.read(MAX_LINE) or b"").partition(b"\n")
        try:
            own_name, label, n_tokens, n_prompt, digest = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            raise BadFile("no head") from None
        is_own = newline and own_name == name and (label is None or type(label) is str)
        if not is_own or type(n_tokens) is not int or type(n_prompt) is not int:
            raise BadFile("another model")
        at = len(MAGIC) + len(line) + 1
        n_state = n_bytes - at - n_tokens * TOKEN_BYTES
        if not 1 <= n_tokens <= limits.n_tokens or not 0 <= n_prompt <= n_tokens:
            raise BadFile("a wrong number of tokens")
        if not 1 <= n_state <= limits.bound(n_tokens):
            raise BadFile("a wrong size")
        stream.seek(at)
        tokens = read_bytes(stream, n_tokens * TOKEN_BYTES)
        state = read_bytes(stream, n_state)
    key = make_key(name, label, tokens.tobytes())
    ids = array("i", tokens.tobytes())
    if digest_of(key, state, no_pause).hex() != digest or not all(
        0 <= token < limits.n_vocab for token in ids
    ):
        raise BadFile("a damaged state")
    return Contents(slot, label, ids, (), n_prompt), state, n_bytes


# -- between two steps -----------------------------------------------------------------


def copied(
    scheduler: Scheduler, executor: Executor, slot: int
) -> tuple[Contents, State]:
    """
    A copy of what a slot holds. Thread: the engine's.

    Raises:
        InvalidRequest: it has nothing that others may have.
        SnapshotFailed: it could not be copied.
    """
    plan = scheduler.memory.plan_copy(slot)
    contents = None if plan is None else plan[0]
    if plan is None or contents is None or not _is_for_all(contents.namespace):
        allowed = "a slot that holds text and runs no request"
        raise InvalidRequest("slot", slot, f"{allowed}; the rest is not saved")
    result = _done(scheduler, executor, plan[1])
    if SLOT_SAVE not in result.saved:
        raise SnapshotFailed("llama_state_seq_get_data", 0, "the slot was not copied")
    state = result.saved[SLOT_SAVE].payload
    assert isinstance(state, memoryview)
    return contents, state


def fill(
    scheduler: Scheduler, executor: Executor, contents: Contents, state: State
) -> None:
    """
    Have a slot hold *contents*. Thread: the engine's.

    Raises:
        InvalidRequest: a request runs in it, or others leave too few cells.
        SnapshotFailed: libllama does not take the state; the slot is empty.
    """
    plan = scheduler.memory.plan_fill(contents, state)
    if plan is None:
        allowed = (
            f"a slot without a request, with room for {len(contents.tokens)} tokens"
        )
        raise InvalidRequest("slot", contents.slot, f"{allowed}: try again later")
    if contents.slot in _done(scheduler, executor, plan).not_restored:
        _done(scheduler, executor, StepPlan(()))  # if it has spoilt the context
        raise SnapshotFailed("llama_state_seq_set_data", 0, "the state does not fit")


def _done(scheduler: Scheduler, executor: Executor, plan: StepPlan) -> StepResult:
    """The result of a *plan* without works, which the scheduler knows."""
    result = executor.execute(plan)
    scheduler.memory.settle(result)
    if result.status is not DecodeStatus.OK:  # there is another context, or none
        scheduler.lose_slots()
        raise result.error or SnapshotFailed(
            "llama_state_seq_get_data", 0, "the slot was not copied"
        )
    return result


def _is_for_all(namespace: object) -> bool:
    """Whether *namespace* means the same in another process: neither of adapters, nor private."""
    return namespace is None or isinstance(namespace, str)
