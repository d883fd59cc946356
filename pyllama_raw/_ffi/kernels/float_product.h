// Products of columns of floats with weights of 16 or 32 bits, by AVX2.
//
// Sixteen rows of weights become a panel of floats, which stays in the nearest cache while six
// columns at a time are multiplied with it. Each sum adds its products in their order, so a
// column does not depend on others.
#pragma once

#include <algorithm>
#include <cstdint>

#include "custom_node.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "simd.h"

class FloatProduct {
  public:
    // libllama uses the wider vectors of AVX-512 where there are some.
    static bool is_usable() { return has_avx2() && !has_avx512(); }

    static bool takes(const ggml_tensor * node) {
        if (node->op != GGML_OP_MUL_MAT || !is_usable()) {
            return false;
        }
        const ggml_tensor *rows = node->src[0], *columns = node->src[1];
        const bool is_weight = rows->buffer != nullptr && ggml_backend_buffer_is_host(rows->buffer);
        return is_weight && (rows->type == GGML_TYPE_F32 || rows->type == GGML_TYPE_F16) &&
               node->op_params[1] == GGML_HINT_NONE && ggml_n_dims(rows) <= 2 &&
               ggml_n_dims(columns) <= 2 && columns->type == GGML_TYPE_F32 &&
               rows->nb[0] == ggml_type_size(rows->type) &&
               columns->nb[0] == sizeof(float) && node->nb[0] == sizeof(float);
    }

    // Every thread of libllama calls this for every product, and takes one part at a time.
    static void compute(ggml_tensor * node, int, int, void *) {
        const int   n_rows = int(node->ne[0]), n_columns = int(node->ne[1]);
        const int   n_chunks = (n_rows + kChunk - 1) / kChunk;
        const int   n_parts  = n_chunks * ((n_columns + kGroup - 1) / kGroup);
        NodeState & state    = NodeState::of(node);
        for (int part = state.take(); part < n_parts; part = state.take()) {
            const int row = part % n_chunks * kChunk, column = part / n_chunks * kGroup;
            multiply(node, row, std::min(row + kChunk, n_rows), column,
                     std::min(column + kGroup, n_columns));
        }
    }

  private:
    static constexpr int kPanel = 16, kColumns = 6;  // of a tile, whose sums fill 12 registers
    static constexpr int kDepth = 256;   // values of a row at a time: a panel is 16 KiB
    static constexpr int kChunk = 32;    // rows that a thread takes at a time
    static constexpr int kGroup = 768;   // and columns, for each of which it packs the rows anew
    static constexpr int kBlock = 96;    // columns that stay in the cache of a core

    using Tile = float[kColumns][kPanel];

    static void multiply(ggml_tensor * node, int row, int row_end, int column, int column_end) {
        const ggml_tensor & weights  = *node->src[0];
        const int           n_values = int(weights.ne[0]);
        const int           n_parts  = (n_values + kDepth - 1) / kDepth;
        alignas(64) float   panels[kChunk * kDepth];
        for (int part = 0; part < n_parts; ++part) {
            const int first = n_values * part / n_parts, n = n_values * (part + 1) / n_parts - first;
            for (int at = row; at < row_end; at += kPanel) {
                pack(panels + (at - row) * n, weights, at, std::min(kPanel, row_end - at), first, n);
            }
            for (int block = column; block < column_end; block += kBlock) {
                const int end = std::min(block + kBlock, column_end);
                for (int at = row; at < row_end; at += kPanel) {
                    const int n_rows = std::min(kPanel, row_end - at);
                    for (int c = block; c < end; c += kColumns) {
                        tile(node, panels + (at - row) * n, at, n_rows, c,
                             std::min(kColumns, end - c), first, n);
                    }
                }
            }
        }
    }

    // The rows from *row* on, value by value; what a panel has beyond them is zero.
    PLR_AVX2 PLR_CALLED static void pack(float * to, const ggml_tensor & weights, int row,
                                         int n_rows, int first, int n) {
        const char * data[kPanel];
        for (int r = 0; r < kPanel; ++r) {
            data[r] = static_cast<const char *>(weights.data) +
                      (row + std::min(r, n_rows - 1)) * weights.nb[1] + first * weights.nb[0];
        }
        const bool is_half = weights.type == GGML_TYPE_F16;
        int        k       = 0;
        for (; k + 8 <= n; k += 8) {
            for (int half = 0; half < kPanel; half += 8) {
                __m256 x[8];
                for (int r = 0; r < 8; ++r) {
                    const char * from = data[half + r];
                    x[r] = half + r >= n_rows ? _mm256_setzero_ps()
                           : is_half          ? _mm256_cvtph_ps(_mm_loadu_si128(
                                         reinterpret_cast<const __m128i *>(from + 2 * k)))
                                     : _mm256_loadu_ps(reinterpret_cast<const float *>(from) + k);
                }
                transpose(x);
                for (int i = 0; i < 8; ++i) {
                    _mm256_store_ps(to + (k + i) * kPanel + half, x[i]);
                }
            }
        }
        for (; k < n; ++k) {
            for (int r = 0; r < kPanel; ++r) {
                const float value = is_half ? _cvtsh_ss(reinterpret_cast<const uint16_t *>(data[r])[k])
                                            : reinterpret_cast<const float *>(data[r])[k];
                to[k * kPanel + r] = r < n_rows ? value : 0.0f;
            }
        }
    }

