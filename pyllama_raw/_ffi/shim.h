/*
 * What plain llama.h cannot give Python safely or cheaply. Three reasons only:
 * C++ exceptions must not cross C; one call a step; callbacks that never enter Python.
 *
 * Every int result is a libllama code, or PLR_EXCEPTION with plr_last_error() set.
 */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "llama.h"

#ifdef __cplusplus
extern "C" {
#endif

#define PLR_EXCEPTION (-1000)

/* Message of the last failure on this thread; valid until the next one. */
const char * plr_last_error(void);

/*
 * Make a failed GGML_ASSERT inside a plr_ function throw on its thread, so that it comes
 * back as PLR_EXCEPTION instead of ending the process. A net under the checks of native/,
 * not a replacement: what it hit (a context, never a model) must be thrown away.
 */
void plr_abort_install(void);

/* An abort flag libllama polls (CPU and Metal backends only). Any thread may set it. */
typedef struct plr_flag plr_flag;
plr_flag * plr_flag_new(void);
void       plr_flag_free(plr_flag * flag);
void       plr_flag_set(plr_flag * flag, bool value);
bool       plr_flag_get(const plr_flag * flag);
void       plr_flag_attach(struct llama_context_params * params, plr_flag * flag);

/*
 * Operations of a context that we compute instead of libllama: flash attention; with
 * plr_kernels_has_products() (AVX-512 VNNI) products with Q4_1 and Q8_0 weights, the same
 * bits. Only where plr_kernels_usable(): an x86-64 CPU with AVX2, FMA and F16C, no other
 * device. One for each context, freed after it.
 */
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

/*
 * Whose kernels compute the products and attentions of a context. Attached behind
 * plr_kernels_attach(); one for each context, freed after it. Bits of PLR_BY_.
 */
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

/* Model loading whose progress can be polled and cancelled from another thread. */
typedef struct plr_progress plr_progress;
plr_progress * plr_progress_new(void);
void           plr_progress_free(plr_progress * progress);
float          plr_progress_get(const plr_progress * progress);
void           plr_progress_cancel(plr_progress * progress);
struct llama_model * plr_model_load(const char * path, const struct llama_model_params * params,
                                    plr_progress * progress);
/*
 * GGUF: where *count* strings end that begin at *at* of *data*, each a length of 8 bytes and
 * its bytes; -1 if they do not fit *size*. In Python a vocabulary takes 20 ms.
 */
int64_t plr_skip_strings(const uint8_t * data, int64_t size, int64_t at, uint64_t count);
struct llama_context * plr_context_new(struct llama_model * model,
                                       const struct llama_context_params * params);
/*
 * llama_model_quantize behind a try block: 0, its code, or PLR_EXCEPTION. With nthread 1 all
 * of it runs on this thread, where a failed assertion is an exception.
 */
int plr_quantize(const char * path_in, const char * path_out,
                 const struct llama_model_quantize_params * params);

/*
 * Log-softmax of one row: of the token it gave, and of the n_top most likely ones.
 * Without of_sampler of the row as the model made it, else of what the draw was from.
 */
typedef struct plr_logprobs {
    int32_t       n_top;      /* places in ids and values */
    bool          of_sampler;
    int32_t       n_found;    /* out: places filled; tokens of probability 0 are left out */
    float         value;      /* out: of the token */
    llama_token * ids;        /* out: most likely first, of equals the lowest id */
    float       * values;     /* out */
} plr_logprobs;

/*
 * A grammar as a program. Texts are read byte by byte; rules call each other and return.
 *   op                 arg                                next
 *   PLR_OP_RETURN                                                       end of a rule
 *   PLR_OP_SPLIT       a node                             another node
 *   PLR_OP_CALL        the first node of a rule           after it
 *   PLR_OP_BYTES       a set: one of its bytes            after it
 *   PLR_OP_TOKEN       a token                            after it
 *   PLR_OP_NOT_TOKEN   a token: any other that writes     after it
 */
#define PLR_OP_RETURN 0
#define PLR_OP_SPLIT 1
#define PLR_OP_CALL 2
#define PLR_OP_BYTES 3
#define PLR_OP_TOKEN 4
#define PLR_OP_NOT_TOKEN 5

/* Places of a grammar that are looked at for one token; a row that needs more fails. */
#define PLR_GRAMMAR_MAX_WORK 250000

typedef struct plr_node {
    int32_t op;
    int32_t arg;
    int32_t next;
} plr_node;

/* What the tokens of a vocabulary write: a copy, freed after its grammars. */
typedef struct plr_pieces plr_pieces;
plr_pieces * plr_pieces_new(const struct llama_vocab * vocab);
void         plr_pieces_free(plr_pieces * pieces);

/* What begins a grammar that waits for it: one of these in the output. None: it begins. */
typedef struct plr_triggers {
    const char * const * texts;
    size_t               n_texts;
    const llama_token  * tokens;
    size_t               n_tokens;
} plr_triggers;

/* Sets have 8 numbers each: bit b % 32 of number b / 32 is byte b. NULL on failure. */
typedef struct plr_grammar plr_grammar;
plr_grammar * plr_grammar_new(const plr_pieces * pieces, const plr_node * nodes, size_t n_nodes,
                              const uint32_t * sets, size_t n_sets, int32_t start,
                              const plr_triggers * triggers);
plr_grammar * plr_grammar_copy(const plr_grammar * grammar);
void          plr_grammar_free(plr_grammar * grammar);

/* allowed: a byte for each token, 1 if it may come next. */
int plr_grammar_mask(plr_grammar * grammar, uint8_t * allowed);

/* How one row is sampled. Pointers may be NULL where their count is 0. */
typedef struct plr_sampler {
    struct llama_sampler   * chain;      /* NULL means greedy: the largest logit, lowest id */
    plr_grammar            * grammar;    /* NULL, or what the token must be allowed by */
    const uint32_t         * mask;       /* NULL, or a bit a token: 0 must not be sampled */
    const llama_logit_bias * bias;       /* added to the logits first */
    const llama_token      * suppress;   /* ids that must not be sampled */
    const llama_token      * ending;     /* ids that must not be sampled while n_min > 0 */
    int32_t                  n_bias;
    int32_t                  n_suppress; /* below 0: the sampler was closed */
    int32_t                  n_ending;
    int32_t                  n_min;      /* counted down with every token sampled */
    int32_t                  n_first;    /* the chain looks at that many of the likeliest; 0: all */
    int32_t                  n_on_host;  /* out: tokens chosen from a row of logits */
    int32_t                  n_on_lane;  /* out: from what the backend sampler of a slot left */
    plr_logprobs           * logprobs;   /* NULL, or filled with every token sampled */
} plr_sampler;

/*
 * Let chains[i] run in the graph for sequence i from the next decode on; NULL: nothing. Chains
 * are used once in their life, outlive the context, and only select the likeliest tokens. Their
 * rows take samplers with n_first above 0, and none with grammar, mask, bias or logprobs of the
 * model: the row itself stays on the device.
 */
int plr_set_lanes(struct llama_context * ctx, int32_t n_lanes, struct llama_sampler * const * chains);

typedef struct plr_times {
    int64_t decode_ns;   /* llama_decode and llama_synchronize */
    int64_t sample_ns;   /* all rows */
    int64_t n_failed;    /* rows without a token */
} plr_times;

/* A thread that computes steps; one for each context, freed before it. Waits for a step. */
typedef struct plr_runner plr_runner;
plr_runner * plr_runner_new(void);
void         plr_runner_free(plr_runner * runner);

/*
 * Decode *batch* and sample n_rows of its output rows.
 *   rows[i]     index of the output row in the batch, rising
 *   samplers[i] how to sample it
 *   tokens[i]   out: the token, LLAMA_TOKEN_NULL when codes[i] is not 0
 *   codes[i]    out: 0, or PLR_EXCEPTION for a row that has no logits or whose sampler threw
 * A row of a sequence with a lane is sampled from what the lane left of it.
 * A batch of nothing but sampled rows is advanced: it then holds the sampled tokens at the next
 * positions, ready for the next step. With *ahead* every batch is advanced: its tokens without
 * a row are gone, and the decode of what is left begins at once. Then the next call is a step of
 * the same batch, or plr_drop(), before anything else touches the context or the batch. A batch
 * with a row that failed is never advanced.
 * Biases are added to the row's logits, and ids not to be sampled set to -infinity.
 * Returns the decode code; nothing is sampled unless it is 0.
 */
int plr_step(plr_runner * runner, struct llama_context * ctx, struct llama_batch * batch,
             int32_t n_rows, const int32_t * rows, plr_sampler * const * samplers,
             llama_token * tokens, int32_t * codes, plr_times * times, bool ahead);

/*
 * Stop what was begun ahead, wait for it, and say whether there was something: then some or all
 * of its tokens are in memory. flag: the context's, may be NULL.
 */
bool plr_drop(plr_runner * runner, plr_flag * flag);

/*
 * For tests: after n_until decodes one ends with code, of all contexts, and is not computed;
 * n_until < 0: all do. With seq_id >= 0 only batches with that slot count. 0: none any more.
 * Not while something is computed.
 */
void plr_fail_decode(int32_t code, int32_t n_until, int32_t seq_id);

/*
 * Log-probabilities of tokens[i] in output row rows[i] of the last batch; ids and values have
 * n_rows times n_top places, unused ids are LLAMA_TOKEN_NULL. Rows that were sampled are
 * changed: ask for others only.
 */
int plr_score(struct llama_context * ctx, int32_t n_rows, const int32_t * rows,
              const llama_token * tokens, int32_t n_top, float * chosen, llama_token * ids,
              float * values);


/* Sample one row that comes from no context; *logits* are changed as by plr_step. */
int plr_sample(plr_sampler * sampler, float * logits, int32_t n_vocab, llama_token * token);

/* llama_sampler_init_dry, llama_sampler_clone, llama_sampler_accept and llama_tokenize behind
 * a try block; NULL on failure. */
struct llama_sampler * plr_init_dry(
    const struct llama_vocab * vocab, float multiplier, float base, int32_t allowed_length,
    int32_t last_n, const char ** breakers, size_t n_breakers);
/* llama_sampler_init_top_p, several times as fast where candidates are not sorted. */
struct llama_sampler * plr_init_top_p(float p, size_t min_keep);
struct llama_sampler * plr_sampler_clone(const struct llama_sampler * sampler);
int plr_sampler_accept_many(struct llama_sampler * sampler, const llama_token * tokens,
                            int32_t n_tokens);
int plr_tokenize(const struct llama_vocab * vocab, const char * text, int32_t text_len,
                 llama_token * tokens, int32_t n_tokens_max, bool add_special,
                 bool parse_special, int32_t * n_tokens);
/*
 * The pieces of all tokens one after the other, control tokens empty; ends[i] out: where that
 * of token i ends. Returns the bytes needed; *pieces* is complete if that is at most size.
 */
int64_t plr_vocab_pieces(const struct llama_vocab * vocab, char * pieces, int64_t size,
                         int64_t * ends);
/* is_eog[i] out: whether token i ends generation; as many as the vocabulary has. */
void plr_vocab_eog(const struct llama_vocab * vocab, bool * is_eog);

/* State of one sequence; *n_bytes out: bytes needed, written or read, 0 on failure. */
int plr_state_seq_size(struct llama_context * ctx, llama_seq_id seq_id, size_t * n_bytes);
int plr_state_seq_get(struct llama_context * ctx, uint8_t * dst, size_t size, llama_seq_id seq_id,
                      size_t * n_bytes);
int plr_state_seq_set(struct llama_context * ctx, const uint8_t * src, size_t size,
                      llama_seq_id seq_id, size_t * n_bytes);

/*
 * Log lines of llama, ggml and mtmd go into one ring of fixed size; the oldest are dropped.
 * Debug lines are not kept: some are written for every token.
 * plr_log_drain copies as many whole records as fit: one byte ggml_log_level, then the text,
 * then a NUL. Returns the bytes written.
 */
void   plr_log_install(void);
size_t plr_log_drain(char * buf, size_t size);
size_t plr_log_n_dropped(void);

#ifdef __cplusplus
}
#endif
