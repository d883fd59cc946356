"""
JSON schemas, regular expressions and Lark grammars, by the package llguidance.

Its tokenizer is made once a model, from the pieces of the vocabulary. A request has a
matcher, which gives the mask of the tokens that may come next.

What a few bytes can make grow is limited:
- Masks have limits in llguidance (`_ffi/llguidance.py`). A number in an output of a JSON schema
  has a limit of digits, because llguidance gives it none.
- Each constraint is compiled in a process of its own first, within limits of time and memory. A
  text of 60 bytes can name an automaton of millions of states, and no limit of llguidance holds
  for all kinds of them. What ends the process there is an error of one request. What passes is
  compiled once more by the engine, at the same cost.
- That process is started by the first constraint and kept. Where none can be started, as in a
  frozen application, only the limits of llguidance and of our own checks hold.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import weakref
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache, cached_property, lru_cache, partial
from itertools import accumulate
from logging import getLogger
from pathlib import Path
from queue import LifoQueue
from threading import Lock
from typing import Any

from pyllama_raw._ffi.llguidance import MAX_STACK_BYTES
from pyllama_raw.engine.mailbox import CALLER_LEFT
from pyllama_raw.engine.parts import Reading, at_once
from pyllama_raw.errors import BadSchema, ClosedError, Unsupported
from pyllama_raw.native.libllama import UINT32
from pyllama_raw.native.sampler import Kind, MaskTokenizer, Matcher
from pyllama_raw.native.vocab import Vocab
from pyllama_raw.options.constraints import (
    OPTIONS,
    for_llguidance,
    refused,
    with_ascii_classes,
)
from pyllama_raw.options.machine import has_own_path, interpreter
from pyllama_raw.options.sampling import MAX_PATTERN

MAX_CACHE_BYTES = 2**26  # of compiled constraints: some take a tenth of a second
MAX_CHECKED = 64  # schemas that were found to be right
MAX_DIGITS = 16  # in a row in a number of an output: as many as doubles hold
MAX_TOKENIZERS = 4  # kept for grammars that name tokens: each has the whole vocabulary
MAX_VALUES = 2**14  # of a schema
MAX_CHARACTERS = 2**17  # of a schema's texts
MAX_NAMES = 1000  # of one mapping: the time to compile them is quadratic
Tokenize = Callable[[bytes], Sequence[int]]
NUMBER = re.compile(r"<\[(\d{1,9})\]>")
DIGITS, LETTERS = b"0123456789", (b"z", b"q", b"x", b"Z", b"Q", b"X")
BYTES = [*(bytes([byte]) for byte in range(256)), b"\xff<end>"]
OPTIONS_TEXT = json.dumps({"x-guidance": OPTIONS})[1:-1]
GUESSED_BYTES = 64  # that a character of a constraint takes, where nobody can tell
LEAST_BYTES = 2**14  # that a matcher takes, and what is known of it
MAX_CPU_S = 1.0  # others wait for as long: most constraints take milliseconds
MAX_BYTES = 2**29  # of addresses, beside those that the vocabulary takes
MAX_COMPILED_BYTES = 2**24  # of one: each output copies it, which takes 2 ms a MiB
BYTES_PER_PIECE = 1024  # of addresses that a vocabulary takes, at most
N_PROCESSES = 2  # one slow constraint does not keep the others waiting
LOOK_S = 0.05  # between two looks whether the caller is still there
# The package is entered by its path: its __init__ would import all of the engine.
_PROGRAM = """
import json, sys, types
path, folder, keeps = json.loads(sys.argv[1])
sys.path[:] = [*(sys.path if keeps else ()), *path]
package = types.ModuleType("pyllama_raw")
package.__path__ = [folder]
sys.modules["pyllama_raw"] = package
from pyllama_raw._ffi.llguidance import main
main()
"""
_log = getLogger(__name__)


class Guidance:
    """Compiles constraints for one vocabulary; any thread may call it."""

    def __init__(self, vocab: Vocab, reading: Reading = at_once) -> None:
        """
        Reads the whole vocabulary.

        Args:
            reading: around what reads more of it later.

        Raises:
            Unsupported: the vocabulary has no end token, or no llguidance can be loaded.
        """
        if vocab.kind == "none" or not vocab.eog_tokens:
            raise Unsupported("a constraint", "the vocabulary has no end token")

        read = partial(vocab.tokenize, add_special=False, parse_special=False)

        def tokenize(text: bytes) -> Sequence[int]:
            try:
                return reading(partial(read, text.decode()))
            except ClosedError:  # what is being compiled will never be used
                return ()

        pieces = _pieces(vocab)
        make_tokenizer = partial(_without, pieces, sorted(vocab.eog_tokens), tokenize)
        tokenizers = lru_cache(MAX_TOKENIZERS)(make_tokenizer)
        try:
            # The usual vocabulary; this imports llguidance.
            tokenizers(frozenset())
        except ImportError as error:
            text = f"they need llguidance 1.9 or later, below 2: {error}"
            raise Unsupported("json_schema, regex and lark", text) from None
        self._pieces, self._tokenizers = pieces, tokenizers
        self._trials = Trials(pieces, sorted(vocab.eog_tokens))
        self._cache = CompiledCache()
        self._digits = DigitTokens(pieces)

    def make(self, kind: Kind, value: Any) -> partial[MaskState]:
        """
        Compile *value*, or find it among the latest; gives states at its beginning.

        A token that a Lark grammar names by its number has no text there, so it is only where
        the grammar names it.

        Raises:
            BadSchema: it cannot be used; the error has the reason.
        """
        text = _as_json(value) if kind == "json_schema" else value
        if kind == "regex":
            text = with_ascii_classes(text)
        # Concurrent callers may compile the same constraint twice.
        if (start := self._cache.get((kind, text))) is None:
            start = self._compile(kind, text)
        return start

    def _compile(self, kind: Kind, text: str) -> partial[MaskState]:
        # A grammar may name tokens. Those have no text in its vocabulary.
        numbers = map(int, NUMBER.findall(text) if kind == "lark" else ())
        tokens = {token for token in numbers if token < len(self._pieces)}
        textless = frozenset(
            token for token in tokens if self._pieces[token][0] != 0xFF
        )
        # In a process of its own first, which tells how many bytes it takes.
        n_bytes = self._trials.n_bytes(kind, text, textless)
        matcher = _compile(self._tokenizers(textless), kind, text)
        # A grammar that has a schema of ours is that of a call.
        has_numbers = kind == "json_schema" or (kind == "lark" and OPTIONS_TEXT in text)
        start = partial(MaskState, kind, matcher, self._digits if has_numbers else None)
        # There is no such process, so the size is a guess.
        if n_bytes is None:
            n_bytes = GUESSED_BYTES * len(text)
        n_bytes += len(text) + 4 * len(matcher.mask) + LEAST_BYTES
        self._cache.add((kind, text), start, n_bytes)
        return start


class CompiledCache:
    """The latest constraints that were compiled, up to MAX_CACHE_BYTES; any thread may call."""

    def __init__(self) -> None:
        self.n_bytes = 0
        self._lock = Lock()
        self._entries: OrderedDict[tuple[Kind, str], tuple[partial[MaskState], int]]
        self._entries = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: tuple[Kind, str]) -> partial[MaskState] | None:
        """What begins with it; None: it is not there."""
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def add(
        self, key: tuple[Kind, str], start: partial[MaskState], n_bytes: int
    ) -> None:
        """Keep *start*, unless it takes more than there is room for; the oldest give way."""
        # It would displace all others and be displaced by the next.
        if n_bytes > MAX_CACHE_BYTES:
            return
        with self._lock:
            self._remove(key)
            # The oldest give way.
            while self.n_bytes + n_bytes > MAX_CACHE_BYTES:
                self._remove(next(iter(self._entries)))
            self._entries[key] = start, n_bytes
            self.n_bytes += n_bytes

    def _remove(self, key: tuple[Kind, str]) -> None:
        _, n_bytes = self._entries.pop(key, (None, 0))
        self.n_bytes -= n_bytes


class DigitTokens:
    """Tokens by the digits that they begin with, as masks that are whole numbers."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces

    @cached_property
    def longer_than(self) -> list[int]:
        """Item n has the tokens that begin with more than n digits; the last one is 0."""
        masks: list[bytearray] = []
        n_bytes = (len(self._pieces) + 7) // 8
        for token, piece in enumerate(self._pieces):
            for n in range(len(piece) - len(piece.lstrip(DIGITS))):
                if n == len(masks):
                    masks.append(bytearray(n_bytes))
                masks[n][token >> 3] |= 1 << (token & 7)
        return [*(int.from_bytes(mask, "little") for mask in masks), 0]

    @cached_property
    def letter(self) -> int | None:
        """A token that no number has, but that texts have."""
        return next((t for t, p in enumerate(self._pieces) if p in LETTERS), None)

    def count(self, token: int, n_before: int) -> int:
        """The digits in a row that end an output with *token*, behind *n_before*."""
        piece = self._pieces[token]
        n_digits = len(piece) - len(piece.rstrip(DIGITS))
        return n_digits + (n_before if n_digits == len(piece) else 0)

    def limit(self, mask: array[int], n_digits: int) -> None:
        """Take out of *mask* what goes on with a number of *n_digits* for too long."""
        longer = self.longer_than
        n_more = max(MAX_DIGITS - n_digits, 0)
        # No token has so many digits, or numbers cannot be told from texts.
        if n_more >= len(longer) - 1 or self.letter is None:
            return
        bits = int.from_bytes(mask.tobytes(), "little")
        # A string goes on as it likes. What has to have more digits gets them.
        is_number = not bits >> self.letter & 1
        if is_number and (short_bits := bits & ~longer[n_more]):
            mask[:] = array(UINT32, short_bits.to_bytes(4 * len(mask), "little"))


