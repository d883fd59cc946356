/* From one row of logits to a token. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "grammar/grammar.h"
#include "llama.h"

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

/* How one row is sampled. Pointers may be NULL where their count is 0. */
typedef struct plr_sampler {
    struct llama_sampler   * chain;      /* NULL means greedy: the largest logit, lowest id */
    plr_grammar            * grammar;    /* NULL, or what the token must be allowed by */
    const uint32_t         * mask;       /* NULL, or a bit a token: 0 must not be sampled; of */
                                         /* each place in turn, if tokens of its rows are drafts */
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
    plr_logprobs           * logprobs;   /* NULL, or filled with every token sampled, by place */
} plr_sampler;

/* Sample one row that comes from no context; *logits* are changed as by plr_step. */
int plr_sample(plr_sampler * sampler, float * logits, int32_t n_vocab, llama_token * token);

/* libllama's functions of these names behind a try block; NULL on failure. */
struct llama_sampler * plr_init_dry(
    const struct llama_vocab * vocab, float multiplier, float base, int32_t allowed_length,
    int32_t last_n, const char ** breakers, size_t n_breakers);
/* llama_sampler_init_top_p, several times as fast where candidates are not sorted. */
struct llama_sampler * plr_init_top_p(float p, size_t min_keep);
struct llama_sampler * plr_sampler_clone(const struct llama_sampler * sampler);
int plr_sampler_accept_many(struct llama_sampler * sampler, const llama_token * tokens,
                            int32_t n_tokens);
