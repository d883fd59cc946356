// Floats to half floats, as an encoder makes them of keys and values for attention.
#pragma once

#include "custom_node.h"
#include "ggml.h"
#include "simd.h"

class Halves {
  public:
    static bool takes(const ggml_tensor * node) {
        const ggml_tensor * from = node->src[0];
        return node->op == GGML_OP_CPY && node->type == GGML_TYPE_F16 &&
               from->type == GGML_TYPE_F32 && from->nb[0] == sizeof(float) &&
               from->ne[0] % 8 == 0 && ggml_is_contiguous(node) && ggml_are_same_shape(node, from);
    }

    // Every thread of libllama calls this for every operation, and does its rows.
    static void compute(ggml_tensor * node, int ith, int n_threads, void *) {
        const int64_t n_rows = ggml_nrows(node);
        copy(node, n_rows * ith / n_threads, n_rows * (ith + 1) / n_threads);
    }

  private:
    PLR_AVX2 PLR_CALLED static void copy(ggml_tensor * node, int64_t first, int64_t last) {
        const ggml_tensor & from = *node->src[0];
        for (int64_t row = first; row < last; ++row) {
            const int64_t i1 = row % from.ne[1], i2 = row / from.ne[1] % from.ne[2];
            const int64_t i3   = row / from.ne[1] / from.ne[2];
            const auto *  data = reinterpret_cast<const float *>(
                static_cast<const char *>(from.data) + i1 * from.nb[1] + i2 * from.nb[2] +
                i3 * from.nb[3]);
            auto * to = static_cast<char *>(node->data) + row * node->nb[1];
            for (int64_t i = 0; i < from.ne[0]; i += 8) {
                const __m128i halves =
                    _mm256_cvtps_ph(_mm256_loadu_ps(data + i), _MM_FROUND_TO_NEAREST_INT);
                _mm_storeu_si128(reinterpret_cast<__m128i *>(to + i * 2), halves);
            }
        }
    }
};
