"""
Rules that libllama assumes of the metadata and the tensors of some architectures.

A rule names the architectures that it is about, because a file may state keys that its
architecture never reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pyllama_raw.native.gguf_header import DamagedFile, Header


class NotZero(NamedTuple):
    """An integer that has to be 1 or more."""

    key: str  # without the architecture
    architectures: tuple[str, ...]
    because: str
    unless: str = ""  # a key that is read in its place
    given: str = ""  # a tensor of a layer; without one the key may be 0
    default: int = 1  # what libllama takes where a file does not state it


class Needs(NamedTuple):
    """Tensors that a graph reads without a look whether they are there."""

    architectures: tuple[str, ...]
    given: str  # a tensor of such a layer
    needed: tuple[str, ...]  # of the same layer
    instead: str = ""  # a tensor that stands for them
    zero: str = ""  # a key; where it is 0 the graph does not read them


_MAMBA2 = ("falcon-h1", "granitehybrid", "mamba2", "nemotron_h", "nemotron_h_moe")
_DELTA_NET = ("qwen35", "qwen35moe", "qwen3next")
_RWKV = ("arwkv7", "rwkv6", "rwkv6qwen2", "rwkv7")
_KIMI = ("kimi-k3", "kimi-linear")
_COMPRESSED = "layers with attn_k_b.weight keep their keys compressed"
NOT_ZERO = (
    NotZero("attention.key_length_mla", _KIMI, _COMPRESSED, given="attn_k_b.weight"),
    NotZero("attention.value_length_mla", _KIMI, _COMPRESSED, given="attn_k_b.weight"),
    NotZero(
        "attention.output_group_count",
        ("deepseek4",),
        "the heads are divided into so many groups",
    ),
    NotZero(
        "experts_per_group", ("grovemoe",), "the experts are divided into such groups"
    ),
    NotZero(
        "full_attention_interval",
        ("minimax-01", *_DELTA_NET),
        "one layer of so many has full attention",
        unless="attention.recurrent_layers",
    ),
    NotZero(
        "interleave_moe_layer_step",
        ("ernie4_5-moe",),
        "one layer of so many has experts",
    ),
    NotZero(
        "ssm.group_count",
        (*_MAMBA2, *_DELTA_NET),
        "the state is divided into so many groups",
    ),
    NotZero("ssm.inner_size", _DELTA_NET, "the state would have no place"),
    NotZero(
        "ssm.time_step_rank",
        (*_MAMBA2, "plamo2", *_DELTA_NET),
        "the state is divided into so many heads",
    ),
    NotZero(
        "attention.sliding_window",
        ("afmoe",),
        "its graph has layers with a window",
        default=0,
    ),
    NotZero("wkv.head_size", _RWKV, "the state is divided into heads of so many"),
)
_CONV, _ROUTER = "ssm_conv1d.weight", "ffn_gate_inp.weight"
_GATED = ("attn_qkv.weight", "attn_gate.weight")
_ATTENTION = ("attn_q.weight", "attn_k.weight", "attn_v.weight")
_INDEXER = ("proj", "attn_k", "attn_q_b")
_ROUTED = ("hy_v3", "mimo2", "step35")
NEEDS = (
    Needs(
        ("falcon-h1", "granitehybrid", "nemotron_h", "nemotron_h_moe"),
        _CONV,
        ("ssm_conv1d.bias",),
    ),
    Needs(("qwen35", "qwen35moe"), _CONV, _GATED),
    Needs(("qwen3next",), _CONV, _GATED, instead="ssm_in.weight"),
    Needs(
        ("glm-dsa",),
        "indexer.k_norm.weight",
        tuple(f"indexer.{name}.weight" for name in _INDEXER),
    ),
    Needs(("kimi-k3",), _ROUTER, ("ffn_up_shexp.weight", "ffn_down_shexp.weight")),
    Needs(
        _KIMI,
        "attn_kv_b.weight",
        ("attn_k_b.weight", "attn_v_b.weight"),
        zero="attention.key_length_mla",
    ),
    Needs(_ROUTED, _ROUTER, ("ffn_down_exps.weight",)),
    Needs(_ROUTED, _ROUTER, ("ffn_up_exps.weight",), instead="ffn_gate_up_exps.weight"),
    Needs(
        ("phi3", "pockettts"),
        "attn_output.weight",
        _ATTENTION,
        instead="attn_qkv.weight",
    ),
    Needs(("rwkv6qwen2",), "time_mix_first.weight", ("time_mix_ln.weight",)),
    Needs(("t5", "t5encoder"), "blk.0.attn_q.weight", ("blk.0.attn_rel_b.weight",)),
)
# Caches of the keys of indexers, whose width libllama divides by: some layer must have one.
INDEXED = ("deepseek4", "dots3note")


def check_rules(header: Header) -> None:
    """Raise DamagedFile if *header*, with the tensors of all files, breaks a rule."""
    arch = str(header.values.get("general.architecture", ""))
    names = {tensor.name for tensor in header.tensors}
    if arch in INDEXED and not any(n.endswith("indexer.proj.weight") for n in names):
        raise DamagedFile("no layer has the tensor 'indexer.proj.weight'")
    for rule in NOT_ZERO:
        if arch in rule.architectures:
            _check_value(rule, arch, header, names)
    for need in NEEDS:
        if (
            arch not in need.architectures
            or header.values.get(f"{arch}.{need.zero}") == 0
        ):
            continue
        for name in _missing(need, names):
            raise DamagedFile(f"tensor {name!r} is missing")


def _check_value(rule: NotZero, arch: str, header: Header, names: set[str]) -> None:
    stated = {**header.lengths, **header.values}
    key = f"{arch}.{rule.key}"
    is_read = any(name.endswith(rule.given) for name in names)
    if not is_read or f"{arch}.{rule.unless}" in stated:
        return
    if header.values.get(key, rule.default) == 0:
        what = "=0 is not allowed" if key in stated else " is not stated"
        raise DamagedFile(
            f"{key}{what}, because {rule.because}: "
            "the file, or kv_overrides, must give 1 or more"
        )


def _missing(need: Needs, names: set[str]) -> Iterator[str]:
    for name in names:
        layer = name.removesuffix(need.given)
        if layer == name or (need.instead and layer + need.instead in names):
            continue
        yield from (layer + one for one in need.needed if layer + one not in names)
