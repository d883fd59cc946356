"""
Random weights that make a small model talk: varied, finite, the same on every machine.

A weight depends only on the names of model and tensor. Matrices keep the variance of what
goes through them; what a formula needs negative, positive or between 0 and 1 is so.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from fnmatch import fnmatch

import numpy as np
from numpy.typing import NDArray

from scripts.tiny_models import vocab
from scripts.tiny_models.recipe import Recipe

Array = NDArray[np.float32]
Rng = np.random.Generator
Shape = tuple[int, ...]  # the last axis is the one a product sums over

HISTORY_GAIN = 2.0  # what is remembered weighs more than the last token: fewer loops
OUTPUT_GAIN = 3.0  # logits of this standard deviation


def normal(mean: float, deviation: float) -> Callable[[Rng, Shape], Array]:
    return lambda rng, shape: rng.normal(mean, deviation, shape).astype(np.float32)


def uniform(low: float, high: float) -> Callable[[Rng, Shape], Array]:
    return lambda rng, shape: rng.uniform(low, high, shape).astype(np.float32)


def product(gain: float) -> Callable[[Rng, Shape], Array]:
    """A matrix whose product with a vector of variance 1 has variance gain squared."""
    return lambda rng, shape: normal(0, gain * shape[-1] ** -0.5)(rng, shape)


def filters(rng: Rng, shape: Shape) -> Array:
    """Filters of a convolution: what comes out has the variance of what goes in."""
    return normal(0, float(np.prod(shape[1:])) ** -0.5)(rng, shape)


def decay(rng: Rng, shape: Shape) -> Array:
    """Rates of forgetting: negative, from a few tokens to a few hundred."""
    return -np.exp(uniform(-3.0, 1.0)(rng, shape))


def passing(rng: Rng, shape: Shape) -> Array:
    """Of two halves the first as it is, and a little of the second."""
    n = shape[0]
    return np.hstack([np.eye(n), rng.normal(0, 0.02, (n, n))]).astype(np.float32)


RULES: tuple[tuple[str, Callable[[Rng, Shape], Array]], ...] = (
    ("*.ssm_a", decay),
    ("*.ssm_d", normal(1.0, 0.1)),
    ("*.ssm_dt.bias", normal(-2.0, 0.5)),
    ("*norm*.bias", normal(0.0, 0.1)),
    ("*.nextn.?norm.weight", normal(1.0, 0.0)),
    ("*.nextn.eh_proj.weight", passing),
    ("*norm*", normal(1.0, 0.1)),
    ("*time_mix_ln.weight", normal(1.0, 0.1)),
    ("*.ln[12].weight", normal(1.0, 0.1)),
    ("*patch_embd*", filters),
    ("*conv1d.[12].weight", filters),
    ("*lerp*", uniform(0.0, 1.0)),
    ("*time_mix_k_[ka].weight", normal(1.0, 0.1)),
    ("*time_mix_r_k.weight", normal(0.0, 0.3)),
    ("*time_mix_[wav]0.weight", normal(0.0, 1.0)),
    ("*attn_rel_b*", normal(0.0, 1.0)),
    ("*sinks*", normal(0.0, 1.0)),
    ("*.bias", normal(0.0, 0.1)),
    ("token_embd.weight", normal(0.0, 1.0)),
    ("token_types.weight", normal(0.0, 0.1)),
    ("*position_embd.weight", normal(0.0, 0.5)),
    ("output.weight", product(OUTPUT_GAIN)),
    ("*attn_[qk].weight", product(2.2)),
    ("*attn_output.weight", product(HISTORY_GAIN)),
    ("*cross_attn_o.weight", product(HISTORY_GAIN)),
    ("*ssm_out.weight", product(HISTORY_GAIN)),
    ("*shortconv.out_proj.weight", product(HISTORY_GAIN)),
    ("*time_mix_output.weight", product(HISTORY_GAIN)),
    ("*ffn_gate_inp.weight", product(2.0)),
    ("*", product(1.0)),
)


def make(recipe: Recipe, name: str, shape: Shape) -> Array:
    """The tensor *name* of the model *recipe*."""
    if recipe.fields.get("nextn_predict_layers"):
        name = name_behind_head(name)
    if recipe.deviation is not None:
        weight = normal(0, recipe.deviation)(rng_of(recipe.name, name), shape)
        return -np.abs(weight) if name.endswith(".ssm_a") else weight
    weight = draw(recipe.name, name, shape)
    if name == "token_embd.weight":
        weight /= recipe.embedding_scale
    elif name == "output.weight":
        # A token makes itself unlikely: fewer repetitions.
        weight -= draw(recipe.name, "token_embd.weight", shape) * shape[-1] ** -0.5
        if recipe.has_vocab:
            mute(weight, recipe)
    return weight


def name_behind_head(name: str) -> str:
    """
    The tensor of the model that a head behind one layer is like, so that it is often right.

    The head gets the table's row of a token, says what the layer would, and a little of its own.
    """
    name = re.sub(r"^blk\.1\.nextn\.shared_head_norm", "output_norm", name)
    return name if ".nextn." in name else re.sub(r"^blk\.1\.", "blk.0.", name)


def draw(owner: str, name: str, shape: Shape) -> Array:
    """Random numbers for the tensor of *owner*, by the first rule that fits *name*."""
    rule = next(rule for pattern, rule in RULES if fnmatch(name, pattern))
    return rule(rng_of(owner, name), shape)


def rng_of(owner: str, name: str) -> Rng:
    """What draws the tensor *name* of *owner*, the same numbers every time."""
    digest = hashlib.sha256(f"{owner}/{name}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "little"))


def mute(output: Array, recipe: Recipe) -> None:
    """A token whose row is 0 has logit 0: with hundreds of others it is never the largest."""
    output[len(output) - len(vocab.SPECIAL) :] = 0
    if recipe.output != "bytes":
        output[list(vocab.UNPRINTABLE)] = 0
    if recipe.output == "ends":
        rng = np.random.default_rng(0)
        rows = list(vocab.END_OF_GENERATION)
        output[rows] = product(OUTPUT_GAIN)(rng, output[rows].shape)
