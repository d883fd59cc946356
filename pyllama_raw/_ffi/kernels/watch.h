/*
 * Notes whose kernels compute the products and attentions of a context, in bits of PLR_BY_. It
 * is attached after plr_kernels_attach(), to one context, and freed after the context.
 */
#pragma once

#include <stdint.h>

#include "llama.h"

#define PLR_BY_US 1 /* kernels of ours */
#define PLR_BY_AMX 2 /* libllama's, with weights in the order of AMX tiles */
#define PLR_BY_REPACKED 4 /* libllama's, with weights in another order of its own */
#define PLR_BY_LIBLLAMA 8 /* libllama's, with weights as they are in the file */
typedef struct plr_watch plr_watch;
plr_watch * plr_watch_new(void);
void        plr_watch_free(plr_watch * watch);
void        plr_watch_attach(struct llama_context_params * params, plr_watch * watch);
uint32_t    plr_watch_products(const plr_watch * watch, enum ggml_type weights);
uint32_t    plr_watch_attentions(const plr_watch * watch);
