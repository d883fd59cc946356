// What graphs that make vectors of texts have between products: norms of floats, with the weights
// and the bias that follow them, GELU, and half floats for attention. Nodes that compute in place join
// the one before them, which then does their work.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>

#include "attention.h"
#include "custom_node.h"
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

// Adds *n* values of each column of *more* to columns. Strides are floats; that of a row, which all
// columns share, is 0.
PLR_AVX2 PLR_CALLED inline void add(float * to, size_t stride, int n_columns,
                                    const float * __restrict more, size_t more_stride, int n) {
    for (int c = 0; c < n_columns; ++c, to += stride, more += more_stride) {
        for (int i = 0; i < n; ++i) {
            to[i] += more[i];
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

// GELU of floats, in 32 bits; libllama looks the results up in a table of 16 bits.
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

// Floats to half floats, as an encoder makes them of keys and values for attention.
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
