"""
What each sampler stage does, written down in numpy from its definition, and candidates to
do it to.
"""

from collections.abc import Sequence

import numpy as np

from pyllama_raw.native.libllama import ffi, lib
from pyllama_raw.native.sampler import SamplerChain
from pyllama_raw.native.stages import (
    MIROSTAT_M,
    AdaptiveP,
    Dry,
    Mirostat,
    Nucleus,
    Penalties,
    Stage,
    Temperature,
    TopK,
    TopNSigma,
    Xtc,
)

CANDIDATE = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


class Candidates:
    """A llama_token_data_array that can be filled again and again."""

    def __init__(self, logits: np.ndarray) -> None:
        self._fresh = np.zeros(len(logits), CANDIDATE)
        self._fresh["id"] = np.arange(len(logits))
        self._fresh["logit"] = logits
        self._data = self._fresh.copy()
        self._view = ffi.new("llama_token_data_array *")

    def apply(self, chain: SamplerChain):
        self._data[:] = self._fresh
        self._view.data = ffi.cast("llama_token_data *", self._data.ctypes.data)
        self._view.size = len(self._fresh)
        self._view.selected, self._view.sorted = -1, False
        lib.llama_sampler_apply(chain.ptr, self._view)
        return self._view

    def draw(self, chain: SamplerChain) -> int:
        view = self.apply(chain)
        return int(view.data[view.selected].id)

    def left(self, chain: SamplerChain) -> np.ndarray:
        """Logits of what is left by id; -infinity is gone."""
        view = self.apply(chain)
        found = np.full(len(self._fresh), -np.inf)
        for i in range(view.size):
            found[view.data[i].id] = view.data[i].logit
        return found


def expected(stage: Stage, logits: np.ndarray, seen: Sequence[int] = ()) -> np.ndarray:
    """The logits that *stage* leaves, written down from its definition."""
    logits = logits.astype(np.float64)
    match stage:
        case Penalties():
            return penalized(stage, logits, seen)
        case Dry():
            return dried(stage, logits, seen)
        case Temperature() | AdaptiveP():
            return scaled(stage, logits)
        case Nucleus():
            return kept(stage, logits)
    return np.where(survives(stage, logits), logits, -np.inf)


def survives(stage: Stage, logits) -> np.ndarray:
    match stage:
        case TopNSigma(n):
            return logits >= logits.max() - n * logits.std()
        case TopK(k):
            return logits >= np.sort(logits)[-min(k, len(logits))]
        case Xtc(_, threshold):
            above = softmax(logits) >= threshold
            least = logits[above].min() if above.sum() > 1 else np.inf
            return ~above | (logits <= least)
    raise AssertionError(stage)


def scaled(stage: Temperature | AdaptiveP, logits) -> np.ndarray:
    p = softmax(logits)
    if isinstance(stage, AdaptiveP):
        distance = abs(p - stage.target) / 0.3
        return 5 - 10 * distance**2 / (1 + distance)
    if stage.spread == 0:
        return logits / stage.value
    entropy = -(p * np.log(p)).sum() / np.log(len(logits))
    low, high = max(stage.value - stage.spread, 0), stage.value + stage.spread
    return logits / (low + (high - low) * entropy**stage.exponent)


def penalized(stage: Penalties, logits, seen):
    found = logits.copy()
    recent = list(seen)[-stage.last_n :]
    for token in set(recent):
        x = found[token]
        x = x * stage.repeat if x <= 0 else x / stage.repeat
        found[token] = x - recent.count(token) * stage.frequency - stage.presence
    return found


def dried(stage: Dry, logits, seen):
    found, recent = logits.copy(), list(seen)[-stage.last_n :]
    longest: dict[int, int] = {}
    for i in range(1, len(recent)):
        length = 0
        while length < i and recent[i - 1 - length] == recent[-1 - length]:
            length += 1
        longest[recent[i]] = max(longest.get(recent[i], 0), length)
    for token, length in longest.items():
        over = length - stage.allowed_length
        if over >= 0:
            found[token] -= stage.multiplier * stage.base**over
    return found


def kept(stage: Nucleus, logits):
    p = softmax(logits)
    if stage.kind == "min_p":
        keep = p >= stage.p * p.max()
        keep |= np.isin(np.arange(len(p)), np.argsort(-p)[: stage.min_keep])
        return np.where(keep, logits, -np.inf)
    entropy = -(p * np.log(p)).sum()
    key = -p if stage.kind == "top_p" else abs(-np.log(p) - entropy)
    order = np.argsort(key, kind="stable")
    n_kept = int(np.searchsorted(np.cumsum(p[order]), stage.p)) + 1
    keep = order[: max(n_kept, stage.min_keep)]
    return np.where(np.isin(np.arange(len(p)), keep), logits, -np.inf)


def after(stages: Sequence[Stage], logits: np.ndarray, seen: Sequence[int] = ()):
    """The logits that *stages* leave, one after the other."""
    found = logits.astype(np.float64)
    for stage in stages:
        left = np.isfinite(found)
        if isinstance(stage, Penalties | Dry):
            found = np.where(left, expected(stage, found, seen), -np.inf)
        else:
            found[left] = expected(stage, found[left], seen)
    return found


def mirostat_first(stage: Mirostat, logits: np.ndarray, n_vocab: int) -> np.ndarray:
    """The logits the first draw is from, when mu is twice tau."""
    p, mu = softmax(logits), 2 * stage.tau
    if stage.version == 2:
        return np.where(-np.log2(p) <= mu, logits, -np.inf)
    rank = np.sort(p)[::-1][:MIROSTAT_M]
    t = np.log(np.arange(2, len(rank) + 1) / np.arange(1, len(rank)))
    s = (t * np.log(rank[:-1] / rank[1:])).sum() / (t * t).sum()
    e = s - 1
    k = int((e * 2**mu / (1 - float(n_vocab) ** -e)) ** (1 / s))
    return np.where(logits >= np.sort(logits)[-max(k, 1)], logits, -np.inf)


def infilled(
    logits: np.ndarray, pieces: Sequence[bytes], ends: frozenset[int]
) -> np.ndarray:
    """The logits of what infill keeps of the finite ones."""
    p, found = softmax(logits), logits.astype(np.float64)
    order = [int(i) for i in np.argsort(-p, kind="stable") if p[i] > 0]
    is_end = np.isin(np.arange(len(p)), list(ends))
    if 3 * p[is_end].sum() * len(order) > p[~is_end].sum():
        return np.where(is_end, found, -np.inf)
    for a in order:
        for b in order:
            gone = np.isneginf(found[[a, b]]).any() or a == b
            if gone or not pieces[a] or not pieces[b].startswith(pieces[a]):
                continue
            dst, src = (b, a) if p[b] > p[a] else (a, b)
            p[dst] += p[src]
            p[src], found[src] = 0, -np.inf
    keep = (p >= 0.2) | (is_end & (p > 0))
    n_text = int((keep & ~is_end).sum())
    assert n_text, "this reference does not know how nothing is left"
    p = np.where(keep, p, 0) / p[keep].sum()
    keep &= (p >= 1 / (n_text + 1)) | is_end
    return np.where(keep, found, -np.inf)
