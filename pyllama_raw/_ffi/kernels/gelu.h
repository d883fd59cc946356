// GELU of floats, in 32 bits; libllama looks the results up in a table of 16 bits.
#pragma once

#include <algorithm>

#include "attention.h"
#include "custom_node.h"
#include "ggml.h"

class Gelu {
  public:
    static bool takes(const ggml_tensor * node) {
        return node->op == GGML_OP_UNARY && ggml_get_unary_op(node) == GGML_UNARY_OP_GELU &&
               node->type == GGML_TYPE_F32 && node->src[0]->type == GGML_TYPE_F32 &&
               ggml_is_contiguous(node) && ggml_is_contiguous(node->src[0]);
    }

    // Every thread of libllama calls this for every operation, and takes one part at a time.
    static void compute(ggml_tensor * node, int, int, void *) {
        const int64_t n_values = ggml_nelements(node);
        const auto *  from     = static_cast<const float *>(node->src[0]->data);
        auto *        to       = static_cast<float *>(node->data);
        NodeState &   state    = NodeState::of(node);
        for (int64_t at = state.take() * kPart; at < n_values; at = state.take() * kPart) {
            Attention::unit()->gelu(to + at, from + at, std::min(kPart, n_values - at));
        }
    }

  private:
    static constexpr int64_t kPart = 8192;
};
