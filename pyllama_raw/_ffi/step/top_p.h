// Top-p: keeps the likeliest candidates that make up p, as llama_sampler_init_top_p does, but
// faster.
//
// libllama sorts either 256 candidates or all of them, by buckets for a fixed range of logits;
// the logits of many models lie outside. Here the likely candidates are sorted first, then some
// less likely ones, until they make up p. Probabilities are summed in the order of libllama, so
// the last digits are the same.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "llama.h"

namespace top_p {

struct Settings {
    float  p;
    size_t min_keep;
};

// Writes exp(logit - largest) into the probability of each candidate; returns the sum.
inline float exponentials(llama_token_data_array & view) {
    float largest = view.data[0].logit;
    for (size_t i = 1; i < view.size; ++i) {
        largest = std::max(largest, view.data[i].logit);
    }
    float sum = 0.0f;
    for (size_t i = 0; i < view.size; ++i) {
        view.data[i].p = expf(view.data[i].logit - largest);
        sum += view.data[i].p;
    }
    return sum;
}

// The candidates that are not sorted yet. The next ones to be sorted reach *floor*.
struct Unsorted {
    llama_token_data * begin;
    llama_token_data * end;
    float              floor;

    // Sort the likeliest of them, at least one.
    void sort_some() {
        llama_token_data * rest = begin;
        for (; rest == begin; floor /= 16.0f) {
            rest = std::partition(begin, end, [&](const auto & one) { return !(one.p < floor); });
        }
        std::sort(begin, rest, [](const auto & a, const auto & b) {
            return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
        });
        begin = rest;
    }
};

inline void keep(llama_token_data_array & view, const Settings & settings) {
    if (settings.p >= 1.0f || view.size == 0) {
        return;
    }
    const float sum  = exponentials(view);
    const auto  end  = view.data + view.size;
    Unsorted    rest = {view.sorted ? end : view.data, end, (1.0f - settings.p) * sum / 64.0f};
    float  reached = 0.0f;
    size_t n_left  = 0;
    do {
        llama_token_data * next = view.data + n_left++;
        if (next == rest.begin) {
            rest.sort_some();
        }
        next->p /= sum;
        reached += next->p;
    } while (n_left < view.size && !(reached >= settings.p && n_left >= settings.min_keep));
    view.size   = n_left;
    view.sorted = true;
}

llama_sampler * make(Settings settings);

inline const Settings & settings_of(const llama_sampler * sampler) {
    return *static_cast<const Settings *>(sampler->ctx);
}

inline llama_sampler_i * interface() {
    static llama_sampler_i found = [] {
        llama_sampler_i made = {};
        made.name  = [](const llama_sampler *) { return "top-p"; };
        made.apply = [](llama_sampler * sampler, llama_token_data_array * view) {
            keep(*view, settings_of(sampler));
        };
        made.clone = [](const llama_sampler * sampler) { return make(settings_of(sampler)); };
        made.free = [](llama_sampler * sampler) { delete static_cast<Settings *>(sampler->ctx); };
        return made;
    }();
    return &found;
}

inline llama_sampler * make(Settings settings) {
    return llama_sampler_init(interface(), new Settings(settings));
}

}  // namespace top_p
