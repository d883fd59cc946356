// From a row of logits to a token: what is forbidden, the chain or the largest, the grammar.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "logprobs.h"
#include "shim.h"

namespace row_sampling {

// The largest of *n* logits; NaN is never larger. Lanes let the compiler use vectors.
inline float largest(const float * logits, int32_t n) {
    constexpr int32_t n_lanes = 32;
    float lanes[n_lanes];
    std::fill_n(lanes, n_lanes, -INFINITY);
    int32_t i = 0;
    for (; i + n_lanes <= n; i += n_lanes) {
        for (int32_t lane = 0; lane < n_lanes; ++lane) {
            const float x = logits[i + lane];
            lanes[lane]   = x > lanes[lane] ? x : lanes[lane];
        }
    }
    for (; i < n; ++i) {
        lanes[0] = logits[i] > lanes[0] ? logits[i] : lanes[0];
    }
    return *std::max_element(lanes, lanes + n_lanes);
}

// The first of the largest. Memory is read once; only the best block is looked at again.
inline llama_token argmax(const float * logits, int32_t n_vocab) {
    constexpr int32_t n_block = 1024;
    float   best  = -INFINITY;
    int32_t start = 0;
    for (int32_t i = 0; i < n_vocab; i += n_block) {
        const float x = largest(logits + i, std::min(n_block, n_vocab - i));
        if (x > best) {
            best  = x;
            start = i;
        }
    }
    if (best == -INFINITY) {
        throw std::runtime_error("no token has a finite logit");
    }
    return static_cast<llama_token>(std::find(logits + start, logits + n_vocab, best) - logits);
}

// Change the row as its sampler says: biases first, then ids that must not be sampled.
inline void shape(const plr_sampler & sampler, float * logits, int32_t n_vocab) {
    for (int32_t i = 0; i < sampler.n_bias; ++i) {
        const llama_logit_bias bias = sampler.bias[i];
        if (bias.token >= 0 && bias.token < n_vocab) {
            logits[bias.token] += bias.bias;
        }
    }
    const auto forbid = [&](const llama_token * ids, int32_t n) {
        for (int32_t i = 0; i < n; ++i) {
            if (ids[i] >= 0 && ids[i] < n_vocab) {
                logits[ids[i]] = -INFINITY;
            }
        }
    };
    forbid(sampler.suppress, sampler.n_suppress);
    if (sampler.n_min > 0) {
        forbid(sampler.ending, sampler.n_ending);
    }
    if (sampler.mask != nullptr) {
        for (int32_t id = 0; id < n_vocab; ++id) {
            const bool allowed = (sampler.mask[id / 32] >> (id % 32)) & 1;
            logits[id] = allowed ? logits[id] : -INFINITY;
        }
    }
}

// Tokens that may be sampled, by rising id; gaps are closed: some samplers compute NaN
// from -infinity. One array a thread: gone with the next call.
inline llama_token_data_array candidates(const float * logits, int32_t n_vocab) {
    thread_local std::vector<llama_token_data> storage;
    storage.resize(n_vocab);
    size_t n_left = 0;
    for (llama_token id = 0; id < n_vocab; ++id) {
        storage[n_left] = llama_token_data{id, logits[id], 0.0f};
        n_left += logits[id] > -INFINITY;  // and not NaN
    }
    return {storage.data(), n_left, -1, false};
}

inline void drop_forbidden(llama_token_data_array & view) {
    size_t n_left = 0;
    for (size_t i = 0; i < view.size; ++i) {
        const llama_token_data candidate = view.data[i];
        view.data[n_left] = candidate;
        n_left += candidate.logit > -INFINITY;
    }
    view.size = n_left;
}

// As llama_sampler_sample, which would end the process if the chain selects nothing.
// What the draw was from is left in *view*; nothing where there was no draw.
inline llama_token draw(llama_sampler * chain, llama_token_data_array & view) {
    if (view.size == 0) {
        throw std::runtime_error("no token is allowed here");
    }
    if (chain == nullptr) {
        const auto less = [](const auto & a, const auto & b) { return a.logit < b.logit; };
        const size_t n = view.size;
        view.size = 0;
        return std::max_element(view.data, view.data + n, less)->id;
    }
    llama_sampler_apply(chain, &view);
    if (view.selected < 0 || view.selected >= static_cast<int64_t>(view.size)) {
        throw std::runtime_error("the sampler chain selected no token");
    }
    return view.data[view.selected].id;
}

inline bool allows(llama_sampler * grammar, llama_token token) {
    llama_token_data data = {token, 1.0f, 0.0f};
    llama_token_data_array view = {&data, 1, -1, false};
    llama_sampler_apply(grammar, &view);
    return data.logit != -INFINITY;
}

// A grammar looks at all tokens only if it refuses the one that was drawn without it.
inline llama_token sample(const plr_sampler & sampler, const float * logits,
                          int32_t n_vocab, llama_token_data_array & view) {
    llama_token token;
    if (sampler.chain == nullptr) {
        token = argmax(logits, n_vocab);
    } else {
        view  = candidates(logits, n_vocab);
        token = draw(sampler.chain, view);
    }
    if (sampler.grammar == nullptr || allows(sampler.grammar, token)) {
        return token;
    }
    view = candidates(logits, n_vocab);
    llama_sampler_apply(sampler.grammar, &view);
    drop_forbidden(view);
    return draw(sampler.chain, view);
}

inline llama_token sample_and_accept(plr_sampler * sampler, float * logits,
                                     int32_t n_vocab) {
    if (sampler == nullptr || sampler->n_suppress < 0) {
        throw std::invalid_argument("the sampler of the row is closed or was never set");
    }
    thread_local std::vector<float> raw;
    plr_logprobs * wanted = sampler->logprobs;
    if (wanted != nullptr && !wanted->of_sampler) {
        raw.assign(logits, logits + n_vocab);
    }
    shape(*sampler, logits, n_vocab);
    llama_token_data_array view = {nullptr, 0, -1, false};
    const llama_token token = sample(*sampler, logits, n_vocab, view);
    if (wanted != nullptr && wanted->of_sampler) {
        logprobs::read_view(view, token, *wanted);
    } else if (wanted != nullptr) {
        logprobs::read_row(raw.data(), n_vocab, token, *wanted);
    }
    if (sampler->grammar != nullptr) {
        llama_sampler_accept(sampler->grammar, token);
    }
    if (sampler->chain != nullptr) {
        llama_sampler_accept(sampler->chain, token);
    }
    sampler->n_min -= sampler->n_min > 0;
    return token;
}

}  // namespace row_sampling
