#include "state.h"

#include "exceptions.h"

int plr_state_seq_size(llama_context * ctx, llama_seq_id seq_id, size_t * n_bytes) {
    *n_bytes = 0;
    return attempt([&] { *n_bytes = llama_state_seq_get_size(ctx, seq_id); });
}

int plr_state_seq_get(llama_context * ctx, uint8_t * dst, size_t size,
                      llama_seq_id seq_id, size_t * n_bytes) {
    *n_bytes = 0;
    return attempt([&] { *n_bytes = llama_state_seq_get_data(ctx, dst, size, seq_id); });
}

int plr_state_seq_set(llama_context * ctx, const uint8_t * src, size_t size,
                      llama_seq_id seq_id, size_t * n_bytes) {
    *n_bytes = 0;
    return attempt([&] { *n_bytes = llama_state_seq_set_data(ctx, src, size, seq_id); });
}
