#include "sampler.h"

#include "boundary/exceptions.h"
#include "row_sampling.h"
#include "top_p.h"

int plr_sample(plr_sampler * sampler, float * logits, int32_t n_vocab, llama_token * token) {
    *token = LLAMA_TOKEN_NULL;
    return attempt([&] { *token = row_sampling::sample_row(sampler, logits, n_vocab); });
}

llama_sampler * plr_init_dry(const llama_vocab * vocab, float multiplier, float base,
                             int32_t allowed_length, int32_t last_n,
                             const char ** breakers, size_t n_breakers) {
    remember("");
    return guarded<llama_sampler *>(nullptr, [&] {
        return llama_sampler_init_dry(vocab, multiplier, base, allowed_length, last_n,
                                      breakers, n_breakers);
    });
}

llama_sampler * plr_init_top_p(float p, size_t min_keep) {
    return guarded<llama_sampler *>(nullptr, [&] { return top_p::make({p, min_keep}); });
}

llama_sampler * plr_sampler_clone(const llama_sampler * sampler) {
    return guarded<llama_sampler *>(nullptr, [&] { return llama_sampler_clone(sampler); });
}

int plr_sampler_accept_many(llama_sampler * sampler, const llama_token * tokens, int32_t n_tokens) {
    return attempt([&] {
        for (int32_t i = 0; i < n_tokens; ++i) {
            llama_sampler_accept(sampler, tokens[i]);
        }
    });
}
