"""
The C interface of llguidance, which its Python package carries.

Python's own interface to llguidance holds the GIL while it reads a vocabulary: 90 ms for
49,000 tokens, in which no event loop runs. These calls release the GIL.

main() is a process that compiles constraints, so that one which takes too much ends this process
only. The system ends the process when a constraint computes for too long, and limits its memory.
Neither can be had inside of an engine: a library that gets no memory, or recurses too deeply, ends
its process. The process also ends with the one that asks it, because its input then ends.

Messages are lines of JSON. The first one has the vocabulary and the limits; an empty line answers
that all is there. Each further one is a constraint, whose answer has what is wrong with it and how
many bytes it takes.
"""

from __future__ import annotations

import importlib
import json
import resource
import signal
import sys
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from itertools import pairwise
from threading import Lock
from typing import Any

MAX_ERROR_BYTES = 1000
MAX_TOKENIZERS = 2  # each has the whole vocabulary
MAX_STACK_BYTES = 2**22  # half of what the threads of an engine usually have
_READING = Lock()

# Limits of one constraint. The library's own are 50,000 items, 250,000 states and so on.
LIMITS = {
    "step_max_items": 10_000,  # of the parser for one mask: about 100 ms
    "step_lexer_fuel": 200_000,  # for one mask: about 15 ms
    "initial_lexer_fuel": 1_000_000,  # to compile: about 20 ms
    "max_lexer_states": 50_000,  # of one output: about 1 kB each
    "max_grammar_size": 200_000,  # symbols
}
DECLARATIONS = """
typedef struct LlgTokenizer LlgTokenizer;
typedef struct LlgMatcher LlgMatcher;
typedef size_t (*LlgTokenizeFn)(const void *, const uint8_t * bytes, size_t n_bytes,
                                uint32_t * tokens, size_t n_tokens);
typedef struct {
    size_t struct_size;
    uint32_t vocab_size;
    uint32_t tok_eos;
    const uint32_t * token_lens;
    const uint8_t * token_bytes;
    const char * tokenizer_json;
    bool tokenize_assumes_string;
    LlgTokenizeFn tokenize_fn;
    bool use_approximate_greedy_tokenize_fn;
    const void * tokenize_user_data;
    const char * const * slices;
    const uint32_t * tok_eos_extra;
    uint32_t tok_eos_extra_count;
} LlgTokenizerInitV2;
typedef struct {
    const LlgTokenizer * tokenizer;
    uint32_t log_buffer_level;
    uint32_t log_stderr_level;
    bool ff_tokens_ok;
    bool backtrack_ok;
    size_t max_items_in_row;
    uint64_t initial_lexer_fuel;
    uint64_t step_lexer_fuel;
    size_t step_max_items;
    size_t max_lexer_states;
    size_t max_grammar_size;
    bool precompute_large_lexemes;
    bool verbose_errors;
    char others[1024];  // only the library sets them
} LlgConstraintInit;
LlgTokenizer * llg_new_tokenizer_v2(const LlgTokenizerInitV2 *, char * error, size_t n_bytes);
void llg_free_tokenizer(LlgTokenizer *);
void llg_constraint_init_set_defaults(LlgConstraintInit *, const LlgTokenizer *);
LlgMatcher * llg_new_matcher(const LlgConstraintInit *, const char * kind, const char * text);
LlgMatcher * llg_clone_matcher(const LlgMatcher *);
void llg_free_matcher(LlgMatcher *);
const char * llg_matcher_get_error(LlgMatcher *);
int32_t llg_matcher_compute_mask_into(LlgMatcher *, uint32_t * mask, size_t n_bytes);
int32_t llg_matcher_consume_token(LlgMatcher *, uint32_t token);
int32_t llg_matcher_consume_tokens(LlgMatcher *, const uint32_t * tokens, size_t n);
int32_t llg_matcher_validate_tokens(LlgMatcher *, const uint32_t * tokens, size_t n);
int32_t llg_matcher_rollback(LlgMatcher *, size_t n_tokens);
int32_t llg_matcher_compute_ff_tokens(LlgMatcher *, uint32_t * tokens, size_t n_tokens);
size_t llg_tokenize_bytes(const LlgTokenizer *, const uint8_t * text, size_t n_bytes,
                          uint32_t * tokens, size_t n_tokens);
"""
MALLINFO = """
struct mallinfo2 {
    size_t arena, ordblks, smblks, hblks, hblkhd, usmblks, fsmblks, uordblks, fordblks, keepcost;
};
struct mallinfo2 mallinfo2(void);
"""


def declared() -> Any:
    """
    The declarations, read when they are needed first: that takes a while.

    They are read once, because types of two readings do not fit each other.
    """
    with _READING:
        return _declared()


@cache
def _declared() -> Any:
    from cffi import FFI

    ffi = FFI()
    ffi.cdef(DECLARATIONS)
    return ffi


def load() -> Any:
    """
    The library.

    Raises:
        ImportError: it is not installed, or without this interface; says which.
    """
    path = importlib.import_module("llguidance")._lib.__file__
    lib = declared().dlopen(path)
    for name in dir(lib):
        if not hasattr(lib, name):
            raise ImportError(f"this build of llguidance has no {name}")
    return lib


