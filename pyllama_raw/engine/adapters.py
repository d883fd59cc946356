"""
The adapters that an engine knows by name, and those that its context computes with.

Rules:
1. A request pins its adapters from the moment it is posted until it has ended. An adapter is
   freed after all requests that have pinned it, between two steps.
2. All together are within the limit at every moment. What nobody has pinned gives way, the
   longest unused first.
3. A name that is unloaded, or loaded anew, is of no use to requests that have not entered yet.
4. To change the adapters of a context makes libllama prepare all graphs anew, within the next
   decode. What that costs is how much longer the first decode with a set takes than the next one
   of as many tokens.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from itertools import chain, count
from pathlib import Path
from threading import RLock
from typing import Protocol

from pyllama_raw.core.request import Adapted, AdapterSet, Lot, Private, Request
from pyllama_raw.core.scheduling.lots import SWITCH_S
from pyllama_raw.errors import (
    AdapterLimit,
    AdapterLoadFailed,
    AdapterNotFound,
    Unsupported,
    reason_of,
)
from pyllama_raw.native.context import Context
from pyllama_raw.native.model import Adapter

SMOOTHING = 0.25  # weight of the newest switch


class AdapterHost(Protocol):
    """The part of an executor that has adapters."""

    def load_adapter(self, path: str) -> Adapter:
        """Load an adapter of the model. Thread: any."""

    def add_adapter(self, number: int, adapter: Adapter) -> None:
        """Take it over: plans name it by *number*."""

    def remove_adapter(self, number: int) -> None:
        """Free it: no plan names it any more."""


@dataclass(slots=True, eq=False)
class KnownAdapter:
    """An adapter that is loaded, until it is freed."""

    name: str
    path: str
    n_bytes: int
    number: int  # in the executor
    digest: str  # of its file
    n_users: int = 0
    used: int = 0  # when, in the order of all uses
    is_named: bool = True  # new requests can have it


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """An adapter that requests can name."""

    name: str
    path: str
    n_bytes: int
    """Size of its file."""
    n_requests: int
    """Requests that use it and have not ended."""


class Adapters:
    """Belongs to one engine. Thread: any."""

    def __init__(self, host: AdapterHost | None = None, max_bytes: int = 0) -> None:
        """
        Args:
            host: None: the engine takes no adapters.
        """
        # Runs a function between two steps.
        self.post: Callable[[Callable[[], None]], Future[None]]
        self._host = host
        self._max_bytes = max_bytes
        self._lock = RLock()
        self._numbers, self._moments = count(1), count(1)
        self._by_name: dict[str, KnownAdapter] = {}
        self._all: dict[int, KnownAdapter] = {}  # by number, until they are freed
        self._n_bytes = 0  # of all, and of what is being loaded

    def all(self) -> tuple[AdapterInfo, ...]:
        """Adapters that requests can name, in the order of their loading."""
        with self._lock:
            entries = list(self._by_name.values())
        return tuple(AdapterInfo(e.name, e.path, e.n_bytes, e.n_users) for e in entries)

    def load(self, name: str, path: str) -> None:
        """
        Have requests find the file at *path* by *name*; blocks meanwhile.

        Raises:
            Unsupported: the engine takes no adapters.
            AdapterLoadFailed: there is no such file, it is damaged, or of another model.
            AdapterLimit: those in use leave no room for it.
        """
        host = self._host
        if host is None:
            reason = "this engine generates no text, or reads prompts with an encoder"
            raise Unsupported("adapters", reason)
        try:
            n_bytes = Path(path).stat().st_size
        except (OSError, ValueError) as error:
            reason = reason_of(error)
            raise AdapterLoadFailed(path, reason) from None
        self._reserve(n_bytes)
        # Read and checked here; the engine thread takes it over between two steps.
        with ExitStack() as undo:
            undo.callback(self._give_back, n_bytes)
            adapter, number = host.load_adapter(path), next(self._numbers)
            undo.callback(adapter.close)
            self.post(partial(host.add_adapter, number, adapter)).result()
            undo.pop_all()
        # The newest name counts. An earlier adapter of that name goes as if unloaded.
        moment = next(self._moments)
        entry = KnownAdapter(name, path, n_bytes, number, adapter.digest, used=moment)
        with self._lock:
            if name in self._by_name:
                self._retire(self._by_name[name])
            self._by_name[name] = self._all[entry.number] = entry

    def unload(self, name: str) -> None:
        """No further request gets it; freed once its requests have ended."""
        with self._lock:
            if name not in self._by_name:
                raise AdapterNotFound(name)
            self._retire(self._by_name[name])

    def adapt(self, request: Request, scales: Mapping[str, float]) -> Request:
        """
        *request*, computed with the adapters that *scales* name, as far as they change anything.

        They decide the lot of its rows, and the namespace of its prefixes.

        Raises:
            AdapterNotFound: there is none of that name.
        """
        selection: list[tuple[KnownAdapter, float]] = []
        with self._lock:
            for name in sorted(scales):
                if name not in self._by_name:
                    raise AdapterNotFound(name)
                # libllama has scales of 32 bits, and equal ones are one lot.
                (scale,) = struct.unpack("f", struct.pack("f", scales[name]))  # as in C
                if scale:
                    selection.append((self._by_name[name], scale))
        if not selection:
            return request
        names = ", ".join(f"{entry.name}={scale:g}" for entry, scale in selection)
        numbers = tuple(sorted((entry.number, scale) for entry, scale in selection))
        namespace = request.namespace
        # Prefixes are shared by requests with equal adapters only.
        if not isinstance(namespace, Private):
            assert not isinstance(namespace, Adapted)
            facts = sorted((entry.digest, scale) for entry, scale in selection)
            digest = sha256(json.dumps(facts).encode()).hexdigest()
            namespace = Adapted(digest, namespace)
        lot = Lot(f"tokens with {names}", adapters=numbers)
        return replace(request, lot=lot, namespace=namespace)

    def pin(self, requests: Iterable[Request]) -> list[tuple[KnownAdapter, ...]]:
        """
        Keep what each of *requests* uses, until unpin().

        Raises:
            AdapterNotFound: one is not there any more, and nothing is pinned.
        """
        with self._lock:
            pinned = [self._entries(request) for request in requests]
            for entry in chain(*pinned):
                entry.n_users += 1
                entry.used = next(self._moments)
        return pinned

    def _entries(self, request: Request) -> tuple[KnownAdapter, ...]:
        entries = [self._all.get(number) for number, _ in request.lot.adapters]
        available = tuple(entry for entry in entries if entry and entry.is_named)
        if len(available) < len(entries):
            raise AdapterNotFound(request.lot.name)
        return available

    def unpin(self, pinned: Iterable[KnownAdapter]) -> None:
        """A request that used *pinned* has ended."""
        if not pinned:
            return
        with self._lock:
            for entry in pinned:
                entry.n_users -= 1
                if not (entry.is_named or entry.n_users):
                    self._free(entry)

    def _give_back(self, n_bytes: int) -> None:
        with self._lock:
            self._n_bytes -= n_bytes

    def _reserve(self, n_bytes: int) -> None:
        """Count *n_bytes*, and wait until what gives way for them is freed."""
        with self._lock:
            # Those that nobody uses give way, the longest unused first.
            idle = sorted(
                (entry for entry in self._by_name.values() if not entry.n_users),
                key=lambda entry: entry.used,
            )
            n_total = self._n_bytes + n_bytes
            if n_total - sum(entry.n_bytes for entry in idle) > self._max_bytes:
                raise AdapterLimit(n_total, self._max_bytes)
            freed = []
            for entry in idle:
                if self._n_bytes + n_bytes > self._max_bytes:
                    freed += self._retire(entry)
            self._n_bytes += n_bytes
        # The engine thread frees them, outside of the lock.
        for future in freed:
            future.result()

    def _retire(self, entry: KnownAdapter) -> list[Future[None]]:
        entry.is_named = False
        del self._by_name[entry.name]
        return [] if entry.n_users else [self._free(entry)]

    def _free(self, entry: KnownAdapter) -> Future[None]:
        assert self._host is not None
        del self._all[entry.number]
        self._give_back(entry.n_bytes)
        return self.post(partial(self._host.remove_adapter, entry.number))


class AdapterSets:
    """Belongs to the engine thread; outlives the context."""

    def __init__(self) -> None:
        self.on: AdapterSet = ()  # what the context computes with
        self.n_switches = 0
        self.spent_s = 0.0  # on switches, by what one costs
        self.switch_s = SWITCH_S  # what one costs
        self._adapters: dict[int, Adapter] = {}
        # Whether the next decode is one of the first two after a switch.
        self.is_learning = False
        self._first = 0, 0  # tokens and time of the first one

    def add(self, number: int, adapter: Adapter) -> None:
        """Take over *adapter*, which sets name by *number* from now on."""
        self._adapters[number] = adapter

    def remove(self, number: int, context: Context) -> None:
        """Free an adapter, which no set of a plan names any more."""
        # The context must not compute with what is freed.
        if self.is_on(number):
            self.switch(context, ())
        self._adapters.pop(number).close()

    def switch(self, context: Context, adapters: AdapterSet) -> None:
        """Have *context*, with no step ahead, compute with *adapters*. Raises NativeError."""
        context.set_adapters([(self._adapters[n], scale) for n, scale in adapters])
        self.on, self.is_learning, self._first = adapters, True, (0, 0)
        self.n_switches += 1
        self.spent_s += self.switch_s

    def is_on(self, number: int) -> bool:
        """Whether the context computes with that adapter."""
        return any(number == active for active, _ in self.on)

    def learned(self, n_tokens: int, decode_ns: int) -> float | None:
        """Learn from a decode; returns the cost of a switch, if it is known better now."""
        n_first, first_ns = self._first
        self.is_learning, self._first = not n_first, (n_tokens, decode_ns)
        # Only decodes of as many tokens can be compared.
        if n_first != n_tokens:
            return None
        measured_s = max(first_ns - decode_ns, 0) / 1e9
        self.switch_s += SMOOTHING * (measured_s - self.switch_s)
        return self.switch_s

    def renew(self) -> None:
        """The context is a new one, which has none."""
        self.on, self.is_learning = (), False

    def close(self) -> None:
        """Free all, after the context."""
        for adapter in self._adapters.values():
            adapter.close()
        self._adapters.clear()
