"""
Every architecture of libllama, and what a tiny model of it states.

A key is written only where the loader demands it: learning.py finds that out. VALUES has what
is then written, MORE what the loader cannot ask for by name.
"""

from __future__ import annotations

from collections.abc import Mapping

from scripts.tiny_models import vocab
from scripts.tiny_models.recipe import N_CTX_TRAIN, N_EMBD

NAMES = tuple(
    """
    afmoe apertus arcee arctic arwkv7 baichuan bailingmoe bailingmoe2 bailingmoe3 bert bitnet
    bloom chameleon chatglm codeshell cogvlm cohere2 cohere2moe command-r dbrx deci deepseek
    deepseek2 deepseek2-ocr deepseek32 deepseek4 dflash dots1 dots3note dream eagle3 ernie4_5
    ernie4_5-moe eurobert exaone exaone-moe exaone4 falcon falcon-h1 gemma gemma-embedding
    gemma2 gemma3 gemma3n gemma4 gemma4-assistant glm-dsa glm4 glm4moe glm5-next gpt-oss gpt2
    gptj gptneox granite granite_swa granitehybrid granitemoe graniteswitch grok grovemoe
    hrm_text hunyuan-dense hunyuan-moe hunyuan_vl hy_v3 hy_v4 internlm2 jais jais2 jamba
    jina-bert-v2 jina-bert-v3 kimi-k3 kimi-linear laguna lfm2 lfm2moe llada llada-moe llama
    llama-embed llama4 maincoder mamba mamba2 maple mellum mimo2 minicpm minicpm3 minimax-01
    minimax-m2 minimax-m3 mistral3 mistral4 modern-bert mpt muse-glimmer nanbeige nemotron
    nemotron_h nemotron_h_moe neo-bert nomic-bert nomic-bert-moe olmo olmo2 olmoe openelm
    orion paddleocr pangu-embedded phi2 phi3 phimoe plamo plamo2 plamo3 plm pockettts qwen
    qwen2 qwen2moe qwen2vl qwen3 qwen35 qwen35moe qwen3moe qwen3next qwen3tts qwen3vl
    qwen3vlmoe qwen4exp refact rnd1 rwkv6 rwkv6qwen2 rwkv7 seed_oss smallthinker smollm3
    spark2_5 stablelm starcoder starcoder2 step35 t5 t5encoder talkie wavtokenizer-dec xverse
    """.split()  # noqa: SIM905 -- a hundred names
)
IMPOSSIBLE: Mapping[str, str] = {
    "dflash": "a draft, which needs the model beside it that it drafts for",
    "eagle3": "a draft, which needs the model beside it that it drafts for",
    "gemma4-assistant": "a draft, which needs the model beside it that it drafts for",
    "gptj": "libllama has its name and no loader",
    "wavtokenizer-dec": "its input is codes of sound: libllama has no graph of tokens",
}