    PLR_AVX2 static inline void transpose(__m256 (&x)[8]) {
        __m256 y[8];
        for (int i = 0; i < 8; i += 2) {
            y[i]     = _mm256_unpacklo_ps(x[i], x[i + 1]);
            y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
        }
        for (int i = 0; i < 8; i += 4) {
            x[i]     = _mm256_shuffle_ps(y[i], y[i + 2], 0x44);
            x[i + 1] = _mm256_shuffle_ps(y[i], y[i + 2], 0xee);
            x[i + 2] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0x44);
            x[i + 3] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0xee);
        }
        for (int i = 0; i < 4; ++i) {
            y[i]     = _mm256_permute2f128_ps(x[i], x[i + 4], 0x20);
            y[i + 4] = _mm256_permute2f128_ps(x[i], x[i + 4], 0x31);
        }
        std::copy_n(y, 8, x);
    }

    // Adds *n* values of a panel to the sums of some columns; the first ones begin them.
    static void tile(ggml_tensor * node, const float * panel, int row, int n_rows, int column,
                     int n_columns, int first, int n) {
        const ggml_tensor & from   = *node->src[1];
        const size_t        stride = node->nb[1] / sizeof(float);
        float * out = static_cast<float *>(node->data) + column * stride + row;
        const float * columns[kColumns];
        for (int c = 0; c < kColumns; ++c) {
            const int at = column + std::min(c, n_columns - 1);  // a rest repeats its last one
            columns[c]   = reinterpret_cast<const float *>(static_cast<const char *>(from.data) +
                                                         at * from.nb[1]) + first;
        }
        if (n_rows == kPanel && n_columns == kColumns) {
            add(out, stride, panel, columns, n, first == 0);
            return;
        }
        alignas(32) Tile sums;
        for (int c = 0; first != 0 && c < n_columns; ++c) {
            std::copy_n(out + c * stride, n_rows, sums[c]);
        }
        add(sums[0], kPanel, panel, columns, n, first == 0);
        for (int c = 0; c < n_columns; ++c) {
            std::copy_n(sums[c], n_rows, out + c * stride);
        }
    }

    PLR_AVX2 PLR_CALLED static void add(float * out, size_t stride, const float * panel,
                                        const float * const (&columns)[kColumns], int n,
                                        bool begins) {
        __m256 sums[kColumns][2];
#pragma GCC unroll 6
        for (int c = 0; c < kColumns; ++c) {
            sums[c][0] = begins ? _mm256_setzero_ps() : _mm256_loadu_ps(out + c * stride);
            sums[c][1] = begins ? _mm256_setzero_ps() : _mm256_loadu_ps(out + c * stride + 8);
        }
        const float *c0 = columns[0], *c1 = columns[1], *c2 = columns[2], *c3 = columns[3],
                    *c4 = columns[4], *c5 = columns[5];
        for (int k = 0; k < n; ++k, panel += kPanel) {
            const __m256  low = _mm256_load_ps(panel), high = _mm256_load_ps(panel + 8);
            const float * at[kColumns] = {c0 + k, c1 + k, c2 + k, c3 + k, c4 + k, c5 + k};
#pragma GCC unroll 6
            for (int c = 0; c < kColumns; ++c) {
                const __m256 value = _mm256_broadcast_ss(at[c]);
                sums[c][0]         = _mm256_fmadd_ps(value, low, sums[c][0]);
                sums[c][1]         = _mm256_fmadd_ps(value, high, sums[c][1]);
            }
        }
#pragma GCC unroll 6
        for (int c = 0; c < kColumns; ++c) {
            _mm256_storeu_ps(out + c * stride, sums[c][0]);
            _mm256_storeu_ps(out + c * stride + 8, sums[c][1]);
        }
    }
};
