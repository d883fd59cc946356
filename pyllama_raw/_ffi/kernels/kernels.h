/*
 * A plug-in: kernels of our own compute some operations of a graph instead of libllama.
 *
 * All that is to be known of them stands here. A step calls plr_kernels_decode(), Python
 * the others. Without them libllama computes; nothing is wrong then, only slower.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "llama.h"

/*
 * What a kernel computes: "attention", products by "columns", or products with a type of weights
 * by its name.
 */
typedef struct plr_kernel {
    const char * computes;
    const char * needs;      /* of the CPU */
    bool         is_woven;   /* a product of weights that are woven once */
    bool         is_usable;  /* here */
} plr_kernel;

/* The table of kernels, of a kind the best first; false if it has no row *index*. */
bool plr_kernels_row(int32_t index, plr_kernel * row);

/*
 * The sets of instructions that multiply woven weights, the least first, as PYLLAMA_RAW_WOVEN names
 * them; NULL if there is no *index*. All give the same bits with PLR_SUMS_OURS. With PLR_SUMS_ANY "amx"
 * multiplies prompts and many streams otherwise.
 */
const char * plr_woven_level(int32_t index, bool * is_usable);

/* Contexts that are made from now on take this level; "auto": the one that was measured to be best.
   False: it does not exist or is not usable here. */
bool plr_woven_choose(const char * name);

/* The kernels do without the sets of instructions that are false, though the CPU may have them. To
   be called before any other function of kernels. */
void plr_cpu_only(bool avx2, bool avxvnni, bool avx512vnni, bool amx);

/* The level of CPUs that libllama and the kernels are built for: see _ffi/cpu_level.py. */
const char * plr_cpu_level(void);

/* What the sums of a product may be. */
#define PLR_SUMS_ANY 0 /* those of the fastest kernels */
#define PLR_SUMS_LIBLLAMA 1 /* those of libllama for a column alone, whatever is beside it */
#define PLR_SUMS_OURS 2 /* of a column alone, too, but woven where a kernel weaves the weights */

/*
 * Those of the context that is made from *params*, freed after it; NULL: none is usable, or
 * there is no memory. fast: those that are faster than libllama. follows: all slots share one
 * pool of cells, in one cache. Then the cells of a row are listed by position, and what is done
 * to slots has to be told. sums: PLR_SUMS_ANY, PLR_SUMS_LIBLLAMA or PLR_SUMS_OURS.
 */
typedef struct plr_kernels plr_kernels;
plr_kernels * plr_kernels_attach(struct llama_context_params * params, bool fast, bool follows,
                                 int32_t sums);
void          plr_kernels_free(plr_kernels * kernels);

/*
 * The name of an operation of a graph so far whose results of a token may depend on the tokens
 * beside it; empty if there is none. It is not looked for with PLR_SUMS_LIBLLAMA.
 */
const char * plr_kernels_stray(const plr_kernels * kernels);

/* Operations that row *index* of the table took so far, in all graphs that were made. */
int64_t plr_kernels_taken(const plr_kernels * kernels, int32_t index);

/* What was done to the memory of the context; see llama_memory_seq_rm() and its like. */
int  plr_cells_rm(plr_kernels * kernels, int32_t slot, int32_t p0, int32_t p1);
int  plr_cells_cp(plr_kernels * kernels, int32_t src, int32_t dst, int32_t p0, int32_t p1);
int  plr_cells_add(plr_kernels * kernels, int32_t slot, int32_t p0, int32_t p1, int32_t delta);
void plr_cells_clear(plr_kernels * kernels);
int  plr_cells_restore(plr_kernels * kernels, int32_t slot, const uint8_t * state, size_t size);

/*
 * Notes whose kernels compute the products and attentions of contexts. It is attached after
 * plr_kernels_attach(), to contexts that one thread computes, and freed after them.
 */
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

#ifdef __cplusplus
/* llama_decode() and llama_synchronize(), in sight of the kernels of the context; n_rows are sampled. */
int plr_kernels_decode(llama_context * ctx, const llama_batch & batch, int32_t n_rows);
#endif
