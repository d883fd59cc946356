// Log-probabilities of a row of logits, or of what a sampler chain made of it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "sampler.h"

namespace logprobs {

// Keeps the largest logits of those that it is shown, best first, and of equals the first.
class Top {
  public:
    Top(llama_token * ids, float * values, int32_t n_max)
        : ids_(ids), values_(values), n_max_(n_max) {}

    void show(llama_token id, float logit) {
        if (!(logit > floor_) || n_max_ == 0) {
            return;
        }
        int32_t place = n_ < n_max_ ? n_++ : n_ - 1;
        for (; place > 0 && logit > values_[place - 1]; --place) {
            ids_[place]    = ids_[place - 1];
            values_[place] = values_[place - 1];
        }
        ids_[place]    = id;
        values_[place] = logit;
        if (n_ == n_max_) {
            floor_ = values_[n_ - 1];
        }
    }

    int32_t n() const { return n_; }

  private:
    llama_token * ids_;
    float *       values_;
    int32_t       n_max_;
    int32_t       n_     = 0;
    float         floor_ = -std::numeric_limits<float>::infinity();
};

// Fill *out* with the log-softmax of n logits; at(i) is {id, logit}.
template <typename At>
void read(size_t n, At && at, llama_token token, plr_logprobs & out) {
    Top   top(out.ids, out.values, out.n_top);
    constexpr float lowest = -std::numeric_limits<float>::infinity();
    float largest = lowest;
    float chosen  = lowest;
    for (size_t i = 0; i < n; ++i) {
        const auto [id, logit] = at(i);
        top.show(id, logit);
        largest = std::max(largest, logit);
        chosen  = id == token ? logit : chosen;
    }
    double sum = 0.0;
    for (size_t i = 0; i < n; ++i) {
        const float logit = at(i).logit;
        sum += logit > lowest ? std::exp(logit - largest) : 0.0f;  // NaN: impossible
    }
    const double norm = largest + std::log(sum);
    out.n_found = top.n();
    out.value   = static_cast<float>(chosen - norm);
    for (int32_t i = 0; i < out.n_found; ++i) {
        out.values[i] = static_cast<float>(out.values[i] - norm);
    }
}

struct Item {
    llama_token id;
    float       logit;
};

inline void read_row(const float * logits, int32_t n_vocab, llama_token token,
                     plr_logprobs & out) {
    const auto at = [&](size_t i) { return Item{static_cast<llama_token>(i), logits[i]}; };
    read(static_cast<size_t>(n_vocab), at, token, out);
}

// If the view is empty, *token* was certain.
inline void read_view(const llama_token_data_array & view, llama_token token,
                      plr_logprobs & out) {
    const Item certain = {token, 0.0f};
    if (view.size == 0) {
        read(1, [&](size_t) { return certain; }, token, out);
    } else {
        const auto at = [&](size_t i) { return Item{view.data[i].id, view.data[i].logit}; };
        read(view.size, at, token, out);
    }
}

}  // namespace logprobs
