/* State of one sequence; *n_bytes out: bytes needed, written or read, 0 on failure. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "llama.h"

int plr_state_seq_size(struct llama_context * ctx, llama_seq_id seq_id, size_t * n_bytes);
int plr_state_seq_get(struct llama_context * ctx, uint8_t * dst, size_t size, llama_seq_id seq_id,
                      size_t * n_bytes);
int plr_state_seq_set(struct llama_context * ctx, const uint8_t * src, size_t size,
                      llama_seq_id seq_id, size_t * n_bytes);

/*
 * Whether libllama compares how many cells a state says it has with those of the context, before it
 * makes room for them. One that does not takes all memory for a state that anybody has forged.
 */
bool plr_state_is_bounded(void);

/*
 * For tests: each copy of a sequence takes so much longer for each of its cells, in all contexts,
 * as from a device that copies cells one by one. 0: no longer.
 */
void plr_slow_copies(int64_t ns_per_cell);
