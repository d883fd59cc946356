// Nodes that join the one before them, which then does their work: they compute in place.
#pragma once

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

PLR_AVX2 PLR_CALLED inline void add(float * to, const float * from, int n) {
    for (int i = 0; i < n; ++i) {
        to[i] += from[i];
    }
}

}  // namespace joined
