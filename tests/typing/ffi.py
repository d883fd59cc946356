"""
Never run: mypy reads it. An unused `type: ignore` is an error, so each mistake below is
one that the stub of the extension must catch.
"""

from pyllama_raw._ffi._llama import ffi, lib


def right() -> int:
    """The usual sequence needs no cast."""
    params = lib.llama_model_default_params()
    params.n_gpu_layers = 0
    model = lib.llama_model_load_from_file(b"model.gguf", params)
    context = lib.llama_init_from_model(model, lib.llama_context_default_params())
    memory = lib.llama_get_memory(context)
    lib.llama_memory_seq_rm(memory, 0, -1, -1)
    batch = lib.llama_batch_init(1, 0, 1)
    batch.token[0] = lib.llama_vocab_bos(lib.llama_model_get_vocab(model))
    logits = lib.llama_get_logits_ith(context, 0) or ffi.NULL
    return lib.llama_decode(context, batch) + int(logits[0])


def wrong() -> None:
    """Pointers are told apart, and names and fields are known."""
    params = lib.llama_model_default_params()
    model = lib.llama_model_load_from_file(b"model.gguf", params)
    sampler = lib.llama_sampler_init_greedy()

    lib.llama_n_ctx(model)  # type: ignore[arg-type]
    lib.llama_sampler_chain_add(sampler, model)  # type: ignore[arg-type]
    lib.llama_model_load_from_file("model.gguf", params)  # type: ignore[arg-type]
    params.n_gpu_layer = 0  # type: ignore[attr-defined]
    lib.llama_new_context_with_model(model)  # type: ignore[attr-defined]
