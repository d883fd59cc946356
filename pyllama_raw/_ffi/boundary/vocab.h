/* Texts to tokens, and tokens to the bytes that they write. */
#pragma once

#include <stdint.h>

#include "llama.h"

/* The longest stretches of a text that a tokenizer may take as one word, in characters. */
typedef struct plr_stretches {
    int64_t word;    /* an upper bound of one match of any pattern that splits texts */
    int64_t blanks;  /* white space, also beyond ASCII */
    int64_t digits;  /* of ASCII */
} plr_stretches;
void plr_text_stretches(const char * text, int64_t text_len, plr_stretches * stretches);
/*
 * llama_tokenize behind a try block: 0, or PLR_EXCEPTION.
 *
 * It runs on a thread with a stack of *stack_bytes* of its own, of which only what is used
 * takes memory; 0: on that of the caller.
 */
int plr_tokenize(const struct llama_vocab * vocab, const char * text, int32_t text_len,
                 llama_token * tokens, int32_t n_tokens_max, bool add_special,
                 bool parse_special, int64_t stack_bytes, int32_t * n_tokens);
/*
 * The pieces of all tokens one after the other, control tokens empty; ends[i] out: where that
 * of token i ends. Returns the bytes needed; *pieces* is complete if that is at most size.
 */
int64_t plr_vocab_pieces(const struct llama_vocab * vocab, char * pieces, int64_t size,
                         int64_t * ends);
/* is_eog[i] out: whether token i ends generation; as many as the vocabulary has. */
void plr_vocab_eog(const struct llama_vocab * vocab, bool * is_eog);
