/*
 * Notes whose kernels compute the products and attentions of contexts. It is attached after
 * plr_kernels_attach(), to contexts that one thread computes, and freed after them.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "llama.h"

#define PLR_BY_US 0 /* kernels of ours */
#define PLR_BY_AMX 1 /* libllama's, with weights in the order of AMX tiles */
#define PLR_BY_REPACKED 2 /* libllama's, with weights in another order of its own */
#define PLR_BY_LIBLLAMA 3 /* libllama's, with weights as they are in the file */
#define PLR_COMPUTERS 4
typedef struct plr_watch plr_watch;
plr_watch * plr_watch_new(void);
void        plr_watch_free(plr_watch * watch);
/* False: there is no memory. */
bool plr_watch_attach(struct llama_context_params * params, plr_watch * watch);

/*
 * Multiply-adds with weights so far, by their type and by whose kernels: row by row, of a type
 * PLR_COMPUTERS. Attentions, by whose kernels. Any thread may read.
 */
void plr_watch_products(const plr_watch * watch, int64_t * counts);
void plr_watch_attentions(const plr_watch * watch, int64_t * counts);
