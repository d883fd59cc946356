// Nodes of a graph that only look at the result of another one.
#pragma once

#include "ggml.h"

// Whether nothing is computed for *node*.
inline bool is_view(const ggml_tensor * node) {
    switch (node->op) {
        case GGML_OP_NONE:
        case GGML_OP_RESHAPE:
        case GGML_OP_VIEW:
        case GGML_OP_PERMUTE:
        case GGML_OP_TRANSPOSE:
            return true;
        default:
            return false;
    }
}
