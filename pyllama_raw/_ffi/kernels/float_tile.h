// Products of tiles of floats by AVX2: sixteen rows, which are a panel, with six columns.
//
// A tile adds its products in their order, so a column does not depend on others.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ggml.h"
#include "simd.h"

namespace float_tile {

constexpr int kPanel = 16, kColumns = 6;  // the sums of a tile fill 12 registers

PLR_AVX2 inline void transpose(__m256 (&x)[8]) {
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

PLR_AVX2 inline __m256 at(const float * from) { return _mm256_loadu_ps(from); }
PLR_AVX2 inline __m256 at(const uint16_t * from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
}

PLR_AVX2 inline float one(float value) { return value; }
PLR_AVX2 inline float one(uint16_t half) { return _cvtsh_ss(half); }

// *n* values of sixteen rows of floats or halves, value by value.
template <class Value>
PLR_AVX2 PLR_CALLED inline void pack(float * to, const Value * const (&rows)[kPanel], int n) {
    int k = 0;
    for (; k + 8 <= n; k += 8) {
        for (int half = 0; half < kPanel; half += 8) {
            __m256 x[8];
            for (int r = 0; r < 8; ++r) {
                x[r] = at(rows[half + r] + k);
            }
            transpose(x);
            for (int i = 0; i < 8; ++i) {
                _mm256_store_ps(to + (k + i) * kPanel + half, x[i]);
            }
        }
    }
    for (; k < n; ++k) {
        for (int r = 0; r < kPanel; ++r) {
            to[k * kPanel + r] = one(rows[r][k]);
        }
    }
}

// Adds *n* values of a panel to the sums of six columns, which stand *stride* floats apart; the
// first ones begin the sums.
PLR_AVX2 PLR_CALLED inline void add(float * out, size_t stride, const float * panel,
                                    const float * const (&columns)[kColumns], int n, bool begins) {
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

// Those that do not exist repeat the last one.
template <class Value>
inline void rows_of(const Value * (&rows)[kPanel], const char * from, size_t stride, int n_rows) {
    for (int r = 0; r < kPanel; ++r) {
        rows[r] = reinterpret_cast<const Value *>(from + std::min(r, n_rows - 1) * stride);
    }
}

// For FloatProduct, which reads columns where they are.
struct Tile {
    static constexpr ggml_type kType         = GGML_TYPE_F32;
    static constexpr bool      kPacksColumns = false;
    static constexpr int       kDepth = 192;  // values of a row at a time: a panel is 12 KiB
    static constexpr int       kOnce  = 1;    // a row has a multiple of these

    using Column = float[kDepth];
    struct Panel {
        alignas(64) float values[kDepth * kPanel];
    };

    static void pack(Panel & to, const char * from, size_t stride, int n_rows, int n) {
        const float * rows[kPanel];
        rows_of(rows, from, stride, n_rows);
        float_tile::pack(to.values, rows, n);
    }

    static void add(float * out, size_t stride, const Panel & panel,
                    const Column * const (&columns)[kColumns], int n, bool begins) {
        const float * at[kColumns];
        for (int c = 0; c < kColumns; ++c) {
            at[c] = *columns[c];
        }
        float_tile::add(out, stride, panel.values, at, n, begins);
    }
};

}  // namespace float_tile
