#include "grammar.h"

#include "boundary/exceptions.h"
#include "allowed.h"

plr_grammar * plr_grammar_new(const llama_vocab * vocab, const plr_llguidance * functions,
                              const void * matcher, const plr_triggers * triggers) {
    return guarded<plr_grammar *>(nullptr, [&] {
        return new plr_grammar(
            vocab, *functions, matcher,
            {{triggers->texts, triggers->texts + triggers->n_texts},
             {triggers->tokens, triggers->tokens + triggers->n_tokens}});
    });
}

void plr_grammar_free(plr_grammar * grammar) {
    delete grammar;
}
