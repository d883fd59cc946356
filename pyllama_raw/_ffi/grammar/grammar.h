/*
 * A grammar is a program of nodes. It reads texts byte by byte; rules call each other and return.
 *   op                 arg                                next
 *   PLR_OP_RETURN                                                       end of a rule
 *   PLR_OP_SPLIT       a node                             another node
 *   PLR_OP_CALL        the first node of a rule           after it
 *   PLR_OP_BYTES       a set: one of its bytes            after it
 *   PLR_OP_TOKEN       a token                            after it
 *   PLR_OP_NOT_TOKEN   a token: any other that writes     after it
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "llama.h"

#define PLR_OP_RETURN 0
#define PLR_OP_SPLIT 1
#define PLR_OP_CALL 2
#define PLR_OP_BYTES 3
#define PLR_OP_TOKEN 4
#define PLR_OP_NOT_TOKEN 5

/* Most places of a grammar that are looked at for one token; a row that needs more fails. */
#define PLR_GRAMMAR_MAX_WORK 250000

typedef struct plr_node {
    int32_t op;
    int32_t arg;
    int32_t next;
} plr_node;

/* A copy of what the tokens of a vocabulary write; freed after its grammars. */
typedef struct plr_pieces plr_pieces;
plr_pieces * plr_pieces_new(const struct llama_vocab * vocab);
void         plr_pieces_free(plr_pieces * pieces);

/* A grammar waits until one of these is in the output; if there are none, it begins at once. */
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
