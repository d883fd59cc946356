#include "grammar.h"

#include "boundary/exceptions.h"
#include "allowed.h"

plr_pieces * plr_pieces_new(const llama_vocab * vocab) {
    return guarded<plr_pieces *>(nullptr, [&] { return new plr_pieces(vocab); });
}

void plr_pieces_free(plr_pieces * pieces) {
    delete pieces;
}

plr_grammar * plr_grammar_new(const plr_pieces * pieces, const plr_llguidance * functions,
                              const void * matcher, const plr_triggers * triggers) {
    return guarded<plr_grammar *>(nullptr, [&] {
        return new plr_grammar(
            *pieces, grammar::Matcher(*functions, matcher),
            {{triggers->texts, triggers->texts + triggers->n_texts},
             {triggers->tokens, triggers->tokens + triggers->n_tokens}});
    });
}

plr_grammar * plr_grammar_copy(const plr_grammar * grammar) {
    return guarded<plr_grammar *>(nullptr, [&] { return new plr_grammar(*grammar); });
}

void plr_grammar_free(plr_grammar * grammar) {
    delete grammar;
}
