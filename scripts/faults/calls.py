"""
How each native function can fail, and what of a run may end then.

A function that is named nowhere has no value for a failure, as most that only tell a number. It
raises an error instead that nobody expects, in the place of the call.
"""

from __future__ import annotations

EXCEPTION = -1000  # errors.h: PLR_EXCEPTION
DECODE_CODES = (1, 2, -1, -2, -3, EXCEPTION)
ROW = "row"  # one row of the step could not be sampled

FREES = {
    "plr_flag_new": "plr_flag_free",
    "plr_progress_new": "plr_progress_free",
    "plr_model_load": "llama_model_free",
    "plr_context_new": "llama_free",
    "plr_runner_new": "plr_runner_free",
    "plr_thread_new": "plr_thread_free",
    "plr_kernels_attach": "plr_kernels_free",
    "plr_watch_new": "plr_watch_free",
    "plr_encode_new": "plr_encode_free",
    "plr_projector_new": "plr_projector_free",
    "plr_bitmap_image": "mtmd_bitmap_free",
    "plr_bitmap_sound": "mtmd_bitmap_free",
    "plr_bitmap_cut": "mtmd_input_chunks_free",
    "plr_grammar_new": "plr_grammar_free",
    "plr_adapter_load": "plr_adapter_free",
    "plr_init_dry": "llama_sampler_free",
    "plr_init_top_p": "llama_sampler_free",
    "plr_sampler_clone": "llama_sampler_free",
    "llama_sampler_chain_init": "llama_sampler_free",
}
SAMPLER = "llama_sampler_init_"  # these, too
TAKES_OVER = "llama_sampler_chain_add"  # the chain frees its second argument

NULLS = {
    *FREES,
    "llama_get_logits_ith",
    "llama_get_embeddings_ith",
    "llama_get_embeddings_seq",
}
CODES = {
    "plr_state_seq_size": (EXCEPTION, 0),  # 0: done, and no byte was copied
    "plr_state_seq_get": (EXCEPTION, 0),
    "plr_state_seq_set": (EXCEPTION, 0),
    "plr_cells_rm": (EXCEPTION,),
    "plr_cells_cp": (EXCEPTION,),
    "plr_cells_add": (EXCEPTION,),
    "plr_cells_restore": (EXCEPTION,),
    "plr_set_adapters": (EXCEPTION,),
    "plr_set_lanes": (EXCEPTION,),
    "plr_score": (EXCEPTION,),
    "plr_sampler_accept_many": (EXCEPTION,),
    "plr_tokenize": (EXCEPTION,),
    "plr_projector_encode": (EXCEPTION, 1),
    "plr_all_finite": (False,),
    "llama_memory_seq_rm": (False,),  # a part only: all of a slot is always forgotten
}

# The request whose call it was ends; nobody does for any other value.
OF_ONE_REQUEST = {
    "plr_context_new",  # of vectors beside text, which the first request opens
    "plr_flag_new",
    "plr_runner_new",
    "plr_bitmap_image",
    "plr_bitmap_sound",
    "plr_bitmap_cut",
    "plr_encode_new",
    "plr_projector_encode",
    "plr_all_finite",
    "plr_grammar_new",
    "plr_adapter_load",
    "plr_init_dry",
    "plr_init_top_p",
    "plr_sampler_clone",
    "plr_sampler_accept_many",
    "plr_tokenize",
    "plr_score",
    "llama_sampler_chain_init",
    "llama_get_embeddings_seq",
    "llama_get_embeddings_ith",
}
# Without our own kernels outputs have other last digits: only tokens of a deterministic run are
# compared.
OTHER_DIGITS = {
    "plr_kernels_attach",
    "plr_cells_rm",
    "plr_cells_cp",
    "plr_cells_add",
    "plr_cells_restore",
}
NEVER_FAILS = {
    "plr_last_error",
    "plr_fail_decode",
    "plr_slow_copies",
    "plr_text_stretches",
    "plr_vocab_specials",
}  # the first tells of the last failure


def is_failed(name: str) -> bool:
    """Whether calls of *name* are failed; what frees something cannot fail."""
    return not (name in NEVER_FAILS or name.endswith("_free"))


def failures(name: str) -> tuple[object, ...]:
    """The values that *name* gives when it fails; None is NULL."""
    if name == "plr_step":
        return (*DECODE_CODES, ROW)
    if name in NULLS or name.startswith(SAMPLER):
        return (None,)
    return CODES.get(name, ())


def most_ended(name: str, way: object) -> int:
    """Requests that may end when *name*, called by a request, gives *way*."""
    return int(name in OF_ONE_REQUEST or name.startswith(SAMPLER) or way == ROW)