def new_tokenizer(
    lib: Any,
    pieces: Sequence[bytes],
    end_tokens: Sequence[int],
    tokenize: Callable[[bytes], Sequence[int]] | None,
) -> tuple[Any, object]:
    """
    A pointer, and what has to be kept until it is freed, because C calls it till then.

    Raises:
        ValueError: llguidance does not take the vocabulary.
    """
    ffi = declared()

    @ffi.callback("LlgTokenizeFn")  # type: ignore[untyped-decorator]
    def write_tokens(_: Any, text: Any, n_bytes: int, out: Any, room: int) -> int:
        """Return how many tokens there are, written or not."""
        assert tokenize is not None
        tokens = tokenize(bytes(ffi.buffer(text, n_bytes)))
        for index, token in enumerate(tokens[:room]):
            out[index] = token
        return len(tokens)

    first, *extra_ends = end_tokens
    extra_array = ffi.new("uint32_t[]", extra_ends)
    data = b"".join(pieces)
    lengths = array("I", map(len, pieces))
    init = ffi.new("LlgTokenizerInitV2 *")
    init.struct_size = ffi.sizeof(init[0])
    init.vocab_size, init.tok_eos = len(pieces), first
    init.token_lens = ffi.from_buffer("uint32_t[]", lengths)
    init.token_bytes = ffi.from_buffer("uint8_t[]", data)
    if tokenize is None:
        init.use_approximate_greedy_tokenize_fn = True
    else:
        init.tokenize_assumes_string, init.tokenize_fn = True, write_tokens
    init.tok_eos_extra, init.tok_eos_extra_count = extra_array, len(extra_ends)
    error = ffi.new("char[]", MAX_ERROR_BYTES)
    pointer = lib.llg_new_tokenizer_v2(init, error, len(error))
    if not pointer:
        raise ValueError(ffi.string(error).decode(errors="replace"))
    return pointer, write_tokens


def matcher_options(lib: Any, tokenizer: Any) -> Any:
    """The options of matchers: those of the library, within our limits."""
    init = declared().new("LlgConstraintInit *")
    lib.llg_constraint_init_set_defaults(init, tokenizer)
    init.log_stderr_level = 0
    init.verbose_errors = (
        False  # else they have the library's state and all of the grammar
    )
    for name, limit in LIMITS.items():
        setattr(init, name, limit)
    return init


def new_matcher(lib: Any, tokenizer: Any, kind: str, text: str) -> Any:
    """A pointer, never NULL."""
    init = matcher_options(lib, tokenizer)
    return lib.llg_new_matcher(init, kind.encode(), text.encode())


def addresses(lib: Any) -> dict[str, int]:
    """Addresses of the functions that C++ calls, by the names of plr_llguidance."""
    names = {
        "clone": lib.llg_clone_matcher,
        "free": lib.llg_free_matcher,
        "validate": lib.llg_matcher_validate_tokens,
        "consume": lib.llg_matcher_consume_tokens,
        "fill": lib.llg_matcher_compute_mask_into,
        "error": lib.llg_matcher_get_error,
        "tokenize": lib.llg_tokenize_bytes,
    }
    cast = declared().cast
    return {name: int(cast("uintptr_t", function)) for name, function in names.items()}


def error_of(lib: Any, matcher: Any) -> str:
    """Why nothing can follow; empty if something can."""
    raw = lib.llg_matcher_get_error(matcher)
    return declared().string(raw).decode(errors="replace") if raw else ""


def memory_counter() -> Callable[[], int]:
    """Tells the bytes that C has been given in this process; always 0 where nobody can."""
    from cffi import FFI

    ffi = FFI()
    ffi.cdef(MALLINFO)
    try:
        mallinfo = ffi.dlopen(None).mallinfo2  # of glibc 2.33 and later
    except (AttributeError, OSError):
        return lambda: 0

    def in_use() -> int:
        info = mallinfo()
        return int(info.uordblks + info.hblkhd)

    return in_use


# -- the process that tries constraints -------------------------------------------


def main() -> None:
    """Serve until the input ends."""
    # Limits hold before anything of a stranger is read.
    setup = json.loads(sys.stdin.readline())
    _limit(setup["max_bytes"])
    max_cpu_s = setup["max_cpu_s"]
    lib = load()
    joined = setup["pieces"].encode("latin-1")
    ends = [0, *setup["ends"]]
    pieces = [joined[a:b] for a, b in pairwise(ends)]
    in_use = memory_counter()

    @lru_cache(MAX_TOKENIZERS)
    def tokenizer(named_tokens: frozenset[int]) -> tuple[Any, object]:
        texts = [b"\xff" + p if t in named_tokens else p for t, p in enumerate(pieces)]
        pointer, callbacks = new_tokenizer(lib, texts, setup["eog"], None)
        # One that gives way is freed, or the limit of memory would end another constraint.
        return declared().gc(pointer, lib.llg_free_tokenizer), callbacks

    mask = declared().new("uint32_t[]", (len(pieces) + 31) // 32)
    sys.stdout.write("\n")
    sys.stdout.flush()
    for line in sys.stdin:
        constraint = json.loads(line)
        # The timer ends the process: no library has to give up by itself.
        signal.setitimer(signal.ITIMER_PROF, max_cpu_s)
        pointer, _ = tokenizer(frozenset(constraint["named"]))
        # The first mask compiles more, and shows mistakes that compiling does not.
        before = in_use()
        kind, text = constraint["kind"], constraint["text"]
        matcher = new_matcher(lib, pointer, kind, text)
        lib.llg_matcher_compute_mask_into(matcher, mask, 4 * len(mask))
        answer = {
            "error": error_of(lib, matcher),
            "bytes": in_use() - before,
        }
        lib.llg_free_matcher(matcher)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit(max_bytes: int) -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    limits = (
        (resource.RLIMIT_AS, max_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_STACK, MAX_STACK_BYTES),
    )
    for limit, size in limits:
        with suppress(ValueError, OSError):  # macOS has no limit on addresses
            resource.setrlimit(limit, (size, size))