BASE: Mapping[str, object] = {
    "context_length": N_CTX_TRAIN,
    "embedding_length": N_EMBD,
    "block_count": 2,
    "feed_forward_length": 2 * N_EMBD,
    "attention.head_count": 2,
}
VALUES: Mapping[str, object] = {
    "attention.clamp_kqv": 1.0,
    "attention.decay_lora_rank": 8,
    "attention.gate_lora_rank": 8,
    "attention.group_norm_epsilon": 1e-5,
    "attention.group_norm_groups": 8,
    "attention.iclr_lora_rank": 8,
    "attention.indexer.block_size": 4,
    "attention.indexer.head_count": 2,
    "attention.indexer.key_length": 64,  # the least that libllama has a rotation for
    "attention.indexer.kpool": 4,
    "attention.indexer.local_blocks": 1,
    "attention.indexer.top_k": 1024,
    "attention.indexer.types": [1, 0],
    "attention.key_length_mla": 32,
    "attention.key_length_swa": 32,
    "attention.kv_lora_rank": 32,
    "attention.layer_norm_epsilon": 1e-5,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.max_alibi_bias": 8.0,
    "attention.output_group_count": 2,
    "attention.output_lora_rank": 16,
    "attention.compress_rope_freq_base": 1e4,
    "attention.q_lora_rank": 32,
    "attention.relative_buckets_count": 8,
    "attention.scale": 0.2,
    "attention.sliding_window": 32,
    "attention.sliding_window_pattern": [1, 0],
    "attention.value_length_mla": 16,
    "attention.value_length_swa": 32,
    "attention.value_residual_mix_lora_rank": 8,
    "attn_res.block_size": 1,
    "activation.situ_beta": 4.0,
    "activation.situ_linear_beta": 25.0,
    "embedding_length_per_layer_input": 32,
    "embedding_scale": 1.0,
    "expert_chunk_feed_forward_length": 32,
    "expert_feed_forward_length": N_EMBD,
    "expert_gating_func": 2,
    "expert_group_scale": 1.0,
    "expert_shared_count": 1,
    "expert_shared_feed_forward_length": N_EMBD,
    "expert_weights_norm": True,
    "expert_weights_scale": 1.0,
    "experts_per_group": 2,
    "hash_layer_count": 0,
    "hrm.h_cycles": 2,
    "hrm.l_cycles": 2,
    "hrm.layers_per_stack": 1,
    "hyper_connection.count": 4,
    "hyper_connection.epsilon": 1e-6,
    "hyper_connection.low_rank": 8,
    "hyper_connection.magnitude": 2.0,
    "hyper_connection.sinkhorn_iterations": 2,
    "interleave_moe_layer_step": 2,
    "kda.head_dim": 32,
    "kda.safe_gate": True,
    "kda.gate_lower_bound": -5.0,
    "leading_dense_block_count": 1,
    "logit_scale": 1.0,
    "moe_every_n_layers": 2,
    "num_loops": 1,
    "residual_scale": 1.0,
    "rope.dimension_sections": [4, 6, 6, 0],
    "shortconv.l_cache": 3,
    "ssm.conv_kernel": 4,
    "ssm.group_count": 2,
    "ssm.inner_size": 2 * N_EMBD,
    "ssm.state_size": 32,
    "ssm.time_step_rank": 4,
    "swiglu_clamp_exp": 7.0,
    "target_hidden_size": N_EMBD,
    "time_decay_extra_dim": 16,
    "time_mix_extra_dim": 16,
    "use_parallel_residual": False,
    "wkv.head_size": 64,  # the vector code of the CPU computes nothing smaller
    "xielu.alpha_n": 1.0,
    "xielu.alpha_p": 1.0,
    "xielu.beta": 1.0,
    "xielu.eps": 1e-6,
}

