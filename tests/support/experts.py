"""
Which experts a model chose for each token, as the routers in libllama's graphs say.

A router chooses the experts with the largest scores: a discrete choice, like that of a
token. Where two of them nearly tie, last digits decide, and all that follows is other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pyllama_raw.native import context as context_module
from pyllama_raw.native.libllama import ffi, lib

N_USED = 2  # of each token, in the tiny models
SCORES = re.compile(r"ffn_moe_probs-(\d+)$")

Scores = NDArray[np.float32]  # [n_tokens, n_layers, n_experts]


class Parting(NamedTuple):
    """Two runs of the same tokens chose other experts."""

    position: int  # of the first token
    margin: float  # of the scores that decided, the largest


def parting(mine: Scores, others: Scores) -> Parting | None:
    """
    Where *mine* chose other experts than *others*, and at which margin.

    A choice counts for the margin unless an earlier one is its cause: that of a lower
    layer, for this token or one before it.
    """
    chosen, expected = _chosen(mine), _chosen(others)
    differs = (chosen != expected).any(axis=-1)
    # The last layer has no scores of tokens without logits.
    differs &= ~(np.isnan(mine) | np.isnan(others)).any(axis=-1)
    if not differs.any():
        return None
    before = np.logical_or.accumulate(differs, axis=0)
    below = np.logical_or.accumulate(before, axis=1)
    first = differs.copy()
    first[:, 1:] &= ~below[:, :-1]
    left_out = np.where(expected & ~chosen, others, -np.inf).max(axis=-1)
    taken = np.where(chosen & ~expected, others, np.inf).min(axis=-1)
    margin = float((left_out - taken)[first].max())
    return Parting(int(np.flatnonzero(differs.any(axis=1))[0]), margin)


def _chosen(scores: Scores) -> NDArray[np.bool_]:
    least = np.sort(scores, axis=-1)[..., -N_USED, None]
    return scores >= least


@dataclass(eq=False)
class Listener:
    """
    Listens to the graphs of contexts, beside our kernels. It outlives the contexts.

    Args:
        wants: called with each node, which our kernels have not seen yet; whether it is to be
            shown once it is computed.
        see: called with such a node, which is computed.
    """

    wants: Callable[[Any], bool]
    see: Callable[[Any], None]
    _callbacks: list[Any] = field(default_factory=list)

    def attach(self, params: Any) -> None:
        """To the context made from llama_context_params *params*."""
        kernels, data = params.cb_eval, params.cb_eval_user_data

        @ffi.callback("ggml_backend_sched_eval_callback")
        def on_node(node: Any, asks: bool, _: Any) -> bool:
            if not asks:
                self.see(node)
                return True
            is_wanted = self.wants(node)
            if kernels != ffi.NULL:
                kernels(node, asks, data)
            return is_wanted

        params.cb_eval = on_node
        self._callbacks.append(on_node)


class Routers:
    """Takes in the scores of experts."""

    def __init__(self) -> None:
        self.listener = Listener(self._wants, self._see)
        self._layers: dict[int, np.ndarray] = {}

    def _wants(self, node: Any) -> bool:
        return SCORES.match(name_of(node)) is not None

    def _see(self, node: Any) -> None:
        layer = SCORES.match(name_of(node))
        assert layer is not None
        self._layers[int(layer[1])] = _read(node)

    def take(self, has_logits: NDArray[np.bool_]) -> Scores:
        """
        What all routers said in the last decode, which was of one micro-batch.

        Args:
            has_logits: bool[n_tokens]; in the last layer libllama leaves others out, and
                their scores are nan.
        """
        layers = []
        for _, scores in sorted(self._layers.items()):
            rows = np.full((len(has_logits), scores.shape[1]), np.nan, np.float32)
            rows[... if len(scores) == len(has_logits) else has_logits] = scores
            layers.append(rows)
        return np.stack(layers, axis=1)


def name_of(node: Any) -> str:
    """The name of a node of a graph."""
    return str(ffi.string(lib.ggml_get_name(node)).decode())


def _read(node: Any) -> np.ndarray:
    """Scores of one layer; of probabilities the logarithms."""
    scores = np.empty((node.ne[1], node.ne[0]), np.float32)
    assert scores.nbytes == lib.ggml_nbytes(node)
    lib.ggml_backend_tensor_get(node, ffi.from_buffer(scores), 0, scores.nbytes)
    if (scores >= 0).all() and np.allclose(scores.sum(axis=1), 1, atol=1e-3):
        return np.log(np.maximum(scores, np.finfo(np.float32).tiny))
    return scores


@contextmanager
def listening() -> Iterator[Routers]:
    """To the routers of contexts that are made in this block."""
    routers = Routers()
    with attached(routers.listener):
        yield routers


@contextmanager
def attached(listener: Listener) -> Iterator[None]:
    """*listener* listens to the contexts that are made in this block."""
    context_module.lib = _Library(listener)
    try:
        yield
    finally:
        context_module.lib = lib


class _Library:
    """libllama, but for the making of contexts."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    def __getattr__(self, name: str) -> Any:
        return getattr(lib, name)

    def plr_context_new(self, model: Any, params: Any) -> Any:
        self._listener.attach(params)
        return lib.plr_context_new(model, params)
