"""The view that a scheduling policy has of a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from pyllama_raw.core.request import Value
from pyllama_raw.core.sequence import Running, Sequence

NO_DATA: Mapping[str, Value] = MappingProxyType({})


class RequestView:
    """
    A request as it is whenever it is looked at; no attribute can be set or deleted.

    It may be kept: then it keeps all of the request in memory. Thread: the engine's.
    """

    __slots__ = ("_running", "_sequence")
    _running: Callable[[int], Running | None]
    _sequence: Sequence

    def __init__(
        self, sequence: Sequence, running: Callable[[int], Running | None]
    ) -> None:
        """
        Args:
            running: finds by request_id what a slot has of it.
        """
        object.__setattr__(self, "_sequence", sequence)
        object.__setattr__(self, "_running", running)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"{name} cannot be set: a policy keeps what it notes itself"
        )

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{name} cannot be deleted: a view is for reading")

    def __repr__(self) -> str:
        names = (n for n, field in vars(RequestView).items() if type(field) is property)
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"RequestView({fields})"

    @property
    def request_id(self) -> int:
        return self._sequence.request.request_id

    @property
    def client(self) -> str | None:
        """The client that sent it."""
        return self._sequence.request.client

    @property
    def priority(self) -> int:
        """Lower is more urgent."""
        return self._sequence.request.priority

    @property
    def submitted(self) -> float:
        """The moment it came, on the clock of `SchedulerView.now`."""
        return self._sequence.submitted

    @property
    def admitted(self) -> float | None:
        """The moment it first got a slot, on the same clock."""
        return self._sequence.admitted

    @property
    def deadline(self) -> float | None:
        """The moment it ends at the latest, on the same clock."""
        return self._sequence.request.deadline

    @property
    def n_prompt(self) -> int:
        """Tokens."""
        return self._sequence.request.n_prompt

    @property
    def max_tokens(self) -> int:
        """Tokens of the output, at most."""
        return self._sequence.request.max_tokens

    @property
    def n_computed(self) -> int:
        """Tokens whose memory is in the slot; 0 without a slot."""
        running = self._running(self.request_id)
        return 0 if running is None else running.n_computed

    @property
    def n_behind(self) -> int:
        """Tokens known but not computed; a running one with 1 decodes."""
        return len(self._sequence.tokens) - self.n_computed

    @property
    def n_output(self) -> int:
        """Tokens sampled."""
        return self._sequence.n_output

    @property
    def n_preempted(self) -> int:
        """The number of times it lost its slot."""
        return self._sequence.n_preempted

    @property
    def data(self) -> Mapping[str, Value]:
        """The caller's `policy_data`."""
        return self._sequence.request.policy_data or NO_DATA
