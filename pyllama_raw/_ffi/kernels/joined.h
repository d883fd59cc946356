// Nodes that join the one before them, which then does their work: they compute in place.
#pragma once

#include <algorithm>
#include <cstddef>

#include "ggml.h"
#include "simd.h"

namespace joined {

// Whether *node* only changes what *tail* has computed.
inline bool is_in_place(const ggml_tensor * node, const ggml_tensor * tail) {
    return node->src[0] == tail && node->data == tail->data && node->type == GGML_TYPE_F32 &&
           ggml_are_same_shape(node, tail) && ggml_are_same_stride(node, tail);
}

// A bias, or weights of a norm.
inline bool is_row(const ggml_tensor * tensor, int64_t n) {
    return tensor->type == GGML_TYPE_F32 && tensor->nb[0] == sizeof(float) &&
           tensor->ne[0] == n && ggml_nelements(tensor) == n;
}

// Adds *row*, which has *n* values, to columns that stand *stride* floats apart.
PLR_AVX2 PLR_CALLED inline void add_row(float * to, size_t stride, int n_columns,
                                        const float * __restrict row, int n) {
    for (int c = 0; c < n_columns; ++c, to += stride) {
        for (int i = 0; i < n; ++i) {
            to[i] += row[i];
        }
    }
}

// Copies *n* values of each column; adds those of *more*, if there are some. Strides are floats.
PLR_AVX2 PLR_CALLED inline void place(float * __restrict to, size_t stride, const float * from,
                                      size_t from_stride, const float * __restrict more,
                                      size_t more_stride, int n_columns, int n) {
    constexpr int kAhead = 8, kLine = 16;  // columns that are loaded ahead, floats
    for (int c = 0; c < n_columns; ++c, to += stride, from += from_stride) {
        if (more == nullptr) {
            std::copy_n(from, n, to);
            continue;
        }
        for (int i = 0; i < n; i += kLine) {
            _mm_prefetch(more + kAhead * more_stride + i, _MM_HINT_T0);
        }
        for (int i = 0; i < n; ++i) {
            to[i] = from[i] + more[i];
        }
        more += more_stride;
    }
}

}  // namespace joined
