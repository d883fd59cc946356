"""
Stands for the library, counts its calls, and has one of them fail.

It also knows what was made and not freed, by address.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

from pyllama_raw.native import libllama
from scripts.faults.calls import (
    EXCEPTION,
    FREES,
    NEVER_FAILS,
    ROW,
    SAMPLER,
    TAKES_OVER,
)

RAISES = "raises"


class InjectedError(Exception):
    """What nobody expects of a call that has no value for a failure."""


@dataclass(frozen=True, slots=True)
class Fault:
    """The call with the number *index* of *name* fails in the given way."""

    name: str
    index: int
    way: object  # a value, or RAISES


class FaultyLib:
    """A library whose functions are those of *lib*, but for one call."""

    def __init__(self, lib: Any, ffi: Any) -> None:
        self._lib, self._ffi = lib, ffi
        self._lock = Lock()
        self.counts: Counter[str] = Counter()
        self.live: dict[int, str] = {}  # what made it, by address
        self.fault: Fault | None = None
        self.has_failed = False

    def begin(self, fault: Fault | None) -> None:
        """Count from 0; *fault* is of these calls."""
        with self._lock:
            self.counts.clear()
            self.fault, self.has_failed = fault, False
        self._lib.plr_fail_decode(0, 0, -1)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._lib, name)
        if callable(value) and name not in NEVER_FAILS:
            value = partial(self._call, name, value)
        setattr(self, name, value)
        return value

    def _call(self, name: str, function: Any, *arguments: Any) -> Any:
        with self._lock:
            fault = self.fault
            fails = fault is not None and self.counts[name] == fault.index
            fails = fails and fault is not None and fault.name == name
            self.counts[name] += 1
            self.has_failed |= fails
        if fails:
            assert fault is not None
            return self._fail(fault, function, arguments)
        result = function(*arguments)
        self._note(name, arguments, result)
        return result

    def _fail(self, fault: Fault, function: Any, arguments: tuple[Any, ...]) -> Any:
        name, way = fault.name, fault.way
        if name == "llama_memory_seq_rm" and arguments[2] <= 0:
            return function(*arguments)  # all of a slot is always forgotten
        if way == RAISES:
            if name == TAKES_OVER:  # nothing can fail before that
                self._note(name, arguments, function(*arguments))
            raise InjectedError(f"{name} is made to fail")
        if way == ROW:
            return self._fail_row(function, arguments)
        if name == "plr_step":
            self._lib.plr_fail_decode(way, 0, -1)
            return function(*arguments)
        return self._ffi.NULL if way is None else way

    def _fail_row(self, step: Any, arguments: tuple[Any, ...]) -> int:
        """Have the first row of a step without a token, if it has one."""
        *passed, _ahead = arguments
        _, _, _, n_rows, _, _, _, tokens, codes, times = passed
        code = int(step(*passed, False))
        if code == 0 and n_rows:
            for row in range(n_rows):
                codes[row] = 0
            codes[0], tokens[0] = EXCEPTION, -1
            times.n_failed = 1
        return code

    def _note(self, name: str, arguments: tuple[Any, ...], result: Any) -> None:
        if (name in FREES or name.startswith(SAMPLER)) and result:
            self.live[self._address(result)] = name
        elif name in FREES.values():
            self.live.pop(self._address(arguments[0]), None)
        elif name == TAKES_OVER:
            self.live.pop(self._address(arguments[1]), None)

    def _address(self, pointer: Any) -> int:
        return int(self._ffi.cast("uintptr_t", pointer))


def install() -> FaultyLib:
    """Have `native` call such a library; before anything has been loaded."""
    lib, ffi = libllama.load()
    faulty = FaultyLib(lib, ffi)
    libllama._loaded = faulty, ffi
    return faulty
