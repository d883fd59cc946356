"""The tiny models there are: at least one of every memory class libllama has."""

from __future__ import annotations

from scripts.tiny_models import vocab
from scripts.tiny_models.recipe import N_EMBD, Recipe, experts, sizes, state_space

N_SWA = 32  # small, so that a test leaves the window after a few tokens

# Head size 64 in llama and qwen2: every backend has flash attention for it.
LLAMA = sizes(2, 2, n_embd=128)
WINDOW = {"attention.sliding_window": N_SWA}
GROUPED = state_space(group_count=2)  # mamba-2 and its hybrids
DELTA_NET = state_space(state_size=32, group_count=2)  # the linear attention of Qwen
HEADS = [0, 2]  # layer 0 is recurrent, layer 1 has attention

ATTENTION = (
    Recipe("llama", "llama", LLAMA),
    Recipe("llama-bytes", "llama", LLAMA, output="bytes"),
    Recipe("llama-ends", "llama", LLAMA, output="ends"),
    Recipe("llama-no-vocab", "llama", LLAMA, has_vocab=False),
    Recipe("qwen2", "qwen2", sizes(2, 1, n_embd=128)),
    Recipe("bloom", "bloom", sizes(2, 2, attention__layer_norm_epsilon=1e-5)),  # ALiBi
    Recipe("llama-moe", "llama", sizes(2, 1) | experts()),
    Recipe("qwen3moe", "qwen3moe", sizes(2, 1) | experts()),
    Recipe(
        "qwen2vl",
        "qwen2vl",
        sizes(2, 1, rope__dimension_sections=[4, 6, 6, 0]),
        mrope=True,
    ),
)
SWA = (
    Recipe(
        "gemma3",
        "gemma3",
        sizes(2, 1, attention__sliding_window_pattern=2) | WINDOW,
        memory="swa",
        n_swa=N_SWA,
        embedding_scale=N_EMBD**0.5,
    ),
    Recipe(
        "gpt-oss",
        "gpt-oss",
        sizes(2, 1, attention__sliding_window_pattern=2) | WINDOW | experts(),
        memory="swa",
        n_swa=N_SWA,
    ),
)
RECURRENT = (
    Recipe("mamba", "mamba", sizes(0, 0) | state_space(), memory="recurrent"),
    Recipe("mamba2", "mamba2", sizes(0, 0) | GROUPED, memory="recurrent"),
    Recipe(
        "rwkv7",
        "rwkv7",
        sizes(
            0,
            0,
            attention__layer_norm_epsilon=1e-5,
            attention__decay_lora_rank=8,
            attention__iclr_lora_rank=8,
            attention__value_residual_mix_lora_rank=8,
            attention__gate_lora_rank=8,
            wkv__head_size=64,  # the vector code of the CPU computes nothing smaller
        ),
        memory="recurrent",
    ),
)
HYBRID = (
    Recipe("jamba", "jamba", sizes(2, HEADS) | state_space(), memory="hybrid"),
    Recipe("falcon-h1", "falcon-h1", sizes(2, 1) | GROUPED, memory="hybrid"),
    Recipe(
        "granitehybrid", "granitehybrid", sizes(2, HEADS) | GROUPED, memory="hybrid"
    ),
    Recipe(
        "nemotron_h",  # one of each: mixer, attention, feed-forward
        "nemotron_h",
        sizes(
            2,
            [0, 2, 0],
            n_layer=3,
            n_ff=[0, 0, 2 * N_EMBD],
            attention__layer_norm_epsilon=1e-5,
        )
        | GROUPED,
        memory="hybrid",
    ),
    Recipe("lfm2", "lfm2", sizes(2, HEADS, shortconv__l_cache=3), memory="hybrid"),
    Recipe(
        "lfm2-swa",
        "lfm2",
        sizes(2, HEADS, shortconv__l_cache=3) | WINDOW,
        memory="hybrid",
        n_swa=N_SWA,
    ),
    Recipe(
        "qwen3next",
        "qwen3next",
        sizes(2, 1, full_attention_interval=2) | DELTA_NET | experts(),
        memory="hybrid",
    ),
    Recipe(
        "qwen35",
        "qwen35",
        sizes(2, 1, full_attention_interval=2, rope__dimension_sections=[4, 6, 6, 0])
        | DELTA_NET,
        memory="hybrid",
        mrope=True,
    ),
)
MEAN, CLS, LAST, RANK = range(1, 5)  # llama.h: enum llama_pooling_type
BERT = sizes(2, 2, attention__layer_norm_epsilon=1e-5, attention__causal=False)
LABELS = {"classifier.output_labels": ["yes", "no", "maybe"]}
PAIRED = {"tokenizer.ggml.add_eos_token": True, "tokenizer.ggml.add_sep_token": True}
EMBEDDING = (
    Recipe("bert", "bert", BERT | {"pooling_type": MEAN}, memory="none"),
    Recipe("bert-cls", "bert", BERT | {"pooling_type": CLS}, memory="none"),
    Recipe("bert-unpooled", "bert", BERT, memory="none"),
    Recipe(
        "bert-rank", "bert", BERT | {"pooling_type": RANK}, memory="none", more=PAIRED
    ),
    Recipe(
        "bert-labels", "bert", BERT | {"pooling_type": RANK} | LABELS, memory="none"
    ),
    Recipe(  # rows of several parts for float_tile.h, the last one uneven
        "bert-wide",
        "bert",
        BERT | {"pooling_type": RANK, "feed_forward_length": 912},
        memory="none",
        more=PAIRED,
    ),
    Recipe(
        "nomic-bert-moe",
        "nomic-bert-moe",
        BERT | experts() | {"moe_every_n_layers": 2, "pooling_type": MEAN},
        memory="none",
    ),
    Recipe("nomic-bert", "nomic-bert", BERT | {"pooling_type": MEAN}, memory="none"),
    Recipe(
        "jina-bert-v2", "jina-bert-v2", BERT | {"pooling_type": MEAN}, memory="none"
    ),
    Recipe(
        "jina-bert-v3", "jina-bert-v3", BERT | {"pooling_type": MEAN}, memory="none"
    ),
    Recipe(
        "llama-embed",
        "llama-embed",
        sizes(2, 1, pooling_type=MEAN, attention__causal=False),
    ),
    Recipe("modern-bert", "modern-bert", BERT | {"pooling_type": CLS}, memory="none"),
    Recipe("neo-bert", "neo-bert", BERT | {"pooling_type": CLS}, memory="none"),
    Recipe("eurobert", "eurobert", BERT | {"pooling_type": MEAN}, memory="none"),
    Recipe(
        "gemma-embedding",
        "gemma-embedding",
        sizes(2, 1, pooling_type=MEAN, attention__causal=False) | WINDOW,
        memory="none",
        n_swa=N_SWA,
    ),
    Recipe("qwen3-embedding", "qwen3", sizes(2, 1, pooling_type=LAST)),
    Recipe("qwen3-rank", "qwen3", sizes(2, 1, pooling_type=RANK) | LABELS),
)
T5 = sizes(2, 2, attention__relative_buckets_count=8, decoder_start_token_id=vocab.PAD)
OTHER = (
    # As the first T5, by ReLU: sums in 32 bits move last digits only.
    Recipe("t5", "t5", T5, encoder=True, without=("*ffn_gate*",)),
    # As Flan-T5, by GELU with a gate, which libllama rounds to 16 bits.
    Recipe("t5-gated", "t5", T5, encoder=True),
    Recipe(
        "t5encoder",
        "t5encoder",
        sizes(2, 2, attention__relative_buckets_count=8, pooling_type=MEAN),
        encoder=True,
    ),
    Recipe("llada", "llada", LLAMA, memory="none", diffusion=True),
)
MISCOMPUTED = (
    Recipe("cogvlm", "cogvlm", sizes(2, 2), miscomputed=True),
    Recipe(
        "plamo2",
        "plamo2",
        sizes(2, HEADS) | state_space(group_count=0),
        memory="hybrid",
        miscomputed=True,
    ),
    # Of the last state a token keeps little, so a wrong one moves rows a little.
    Recipe(
        "plamo2-faint",
        "plamo2",
        sizes(2, [2, 0], n_embd=128)
        | state_space(group_count=0, inner_size=256, state_size=64, time_step_rank=2),
        memory="hybrid",
        miscomputed=True,
        deviation=0.1,
    ),
)

RECIPES = {
    recipe.name: recipe
    for recipe in (
        *ATTENTION,
        *SWA,
        *RECURRENT,
        *HYBRID,
        *EMBEDDING,
        *OTHER,
        *MISCOMPUTED,
    )
}
