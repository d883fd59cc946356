// Samples a token from one row of logits: biases and forbidden tokens, then the chain or the
// largest logit, then the grammar.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "candidates.h"
#include "grammar/allowed.h"
#include "logprobs.h"
#include "sampler.h"

namespace row_sampling {

// Adds the biases of the sampler to the row, then sets forbidden tokens to -infinity.
inline void shape(const plr_sampler & sampler, float * logits, int32_t n_vocab, int32_t place) {
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
        const uint32_t * mask = sampler.mask + size_t(place) * ((n_vocab + 31) / 32);
        for (int32_t id = 0; id < n_vocab; ++id) {
            const bool allowed = (mask[id / 32] >> (id % 32)) & 1;
            logits[id] = allowed ? logits[id] : -INFINITY;
        }
    }
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

// Does what llama_sampler_sample does, but throws where that ends the process: if the chain
// selects nothing. *view* keeps the candidates of the draw; it is empty if there was no draw.
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

// First draws without the grammar. Only if the grammar refuses that token it is asked about all
// tokens, and the row is sampled again.
inline llama_token sample(const plr_sampler & sampler, const float * logits,
                          int32_t n_vocab, llama_token_data_array & view) {
    llama_token token;
    if (sampler.chain == nullptr) {
        token = argmax(logits, n_vocab);
    } else {
        view  = sampler.n_first > 0 ? first_candidates(logits, n_vocab, sampler.n_first)
                                    : candidates(logits, n_vocab);
        token = draw(sampler.chain, view);
    }
    if (sampler.grammar == nullptr) {
        return token;
    }
    if (sampler.grammar->allows(token)) {
        return token;
    }
    view = candidates(logits, n_vocab);
    sampler.grammar->apply(view);
    drop_forbidden(view);
    return draw(sampler.chain, view);
}

inline void check_open(const plr_sampler * sampler) {
    if (sampler == nullptr || sampler->n_suppress < 0) {
        throw std::invalid_argument("the sampler of the row is closed or was never set");
    }
}

inline void accept(plr_sampler & sampler, llama_token token) {
    if (sampler.grammar != nullptr) {
        sampler.grammar->accept(token);
    }
    if (sampler.chain != nullptr) {
        llama_sampler_accept(sampler.chain, token);
    }
    sampler.n_min -= sampler.n_min > 0;
}

// The row is changed. *place* counts the rows of one sequence in a step, all but the first of
// which are there for a draft.
inline llama_token sample_row(plr_sampler * sampler, float * logits, int32_t n_vocab,
                              int32_t place = 0) {
    check_open(sampler);
    thread_local std::vector<float> raw;
    plr_logprobs * wanted = sampler->logprobs == nullptr ? nullptr : sampler->logprobs + place;
    if (wanted != nullptr && !wanted->of_sampler) {
        raw.assign(logits, logits + n_vocab);
    }
    shape(*sampler, logits, n_vocab, place);
    llama_token_data_array view = {nullptr, 0, -1, false};
    const llama_token token = sample(*sampler, logits, n_vocab, view);
    if (wanted != nullptr && wanted->of_sampler) {
        logprobs::read_view(view, token, *wanted);
    } else if (wanted != nullptr) {
        logprobs::read_row(raw.data(), n_vocab, token, *wanted);
    }
    accept(*sampler, token);
    ++sampler->n_on_host;
    return token;
}

// Throws if the sampler needs logits that the lane has not left.
inline void check_lane(const plr_sampler & sampler, int32_t n_left, int32_t n_vocab) {
    const bool reads_row = sampler.logprobs != nullptr && !sampler.logprobs->of_sampler;
    if (sampler.n_first < 1 || sampler.grammar != nullptr || sampler.mask != nullptr ||
        sampler.n_bias > 0 || reads_row) {
        throw std::logic_error("the sampler needs all logits, the slot has a lane");
    }
    const int64_t n_needed = int64_t{sampler.n_first} + sampler.n_suppress +
                             (sampler.n_min > 0 ? sampler.n_ending : 0);
    if (n_left < std::min<int64_t>(n_needed, n_vocab)) {
        throw std::logic_error("the lane of the slot leaves too few candidates");
    }
}

// The same from what a lane has left: the likeliest tokens of a row, in any order.
inline llama_token sample_lane(plr_sampler * sampler, const float * logits,
                               const llama_token * ids, int32_t n_left, int32_t n_vocab) {
    check_open(sampler);
    check_lane(*sampler, n_left, n_vocab);
    const auto has = [](const llama_token * list, int32_t n, llama_token id) {
        return std::find(list, list + n, id) != list + n;
    };
    llama_token_data_array view = {places(n_left), 0, -1, false};
    for (int32_t i = 0; i < n_left; ++i) {
        const bool forbidden =
            has(sampler->suppress, sampler->n_suppress, ids[i]) ||
            (sampler->n_min > 0 && has(sampler->ending, sampler->n_ending, ids[i]));
        if (logits[i] > -INFINITY && !forbidden) {  // and not NaN
            view.data[view.size++] = llama_token_data{ids[i], logits[i], 0.0f};
        }
    }
    keep_first(view, sampler->n_first);
    const llama_token token = draw(sampler->chain, view);
    if (sampler->logprobs != nullptr) {
        logprobs::read_view(view, token, *sampler->logprobs);
    }
    accept(*sampler, token);
    ++sampler->n_on_lane;
    return token;
}

}  // namespace row_sampling