def _without(
    pieces: Sequence[bytes],
    ends: Sequence[int],
    tokenize: Tokenize,
    textless: frozenset[int],
) -> MaskTokenizer:
    """A vocabulary in which the tokens *textless* have no text."""
    names = [pieces[token] for token in textless]
    pieces_left = [b"\xff" + p if t in textless else p for t, p in enumerate(pieces)]
    longest = LongestPieces(pieces_left)

    def tokenize_without(text: bytes) -> Sequence[int]:
        # A text that spells a named token: by the longest of the other pieces.
        if any(name in text for name in names):
            return longest.tokens(text)
        return tokenize(text)

    return MaskTokenizer(pieces_left, ends, tokenize_without)


def checked_schema(schema: object) -> str:
    """*schema* as JSON for a Lark grammar. Raises BadSchema: it cannot be used."""
    text = _as_json(schema)
    _check(text)
    return text


@lru_cache(MAX_CHECKED)
def _check(text: str) -> None:
    if byte_trials().n_bytes("json_schema", text) is None:
        _compile(MaskTokenizer(BYTES, [256], None), "json_schema", text)


@cache
def byte_trials() -> Trials:
    """With a vocabulary of bytes, which is enough to check schemas."""
    return Trials(BYTES, [256])


# A fork would read answers that are for its parent.
os.register_at_fork(after_in_child=byte_trials.cache_clear)


