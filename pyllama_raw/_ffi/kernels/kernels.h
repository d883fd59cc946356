/*
 * Operations of a context that we compute instead of libllama: flash attention; with
 * plr_kernels_has_products() (AVX-512 VNNI) products with Q4_1 and Q8_0 weights, the same
 * bits. Only where plr_kernels_usable(): an x86-64 CPU with AVX2, FMA and F16C, no other
 * device. One for each context, freed after it.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "llama.h"

typedef struct plr_kernels plr_kernels;
bool          plr_kernels_usable(void);
bool          plr_kernels_has_products(void);
plr_kernels * plr_kernels_new(void);
void          plr_kernels_free(plr_kernels * kernels);
/* follows: one pool of cells, one cache; then a row's cells are listed by position. */
void          plr_kernels_attach(struct llama_context_params * params, plr_kernels * kernels,
                                 bool follows);
/* Products and attentions taken so far, in all graphs that were made. */
void          plr_kernels_taken(const plr_kernels * kernels, int64_t taken[2]);
/* What was done to the memory of the context; see llama_memory_seq_rm() and its like. */
int  plr_cells_rm(plr_kernels * kernels, int32_t slot, int32_t p0, int32_t p1);
int  plr_cells_cp(plr_kernels * kernels, int32_t src, int32_t dst, int32_t p0, int32_t p1);
int  plr_cells_add(plr_kernels * kernels, int32_t slot, int32_t p0, int32_t p1, int32_t delta);
void plr_cells_clear(plr_kernels * kernels);
int  plr_cells_restore(plr_kernels * kernels, int32_t slot, const uint8_t * state, size_t size);

#ifdef __cplusplus
/* llama_decode() and llama_synchronize(): the kernels of the context see what is decoded. */
int plr_kernels_decode(llama_context * ctx, const llama_batch & batch);
#endif
