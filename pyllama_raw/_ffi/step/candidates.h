// Reads a row of logits: all candidates, the likeliest ones, or only the best one.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <vector>

#include "llama.h"

namespace row_sampling {

// The largest of *n* logits; NaN is never larger. The compiler makes vectors of the columns.
inline float largest(const float * logits, int32_t n) {
    constexpr int32_t n_columns = 32;
    float most[n_columns];
    std::fill_n(most, n_columns, -INFINITY);
    int32_t i = 0;
    for (; i + n_columns <= n; i += n_columns) {
        for (int32_t column = 0; column < n_columns; ++column) {
            const float x = logits[i + column];
            most[column]  = x > most[column] ? x : most[column];
        }
    }
    for (; i < n; ++i) {
        most[0] = logits[i] > most[0] ? logits[i] : most[0];
    }
    return *std::max_element(most, most + n_columns);
}

// The first token with the largest logit. All memory is read once, the best block twice.
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

// Each thread has one array; the next call overwrites it.
inline llama_token_data * places(int32_t n) {
    thread_local std::vector<llama_token_data> storage;
    storage.resize(std::max<size_t>(storage.size(), n));
    return storage.data();
}

// All tokens that may be sampled, by rising id. Forbidden ones are left out, because some
// samplers compute NaN from -infinity.
inline llama_token_data_array candidates(const float * logits, int32_t n_vocab) {
    llama_token_data * found = places(n_vocab);
    size_t n_left = 0;
    for (llama_token id = 0; id < n_vocab; ++id) {
        found[n_left] = llama_token_data{id, logits[id], 0.0f};
        n_left += logits[id] > -INFINITY;  // and not NaN
    }
    return {found, n_left, -1, false};
}

// The n_first likeliest of *view*, best first, of equals the lowest id.
inline void keep_first(llama_token_data_array & view, int32_t n_first) {
    const auto before = [](const llama_token_data & a, const llama_token_data & b) {
        return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
    };
    const size_t n_left = std::min<size_t>(view.size, n_first);
    std::partial_sort(view.data, view.data + n_left, view.data + view.size, before);
    view.size   = n_left;
    view.sorted = true;
}

// A logit that at least *n* tokens reach: the row is cut into groups, and this is the n-th
// largest of their largest logits.
inline float nth_at_least(const float * logits, int32_t n_vocab, int32_t n) {
    constexpr int32_t n_groups = 1024;  // id modulo n_groups, so that vectors can be used
    float groups[n_groups];
    std::fill_n(groups, n_groups, -INFINITY);
    for (int32_t start = 0; start < n_vocab; start += n_groups) {
        const int32_t n_here = std::min(n_groups, n_vocab - start);
        for (int32_t i = 0; i < n_here; ++i) {
            const float x = logits[start + i];
            groups[i]     = x > groups[i] ? x : groups[i];
        }
    }
    std::nth_element(groups, groups + n - 1, groups + n_groups, std::greater<float>());
    return groups[n - 1];
}

// What keep_first() leaves of candidates(), without an array of the whole vocabulary.
inline llama_token_data_array first_candidates(const float * logits, int32_t n_vocab,
                                               int32_t n_first) {
    constexpr int32_t n_block = 64;
    const float floor = nth_at_least(logits, n_vocab, n_first);
    llama_token_data * found = places(n_vocab);
    size_t n_found = 0;
    for (int32_t start = 0; start < n_vocab; start += n_block) {
        const int32_t end = std::min(start + n_block, n_vocab);
        int32_t n_above = 0;
        for (int32_t id = start; id < end; ++id) {
            n_above += logits[id] >= floor;
        }
        for (int32_t id = start; n_above > 0 && id < end; ++id) {
            found[n_found] = llama_token_data{id, logits[id], 0.0f};
            n_found += logits[id] >= floor && logits[id] > -INFINITY;
        }
    }
    llama_token_data_array view = {found, n_found, -1, false};
    keep_first(view, n_first);
    return view;
}

}  // namespace row_sampling
