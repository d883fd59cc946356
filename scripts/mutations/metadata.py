"""What can be wrong with the metadata of a model file."""

from __future__ import annotations

import random

from scripts.mutations.gguf_file import (
    ARRAY,
    F32,
    FORMATS,
    I32,
    STRING,
    U32,
    File,
    Scalar,
    Value,
)
from scripts.mutations.numbers import NUMBERS, REALS, number_like

TEXTS = (
    b"",
    b"\0",
    b"a\0b",
    b"\xff\xfe",
    b"x" * 300,
    b"x" * 70_000,
    b"\n",
    b"{{",
    b"%s%n",
)
TOKENIZERS = (
    b"gpt2",
    b"llama",
    b"bert",
    b"t5",
    b"rwkv",
    b"plamo2",
    b"none",
    b"no_vocab",
    b"",
)
PRES = (
    b"default",
    b"llama-bpe",
    b"gpt-2",
    b"deepseek-llm",
    b"tekken",
    b"whitespace",
    b"x",
)
# Keys that files may have beside those of the tiny models; * stands for the architecture.
OPTIONAL = tuple(
    line.encode()
    for line in [
        "*.attention.causal",
        "*.attention.clamp_kqv",
        "*.attention.group_norm_epsilon",
        "*.attention.group_norm_groups",
        "*.attention.indexer.head_count",
        "*.attention.indexer.key_length",
        "*.attention.indexer.top_k",
        "*.attention.key_length",
        "*.attention.key_length_mla",
        "*.attention.key_length_swa",
        "*.attention.kv_lora_rank",
        "*.attention.layer_norm_epsilon",
        "*.attention.max_alibi_bias",
        "*.attention.output_scale",
        "*.attention.q_lora_rank",
        "*.attention.relative_buckets_count",
        "*.attention.scale",
        "*.attention.shared_kv_layers",
        "*.attention.sliding_window",
        "*.attention.sliding_window_pattern",
        "*.attention.temperature_length",
        "*.attention.temperature_scale",
        "*.attention.value_length",
        "*.attention.value_length_mla",
        "*.attn_logit_softcapping",
        "*.decoder_block_count",
        "*.decoder_start_token_id",
        "*.embedding_length_out",
        "*.embedding_scale",
        "*.expert_count",
        "*.expert_feed_forward_length",
        "*.expert_gating_func",
        "*.expert_group_count",
        "*.expert_group_used_count",
        "*.expert_shared_count",
        "*.expert_used_count",
        "*.expert_weights_norm",
        "*.expert_weights_scale",
        "*.features_length",
        "*.final_logit_softcapping",
        "*.full_attention_interval",
        "*.interleave_moe_layer_step",
        "*.leading_dense_block_count",
        "*.logit_scale",
        "*.moe_every_n_layers",
        "*.nextn_predict_layers",
        "*.n_deepstack_layers",
        "*.pooling_type",
        "*.residual_scale",
        "*.rope.dimension_count",
        "*.rope.dimension_count_swa",
        "*.rope.dimension_sections",
        "*.rope.freq_base",
        "*.rope.freq_base_swa",
        "*.rope.scale_linear",
        "*.rope.scaling.alpha",
        "*.rope.scaling.attn_factor",
        "*.rope.scaling.factor",
        "*.rope.scaling.finetuned",
        "*.rope.scaling.original_context_length",
        "*.rope.scaling.type",
        "*.rope.scaling.yarn_attn_factor",
        "*.rope.scaling.yarn_beta_fast",
        "*.rope.scaling.yarn_ext_factor",
        "*.rope.scaling.yarn_log_multiplier",
        "*.shortconv.l_cache",
        "*.ssm.conv_kernel",
        "*.ssm.dt_b_c_rms",
        "*.ssm.group_count",
        "*.ssm.inner_size",
        "*.ssm.state_size",
        "*.ssm.time_step_rank",
        "*.swin_norm",
        "*.tensor_data_layout",
        "*.token_shift_count",
        "*.use_parallel_residual",
        "*.vocab_size",
        "*.wkv.head_size",
        "general.alignment",
        "general.file_type",
        "general.quantization_version",
        "general.type",
        "split.count",
        "split.no",
        "split.tensors.count",
        "tokenizer.chat_template",
        "tokenizer.ggml.add_bos_token",
        "tokenizer.ggml.add_eos_token",
        "tokenizer.ggml.add_sep_token",
        "tokenizer.ggml.add_space_prefix",
        "tokenizer.ggml.eom_token_id",
        "tokenizer.ggml.eot_token_id",
        "tokenizer.ggml.fim_pad_token_id",
        "tokenizer.ggml.fim_pre_token_id",
        "tokenizer.ggml.precompiled_charsmap",
        "tokenizer.ggml.remove_extra_whitespaces",
        "tokenizer.ggml.scores",
        "tokenizer.ggml.suppress_tokens",
        "tokenizer.ggml.token_type_count",
        "tokenizer.ggml.unknown_token_id",
    ]
)


