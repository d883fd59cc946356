/* A step: one decode, and a token for each of its output rows. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "boundary/abort_flag.h"
#include "llama.h"
#include "sampler.h"

/*
 * Let chains[i] run in the graph for sequence i from the next decode on; NULL: nothing. Chains
 * are used once in their life, outlive the context, and only select the likeliest tokens. Their
 * rows take samplers with n_first above 0, and none with grammar, mask, bias or logprobs of the
 * model: the row itself stays on the device.
 */
int plr_set_lanes(struct llama_context * ctx, int32_t n_lanes, struct llama_sampler * const * chains);

typedef struct plr_times {
    int64_t decode_ns;   /* llama_decode and llama_synchronize */
    int64_t cpu_ns;      /* of these, what the thread that computes had a CPU for */
    int64_t sample_ns;   /* all rows */
    int64_t n_failed;    /* rows without a token */
} plr_times;

/*
 * A thread that computes for any number of contexts, in turn; freed after their runners. In a
 * fork, which has no such thread, steps are refused and nothing is freed.
 */
typedef struct plr_thread plr_thread;
plr_thread * plr_thread_new(void);
void         plr_thread_free(plr_thread * thread);

/* What one context has to compute; freed before the context. Waits for a decode that runs. */
typedef struct plr_runner plr_runner;
plr_runner * plr_runner_new(plr_thread * thread);
void         plr_runner_free(plr_runner * runner);

/*
 * Decode *batch* and sample n_rows of its output rows.
 *   rows[i]     index of the output row in the batch, rising
 *   drafts[i]   whether the token of row i is a draft of what row i - 1 gives; NULL: none is
 *   samplers[i] how to sample it
 *   tokens[i]   out: the token, LLAMA_TOKEN_NULL when codes[i] is not 0
 *   codes[i]    out: 0, or PLR_EXCEPTION for a row that has no logits or whose sampler threw
 * A row of a sequence with a lane is sampled from what the lane left of it.
 * A row whose token is a draft is sampled only if the row before gave just that token: else the
 * token is LLAMA_TOKEN_NULL and the code 0, and what the row left in memory is to be cut. A batch
 * with drafts is never advanced. Its sampler has a mask and a record of logprobs for each place,
 * one behind the other.
 * A batch of nothing but sampled rows is advanced: it then holds the sampled tokens at the next
 * positions, ready for the next step. With *ahead* every batch is advanced: its tokens without
 * a row are gone, and the decode of what is left is queued behind what other contexts wait for.
 * Then the next call is a step of the same batch, or plr_drop(), before anything else touches
 * the context or the batch. A batch with a row that failed is never advanced.
 * Biases are added to the row's logits, and ids not to be sampled set to -infinity.
 * Returns the decode code; nothing is sampled unless it is 0.
 */
int plr_step(plr_runner * runner, struct llama_context * ctx, struct llama_batch * batch,
             int32_t n_rows, const int32_t * rows, const int8_t * drafts,
             plr_sampler * const * samplers, llama_token * tokens, int32_t * codes,
             plr_times * times, bool ahead);

/*
 * Have the encoder of an encoder-decoder model read *batch*, all of it at once: at most n_ubatch
 * tokens. Decodes of a sequence then see its tokens of the last such batch; one that had none
 * there gives no numbers, and its neighbours none either. A sequence begins behind its last
 * position in memory, which is left as it is. Returns the code of llama_encode; if it is not 0,
 * decodes see what they saw before. Nothing is queued ahead.
 */
int plr_read_sources(plr_runner * runner, struct llama_context * ctx, struct llama_batch * batch,
                     plr_times * times);

/*
 * From now on have each step leave the hidden states that heads of multi-token prediction go on
 * from, of n_embd_out floats, in *hidden*, which outlives the runner: those of all tokens of the
 * batch in its order, or, if of_rows, of the rows that are sampled. NULL: none any more. Not while
 * something is queued ahead. The model is to have heads, or what is left there means nothing.
 * Returns 0 or PLR_EXCEPTION.
 */
int plr_keep_hidden(plr_runner * runner, struct llama_context * ctx, float * hidden, bool of_rows);

/*
 * Stop what was queued ahead, wait for it, and say whether it had begun: then some or all of its
 * tokens are in memory. flag: the context's, may be NULL.
 */
bool plr_drop(plr_runner * runner, plr_flag * flag);

/*
 * For tests: after n_until decodes one ends with code, of all contexts, and is not computed;
 * n_until < 0: all do. With seq_id >= 0 only batches with that slot count. 0: none any more.
 * Not while something is computed.
 */
void plr_fail_decode(int32_t code, int32_t n_until, int32_t seq_id);

/*
 * For tests: go on as with a libllama that has, or is not known to have, MENDS of build_lib.py.
 * Returns what held before. Not while something is computed.
 */
bool plr_set_mended(bool value);

/*
 * Log-probabilities of tokens[i] in output row rows[i] of the last batch; ids and values have
 * n_rows times n_top places, unused ids are LLAMA_TOKEN_NULL. Rows that were sampled are
 * changed: ask for others only.
 */
int plr_score(struct llama_context * ctx, int32_t n_rows, const int32_t * rows,
              const llama_token * tokens, int32_t n_top, float * chosen, llama_token * ids,
              float * values);