def _compile(tokenizer: MaskTokenizer, kind: Kind, text: str) -> Matcher:
    """With its first mask, which shows mistakes that compiling does not."""
    matcher = Matcher.compile(tokenizer, kind, text)
    matcher.compute_mask()
    if matcher.error:
        raise refused(kind, matcher.error)
    return matcher


def _as_json(schema: object) -> str:
    try:
        _check_size(schema)
        return json.dumps(for_llguidance(schema))
    except BadSchema:
        raise
    except Exception as error:  # whatever stands in it
        raise BadSchema("json_schema", f"it is no JSON: {error}") from error


def _check_size(schema: object) -> None:
    """Value by value, because no other thread runs while C writes all of them."""
    waiting, n_values, n_characters = [schema], 1, 0
    while waiting:
        value = waiting.pop()
        # Texts are patterns, names and constants.
        if isinstance(value, str):
            n_characters += len(value)
            _check_count(len(value), "characters in one text", MAX_PATTERN)
            _check_count(n_characters, "characters", MAX_CHARACTERS)
        elif isinstance(value, Mapping | list | tuple):
            n_values += len(value)
            _check_count(n_values, "values", MAX_VALUES)
            waiting += value
            if isinstance(value, Mapping):
                _check_count(len(value), "names in one mapping", MAX_NAMES)
                waiting += value.values()


def _check_count(count: int, noun: str, limit: int) -> None:
    if count > limit:
        text = f"it has {count} or more {noun}, at most {limit} are allowed"
        raise BadSchema("json_schema", text)