def architectures() -> list[bytes]:
    """Names of architectures; one of them is what a file says it has."""
    from scripts.tiny_models.recipes import RECIPES

    names = b"cogvlm plamo2 gemma2 phi3 falcon bloom mpt gptneox command-r deepseek2"
    names += b" t5encoder rwkv6 arwkv7 olmo clip gpt2 starcoder baichuan mistral3 grok"
    return sorted(
        {recipe.arch.encode() for recipe in RECIPES.values()} | set(names.split())
    )


def of_kind(file: File, arrays: bool, kinds: set[int]) -> list[bytes]:
    return [
        key
        for key, value in file.values.items()
        if isinstance(value.data, list) == arrays
        and (value.item_type if arrays else value.type) in kinds
    ]


def change_number(rng: random.Random, file: File) -> str:
    """A hyperparameter or id has another value."""
    key = rng.choice(of_kind(file, arrays=False, kinds=set(FORMATS)))
    value = file.values[key]
    assert not isinstance(value.data, list)
    value.data = number_like(rng, value.type, value.data)
    return f"{key.decode()}={value.data!r}"


def change_id(rng: random.Random, file: File) -> str:
    """A special token is none of the vocabulary's."""
    keys = [key for key in file.values if key.endswith(b"_token_id")]
    key = rng.choice(keys or [b"tokenizer.ggml.bos_token_id"])
    file.values[key] = Value(U32, rng.choice(NUMBERS))
    return f"{key.decode()}={file.values[key].data!r}"


def add_key(rng: random.Random, file: File) -> str:
    """A key that other models have."""
    key = rng.choice(OPTIONAL).replace(b"*", architecture(file))
    kind = rng.choice((U32, U32, U32, F32, F32, I32, 7, STRING, ARRAY))
    if kind == ARRAY:
        item = rng.choice((U32, I32, F32, STRING))
        count = rng.choice((0, 1, 2, 3, 4, 5, 512, 513))
        file.values[key] = Value(ARRAY, [random_scalar(rng, item)] * count, item)
    else:
        file.values[key] = Value(kind, random_scalar(rng, kind))
    return f"{key.decode()}: {str(file.values[key].data)[:60]} as {kind}"


def architecture(file: File) -> bytes:
    """Of *file*, which may have lost it to another mutation."""
    value = file.values.get(b"general.architecture")
    return value.data if value and isinstance(value.data, bytes) else b"llama"


def random_scalar(rng: random.Random, kind: int) -> Scalar:
    if kind == STRING:
        return rng.choice((*TEXTS, b"yarn", b"linear", b"longrope", b"none"))
    return number_like(rng, kind, 2)


def remove_key(rng: random.Random, file: File) -> str:
    key = rng.choice(list(file.values))
    del file.values[key]
    return key.decode()


def change_type(rng: random.Random, file: File) -> str:
    """A value is of another type; what it was is kept as far as that can be."""
    key = rng.choice(list(file.values))
    value = file.values[key]
    old = value.data
    kind = rng.choice((*FORMATS, STRING, ARRAY, 13, 200))
    first = (old[0] if old else 0) if isinstance(old, list) else old
    if kind == ARRAY:
        item = rng.choice((*FORMATS, STRING))
        file.values[key] = Value(ARRAY, [first] * rng.choice((0, 1, 2, 5)), item)
    elif isinstance(old, list) and rng.random() < 0.6:
        value.item_type = kind
    else:
        file.values[key] = Value(kind, first)
    return f"{key.decode()} as {kind}"


