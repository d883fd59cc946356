/* A grammar that llguidance follows, asked about the token that was drawn. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "llama.h"

/* Functions of llguidance, which Python has loaded, and a tokenizer of it. */
typedef struct plr_llguidance {
    void * tokenizer;
    void * clone;     /* llg_clone_matcher */
    void * free;      /* llg_free_matcher */
    void * validate;  /* llg_matcher_validate_tokens */
    void * consume;   /* llg_matcher_consume_tokens */
    void * fill;      /* llg_matcher_compute_mask_into */
    void * error;     /* llg_matcher_get_error */
    void * tokenize;  /* llg_tokenize_bytes */
} plr_llguidance;

/* A grammar waits until one of these is in the output; if there are none, it begins at once. */
typedef struct plr_triggers {
    const char * const * texts;
    size_t               n_texts;
    const llama_token  * tokens;
    size_t               n_tokens;
} plr_triggers;

/* Follows a copy of *matcher*, and is freed before the vocabulary. NULL on failure. */
typedef struct plr_grammar plr_grammar;
plr_grammar * plr_grammar_new(const struct llama_vocab * vocab,
                              const plr_llguidance * functions, const void * matcher,
                              const plr_triggers * triggers);
void          plr_grammar_free(plr_grammar * grammar);