_EXPERTS = {"expert_count": 4, "expert_used_count": 2}
_LATENT = {  # keys and values are kept as one vector of kv_lora_rank
    "attention.head_count": 2,
    "attention.head_count_kv": 1,
    "attention.key_length": 48,
    "attention.key_length_mla": 32,
    "attention.value_length": 32,
    "attention.value_length_mla": 16,
    "rope.dimension_count": 16,
}
_MIXTURES = """
    afmoe arctic bailingmoe bailingmoe2 bailingmoe3 cohere2moe dbrx deepseek deepseek2
    deepseek2-ocr deepseek32 deepseek4 dots1 dots3note ernie4_5-moe exaone-moe glm-dsa glm4moe
    glm5-next gpt-oss grok grovemoe hunyuan-moe hy_v3 hy_v4 kimi-k3 kimi-linear laguna lfm2moe
    llada-moe llama4 maple mellum mimo2 minimax-01 minimax-m2 minimax-m3 mistral4
    nemotron_h_moe olmoe phimoe qwen2moe qwen35moe qwen3moe qwen3next qwen3vlmoe qwen4exp rnd1
    smallthinker step35
""".split()  # noqa: SIM905
_DELTA_FIRST = _LATENT | {"attention.head_count_kv": [0, 1]}  # layer 0 has no attention
_WINDOWED_LATENT = {
    f"{key}_swa": _LATENT.get(key, 32)
    for key in (
        "attention.kv_lora_rank",
        "attention.key_length",
        "attention.key_length_mla",
        "attention.value_length",
        "attention.value_length_mla",
    )
}
_MEAN, _UNGROUPED = {"pooling_type": 1}, {"expert_gating_func": 2}
_MIXED = {"attention.head_count_kv": [0, 2]}  # layer 0 has no attention
_EVERY_SECOND = {"full_attention_interval": 2}
_SPECIAL: Mapping[str, Mapping[str, object]] = {
    "afmoe": {"attention.sliding_window": 32, "block_count": 4},
    "arwkv7": {"attention.gate_lora_rank": 8, "token_shift_count": 1},
    "bailingmoe3": _DELTA_FIRST,
    "bert": _MEAN,
    "cohere2moe": {"attention.layer_norm_epsilon": 1e-5},
    "deepseek2": _LATENT,
    "deepseek32": _LATENT,
    "deepseek4": {
        "attention.compress_ratios": [0, 4],
        "attention.head_count_kv": 1,
        "expert_gating_func": 4,
        "rope.dimension_count": 16,
    },
    "dots1": _UNGROUPED,
    "dots3note": {
        **_LATENT,
        **_WINDOWED_LATENT,
        "attention.indexer.types": [0, 1],
        "rope.freq_base_swa": 1e4,
    },
    "eurobert": _MEAN,
    "gemma-embedding": _MEAN | {"block_count": 6},  # the sixth layer sees everything
    "gemma4-assistant": {"embedding_length_out": 2 * N_EMBD},
    "glm-dsa": _LATENT,
    "glm5-next": _DELTA_FIRST | {"rope.dimension_count": 0, "attention.key_length": 32},
    "granitehybrid": _MIXED,
    "graniteswitch": {
        "adapters.count": 1,
        "adapters.lora_rank": 4,
        "adapters.token_ids_activate": [vocab.MASK],
        "adapters.token_ids_substitute": [vocab.SEP],
    },
    "hrm_text": {"block_count": 6},  # two stacks of one layer, in two times three turns
    "hy_v4": _LATENT | _UNGROUPED,
    "jamba": _MIXED,
    "jina-bert-v2": _MEAN,
    "jina-bert-v3": _MEAN,
    "kimi-k3": _DELTA_FIRST,
    "kimi-linear": _DELTA_FIRST,
    "lfm2": _MIXED,
    "lfm2moe": _MIXED,
    "llama-embed": _MEAN,
    "llama4": {"block_count": 4},  # the fourth layer sees everything
    "minimax-01": _EVERY_SECOND,
    "minimax-m2": _UNGROUPED,
    "mistral4": _LATENT,
    "modern-bert": _MEAN,
    "nemotron_h": {
        "block_count": 3,
        "attention.head_count_kv": [0, 2, 0],
        "feed_forward_length": [0, 0, 2 * N_EMBD],
    },
    "nemotron_h_moe": {
        "block_count": 3,
        "attention.head_count_kv": [0, 2, 0],
        "feed_forward_length": [0, 0, 2 * N_EMBD],
        "expert_feed_forward_length": N_EMBD,
        "expert_shared_feed_forward_length": N_EMBD,
    },
    "neo-bert": _MEAN,
    "nomic-bert": _MEAN,
    "nomic-bert-moe": _MEAN | _EXPERTS,
    "paddleocr": {"rope.dimension_sections": [4, 6, 6, 0]},
    "plamo2": _MIXED | {"ssm.group_count": 0},
    "plm": {
        "attention.key_length": 48,
        "attention.value_length": 32,
        "rope.dimension_count": 16,
    },
    "qwen35": _EVERY_SECOND,
    "qwen35moe": _EVERY_SECOND,
    "qwen3next": _EVERY_SECOND,
    "qwen4exp": _EVERY_SECOND,
    "rwkv6": {"attention.head_count": 0},
    "rwkv6qwen2": {"attention.head_count": 1, "token_shift_count": 1},
    "rwkv7": {"attention.gate_lora_rank": 8, "attention.layer_norm_epsilon": 1e-5},
    "smallthinker": {"expert_feed_forward_length": N_EMBD} | _UNGROUPED,
    "t5encoder": _MEAN,
}
MORE: Mapping[str, Mapping[str, object]] = {
    name: (_EXPERTS if name in _MIXTURES else {}) | _SPECIAL.get(name, {})
    for name in NAMES
}
# The least tokens that a graph is made for: it has places of its own for some.
N_TOKENS: Mapping[str, int] = {"chameleon": 8196, "qwen3tts": 3072}
