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
 * Places at which *text* may be parted, because a special token certainly begins there: then its
 * parts have the tokens of the whole. libllama walks past all special tokens for each one.
 *
 * specials: ids of all special tokens. ends[i] out: where part i ends, but for the last one; a part
 * has *n_markers* special tokens or a few more, if there are such places. most out: special tokens of
 * the part that has most, or more than those. Returns the number of ends, at most *max_ends*, or
 * PLR_EXCEPTION.
 */
int32_t plr_text_parts(const struct llama_vocab * vocab, const char * text, int32_t text_len,
                       bool parse_special, const llama_token * specials, int32_t n_specials,
                       int32_t n_markers, int32_t * ends, int32_t max_ends, int32_t * most);
/* Ids of the tokens that are found in texts before all else; returns how many there are. */
int32_t plr_vocab_specials(const struct llama_vocab * vocab, llama_token * specials);
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