class MaskState:
    """
    Place of one request in its constraint, and the mask of what may follow.

    It shares the matcher of the constraint up to its first token, because a copy takes 0.3 ms
    and all outputs of a request begin in the same step.
    """

    def __init__(
        self, kind: Kind, compiled: Matcher, digits: DigitTokens | None
    ) -> None:
        """
        Args:
            digits: limits those of a number; None: nothing limits them.
        """
        self.kind = kind
        self._digits, self._n_digits = digits, 0
        self._matcher, self._is_shared = compiled, True
        self._compiled = compiled
        self._tokens: array[int] | None = None  # accepted ones; None: nobody needs them
        self.mask = compiled.mask[:]
        self.masks = array(UINT32)  # of the places of drafts, one behind the other
        self._is_current = True

    @property
    def error(self) -> str:
        """Why nothing can follow; empty if something can."""
        return self._matcher.error

    def prepare(self) -> None:
        """Fill the mask; all zero, which fails the row, if nothing can follow."""
        if not self._is_current:  # else the step that wanted it sampled nothing
            self._matcher.compute_mask()
            if self._digits is not None and self._n_digits:
                self._digits.limit(self.mask, self._n_digits)
            self._is_current = True

    def expect_drafts(self) -> None:
        """Note accepted tokens from the first on: a wrong draft may have them accepted anew."""
        self._tokens = array("i")

    def prepare_places(self, drafts: array[int]) -> int:
        """
        Fill `masks`: the mask, and those behind each of *drafts* that may follow.

        Call expect_drafts() before the first token.

        Returns:
            How many of them may.
        """
        assert self._tokens is not None
        self.prepare()
        self._part()
        n_valid, matcher = self._matcher.n_valid(drafts), self._matcher
        self.masks, n_digits = self.mask[:], self._n_digits
        n_accepted = 0
        for token in drafts[:n_valid]:
            matcher.accept(token)
            n_accepted += 1
            matcher.compute_mask()
            # Limits hold for what follows a draft, too; without the draft nobody is beyond them.
            if matcher.error:
                self._matcher = self._compiled.copy(self.mask)
                for before in self._tokens:
                    self._matcher.accept(before)
                n_valid, n_accepted = n_accepted - 1, 0
                break
            if self._digits is not None:
                n_digits = self._digits.count(token, n_digits)
                if n_digits:
                    self._digits.limit(self.mask, n_digits)
            self.masks += self.mask
        if n_accepted:
            matcher.take_back(n_accepted)
        self._is_current = False
        return n_valid

    def forced(self, n_most: int) -> tuple[int, ...]:
        """Tokens of the one text that can follow, at most so many; none if there are several."""
        return () if self._is_shared else self._matcher.forced(n_most)

    def _part(self) -> None:
        """Have a place of its own from here on."""
        if self._is_shared:
            self._matcher, self._is_shared = self._matcher.copy(self.mask), False

    def accept(self, token: int) -> None:
        """Go on after *token*."""
        # The first token of this output: until here it is where all begin.
        self._part()
        if self._tokens is not None:
            self._tokens.append(token)
        self._matcher.accept(token)
        if self._digits is not None:
            self._n_digits = self._digits.count(token, self._n_digits)
        self._is_current = False