def change_array(rng: random.Random, file: File) -> str:
    """An array is longer, shorter, or has other numbers in it."""
    keys = of_kind(file, arrays=True, kinds=set(FORMATS) | {STRING})
    if not keys:
        return change_number(rng, file)
    key = rng.choice(keys)
    value = file.values[key]
    items = value.data
    assert isinstance(items, list)
    how = rng.choice(("empty", "cut", "one more", "double", "value", "shuffle"))
    if how == "empty" or not items:
        value.data = []
    elif how == "cut":
        del items[rng.randrange(len(items)) :]
    elif how == "one more":
        items.append(items[-1])
    elif how == "double":
        value.data = items * 2
    elif how == "shuffle":
        rng.shuffle(items)
    else:
        items[rng.randrange(len(items))] = other_item(rng, value.item_type, items[0])
    return f"{key.decode()} {how}"


def other_item(rng: random.Random, kind: int, old: Scalar) -> Scalar:
    if kind == STRING:
        return rng.choice((*TEXTS, b"a b c", b"a", b" ", old))
    return number_like(rng, kind, old)


def change_tokens(rng: random.Random, file: File) -> str:
    """Types, texts, scores or merges of many tokens are wrong."""
    key = rng.choice((b"tokens", b"token_type", b"merges", b"scores"))
    value = file.values.get(b"tokenizer.ggml." + key)
    n_tokens = 320
    if value is None or not isinstance(value.data, list):
        count = rng.choice((0, 1, n_tokens - 1, n_tokens, n_tokens + 1))
        scores: list[Scalar] = [rng.choice(REALS) for _ in range(count)]
        file.values[b"tokenizer.ggml.scores"] = Value(ARRAY, scores, F32)
        return f"{count} scores"
    for _ in range(rng.choice((1, 5, len(value.data) or 1))):
        if not value.data:
            break
        index = rng.randrange(len(value.data))
        if value.item_type == STRING:
            value.data[index] = rng.choice(
                (*TEXTS[:5], value.data[0], b"<0x00>", b"a b")
            )
        else:
            value.data[index] = rng.choice((0, 1, 2, 3, 4, 5, 6, 7, -1, 2**31 - 1))
    return key.decode()


def change_name(rng: random.Random, file: File) -> str:
    """Another architecture or tokenizer."""
    key, names = rng.choice(
        (
            (b"general.architecture", architectures()),
            (b"tokenizer.ggml.model", list(TOKENIZERS)),
            (b"tokenizer.ggml.pre", list(PRES)),
        )
    )
    name = rng.choice(names)
    if key == b"general.architecture":  # its keys go with it
        old = architecture(file)
        file.values = {
            name + k[len(old) :] if k.startswith(old + b".") else k: v
            for k, v in file.values.items()
        }
    file.values[key] = Value(STRING, name)
    return f"{key.decode()}={name!r}"


def change_text(rng: random.Random, file: File) -> str:
    keys = of_kind(file, arrays=False, kinds={STRING})
    key = rng.choice(keys)
    value = file.values[key]
    if rng.random() < 0.5:
        value.data = rng.choice(TEXTS)
    else:
        length = rng.choice((2**62, 2**64 - 1, 2**32, 2**31, 10**6))
        value.raw = length.to_bytes(8, "little") + b"text"
    return f"{key.decode()} {str(value.data)[:20]}"


def huge_array(rng: random.Random, file: File) -> str:
    """An array says that it is longer than it is."""
    key = rng.choice(
        of_kind(file, arrays=True, kinds=set(FORMATS) | {STRING}) or [b"x"]
    )
    value = file.values.get(key) or Value(ARRAY, [1, 2], U32)
    head = value.item_type.to_bytes(4, "little")
    count = rng.choice((2**16, 2**31, 2**40, 2**62, 2**64 - 1))
    body = value.encode()[16:]
    file.values[key] = Value(ARRAY, [], raw=head + count.to_bytes(8, "little") + body)
    return f"{key.decode()} {count}"


def change_header(rng: random.Random, file: File) -> str:
    counts = (0, 1, -1, 2**20, 2**31, 2**32, 2**40, 2**62, -(2**63), 2**63 - 1)
    field = rng.choice(("magic", "version", "n_tensors", "n_values"))
    if field == "magic":
        file.magic = rng.choice((b"GGML", b"gguf", b"FUGG", b"\0\0\0\0"))
    elif field == "version":
        file.version = rng.choice((0, 1, 2, 4, 2**24, 3 * 2**24, 2**32 - 1))
    elif field == "n_tensors":
        file.n_tensors = rng.choice(
            (*counts, len(file.tensors) - 1, len(file.tensors) + 1)
        )
    else:
        n = rng.choice((*counts, len(file.values) - 1, len(file.values) + 1))
        file.n_values = n % 2**64
    return field
