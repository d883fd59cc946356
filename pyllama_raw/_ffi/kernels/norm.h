// Norms of floats, with the weights and the bias that follow them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "custom_node.h"
#include "ggml.h"
#include "joined.h"

class Norm {
  public:
    static bool takes(const ggml_tensor * node) {
        return node->op == GGML_OP_NORM && node->type == GGML_TYPE_F32 && has_avx2() &&
               node->src[0]->type == GGML_TYPE_F32 && ggml_is_contiguous(node) &&
               ggml_is_contiguous(node->src[0]);
    }

    // What the node says, kept before it becomes ours.
    static NodeState state(const ggml_tensor * node) {
        NodeState state{};
        std::memcpy(&state.epsilon, node->op_params, sizeof(state.epsilon));
        return state;
    }

    // As FloatProduct::joins(); the weights come first.
    static bool joins(ggml_tensor * norm, const ggml_tensor * tail, const ggml_tensor * node) {
        const bool is_weight = node->op == GGML_OP_MUL;
        if ((!is_weight && node->op != GGML_OP_ADD) || !joined::is_in_place(node, tail) ||
            !joined::is_row(node->src[1], node->ne[0]) || norm->src[kBias] != nullptr ||
            (is_weight && norm->src[kWeight] != nullptr)) {
            return false;
        }
        norm->src[is_weight ? kWeight : kBias] = node->src[1];
        return true;
    }

    // Every thread of libllama calls this for every norm, and takes one part at a time.
    static void compute(ggml_tensor * node, int, int, void *) {
        const int64_t n_rows = ggml_nrows(node);
        NodeState &   state  = NodeState::of(node);
        for (int64_t at = state.take() * kPart; at < n_rows; at = state.take() * kPart) {
            for (int64_t row = at; row < std::min(at + kPart, n_rows); ++row) {
                norm(node, row, state.epsilon);
            }
        }
    }

  private:
    static constexpr int     kWeight = 1, kBias = 2;  // sources of a norm that others have joined
    static constexpr int64_t kPart = 16;              // rows

    static const float * row_of(const ggml_tensor * tensor) {
        return tensor == nullptr ? nullptr : static_cast<const float *>(tensor->data);
    }

    PLR_AVX2 PLR_CALLED static void norm(ggml_tensor * node, int64_t row, float epsilon) {
        constexpr int n_lanes = 8;
        const int     n = int(node->ne[0]), n_whole = n - n % n_lanes;
        const float * from   = row_of(node->src[0]) + row * n;
        auto *        to     = static_cast<float *>(node->data) + row * n;
        __m256        sums   = _mm256_setzero_ps();
        float         rest   = 0;
        for (int i = 0; i < n_whole; i += n_lanes) {
            sums = _mm256_add_ps(sums, _mm256_loadu_ps(from + i));
        }
        for (int i = n_whole; i < n; ++i) {
            rest += from[i];
        }
        const float mean = (total(sums) + rest) / n;
        sums             = _mm256_setzero_ps();
        rest             = 0;
        for (int i = 0; i < n_whole; i += n_lanes) {
            const __m256 x = _mm256_sub_ps(_mm256_loadu_ps(from + i), _mm256_set1_ps(mean));
            sums           = _mm256_fmadd_ps(x, x, sums);
        }
        for (int i = n_whole; i < n; ++i) {
            rest += (from[i] - mean) * (from[i] - mean);
        }
        const float   share  = 1 / std::sqrt((total(sums) + rest) / n + epsilon);
        const float * weight = row_of(node->src[kWeight]);
        const float * bias   = row_of(node->src[kBias]);
        for (int i = 0; i < n; ++i) {
            to[i] = (from[i] - mean) * share;
        }
        for (int i = 0; weight != nullptr && i < n; ++i) {
            to[i] *= weight[i];
        }
        for (int i = 0; bias != nullptr && i < n; ++i) {
            to[i] += bias[i];
        }
    }

    PLR_AVX2 static float total(__m256 x) {
        __m128 sum = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        sum        = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
        return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
    }
};