class LongestPieces:
    """
    Takes texts apart, always by the longest piece that fits.

    A mask may ask for a text of many thousands of characters, in the engine thread, so pieces are
    looked up and not looked through.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {piece: token for token, piece in enumerate(self._pieces)}

    @cached_property
    def _lengths(self) -> dict[int, list[int]]:
        """Lengths of pieces by their first byte, the longest first."""
        lengths = defaultdict[int, set[int]](set)
        for piece in self._pieces:
            lengths[piece[0]].add(len(piece))
        return {first: sorted(of, reverse=True) for first, of in lengths.items()}

    def tokens(self, text: bytes) -> list[int]:
        """Tokens of *text*; none if no piece fits somewhere."""
        tokens, at = list[int](), 0
        while at < len(text):
            lengths = self._lengths.get(text[at], [])
            parts = (text[at : at + n] for n in lengths)
            piece = next((part for part in parts if part in self._ids), b"")
            if not piece:
                return []
            tokens.append(self._ids[piece])
            at += len(piece)
        return tokens


def _pieces(vocab: Vocab) -> list[bytes]:
    """0xff, which is in no text, marks the names of control tokens."""
    return [
        piece or b"\xff" + vocab.piece(token, special=True)
        for token, piece in enumerate(vocab.pieces)
    ]


class Trials:
    """
    Compiles constraints for one vocabulary; any thread may ask.

    Args:
        pieces: of all tokens.
        eog: tokens that end an output.
    """

    def __init__(self, pieces: Sequence[bytes], eog: Sequence[int]) -> None:
        self._pieces, self._eog = pieces, list(eog)
        # What each trial takes and gives back: an idle process, or leave to start one.
        self._places: LifoQueue[_TrialProcess | None] = LifoQueue()
        for _ in range(N_PROCESSES):
            self._places.put(None)
        self._all: set[_TrialProcess] = set()
        self._can_start = True
        weakref.finalize(self, _end_all, self._all, os.getpid())

    def n_bytes(
        self, kind: Kind, text: str, textless: Collection[int] = ()
    ) -> int | None:
        """
        What the constraint *text* takes once it is compiled; None: no process can be started.

        Args:
            textless: tokens that have no text, because the constraint names them.

        Raises:
            BadSchema: it cannot be compiled, or not within the limits; says why.
            ClosedError: the caller has left meanwhile.
        """
        constraint = {"kind": kind, "text": text, "named": sorted(textless)}
        # One of a few processes, or leave to start one; others wait here.
        process = self._places.get()
        answer = None
        try:
            if process is None:
                process = self._started()
            if process is not None:
                answer = process.ask(constraint)
        except _Ended as error:
            raise BadSchema(kind, str(error), is_costly=True) from error
        except OSError as error:
            _log.warning("constraints are compiled without a trial: %s", error)
            self._can_start = False
        finally:
            # It was ended by a limit, or the caller has left: another one is started next time.
            if answer is None and process is not None:
                process.end()
                self._all.discard(process)
                process = None
            self._places.put(process)
        if answer is None:
            return None
        if answer["error"]:
            raise refused(kind, answer["error"])
        n_bytes = max(int(answer["bytes"]), 0)
        if n_bytes > MAX_COMPILED_BYTES:
            size = f"it takes {n_bytes >> 10} KiB once it is compiled, at most"
            allowed = f"{MAX_COMPILED_BYTES >> 10} are allowed: shorten or simplify it"
            raise BadSchema(kind, f"{size} {allowed}")
        return n_bytes

    def _started(self) -> _TrialProcess | None:
        """Raises OSError: none can be started."""
        if not self._can_start:
            return None
        process = _TrialProcess(self._pieces, self._eog)
        self._all.add(process)
        return process


class _Ended(Exception):
    """A limit was reached; says which."""


class _TrialProcess:
    def __init__(self, pieces: Sequence[bytes], eog: Sequence[int]) -> None:
        # A frozen application or one that embeds Python must not start itself. Another Python
        # than ours has packages of its own, which site finds.
        self._python, is_other = interpreter(), has_own_path()
        folder = str(Path(__file__).resolve().parents[1])
        argument = json.dumps([[str(entry) for entry in sys.path], folder, is_other])
        flags = ("-I",) if is_other else ("-I", "-S")
        # Isolated: no user's folder or environment variable adds modules. In a session
        # of its own, because an interrupt from the terminal is not for it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._popen = subprocess.Popen(  # noqa: S603 - our own program
                [self._python, *flags, "-c", _PROGRAM, argument],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                text=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._setup: dict[str, Any] | None = {
            "pieces": b"".join(pieces).decode("latin-1"),
            "ends": list(accumulate(map(len, pieces))),
            "eog": eog,
            "max_cpu_s": MAX_CPU_S,
            "max_bytes": MAX_BYTES + BYTES_PER_PIECE * len(pieces),
        }

    def ask(self, constraint: dict[str, Any]) -> dict[str, Any]:
        """The answer. Raises _Ended, ClosedError; the process must then be ended."""
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        try:
            # The vocabulary goes ahead of the first constraint.
            if self._setup is not None:
                self._set_up(self._setup)
                self._setup = None
            self._popen.stdin.write(json.dumps(constraint) + "\n")
            self._popen.stdin.flush()
            left = CALLER_LEFT.get()
            # A caller that has left does not keep the process.
            while not select.select([self._popen.stdout], [], [], LOOK_S)[0]:
                if left is not None and left.is_set():
                    raise ClosedError("the caller has left")
            line = self._popen.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise self._why()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _set_up(self, setup: dict[str, Any]) -> None:
        """Raises OSError: this Python is not the right one."""
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        with suppress(BrokenPipeError):
            self._popen.stdin.write(json.dumps(setup) + "\n")
            self._popen.stdin.flush()
        # It says that it has all it needs, before anything of a stranger comes.
        if not self._popen.stdout.readline():
            code, needs = self._popen.wait(), "cffi, llguidance and this package"
            raise OSError(f"{self._python} ended with {code}: it needs {needs}")

    def _why(self) -> _Ended:
        code = self._popen.wait()
        # The system ends it at its limit of CPU time.
        if code == -signal.SIGPROF:
            text = f"it is not compiled within {MAX_CPU_S:g} s of CPU time"
        # Recursion has used up its stack.
        elif code in (-signal.SIGSEGV, -signal.SIGBUS):
            text = f"it nests so deeply that {MAX_STACK_BYTES >> 20} MiB of stack are too few"
        else:
            text = f"it is not compiled within {MAX_BYTES >> 20} MiB"
        return _Ended(f"{text}: shorten it, or lower its numbers and repetitions")

    def end(self) -> None:
        self._popen.kill()
        with suppress(BrokenPipeError), self._popen:
            pass


def _end_all(processes: set[_TrialProcess], pid: int) -> None:
    """Those of the process *pid* alone: a fork lets its parent's live."""
    while processes and os.getpid() == pid:
        processes.pop().end()
