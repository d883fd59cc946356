// Dot products of Q4_1 weights with Q8_1 columns, four rows by up to six columns at once.
//
// libllama takes one row and one column at a time and unpacks the row again for each. Here
// a row is unpacked once for many columns and sums stay in registers, but every sum adds
// the same numbers in the same order as ggml_vec_dot_q4_1_q8_1 with AVX2: the same bits.
#pragma once

#include <cstdint>
#include <cstring>

#include "avx512.h"

namespace q4_1 {

constexpr int kBlock = 32, kRows = 4, kMaxColumns = 6, kMaxBlocks = 256;

// ggml-common.h: block_q4_1 and block_q8_1; d, m and s are half floats.
struct WeightBlock {
    uint16_t d, m;
    uint8_t  q[kBlock / 2];
};
struct ColumnBlock {
    uint16_t d, s;
    int8_t   q[kBlock];
};

// Four rows, a byte a weight: weight = d * q + m.
struct Rows {
    alignas(64) uint8_t q[kMaxBlocks][kRows][kBlock];
    struct Scales {
        alignas(32) float d[kRows];
        float m[kRows];
    } scales[kMaxBlocks];
};

// One column after another in memory: n_blocks of d, as many of s = d * sum(q), then q.
struct Columns {
    char * data;
    int    n_blocks;

    static size_t bytes(int n_blocks) { return q_offset(n_blocks) + size_t(n_blocks) * kBlock; }
    static size_t q_offset(int n_blocks) { return (size_t(n_blocks) * 8 + 31) / 32 * 32; }

    char *   at(int column) const { return data + column * bytes(n_blocks); }
    float *  d(int column) const { return reinterpret_cast<float *>(at(column)); }
    float *  s(int column) const { return d(column) + n_blocks; }
    int8_t * q(int column) const {
        return reinterpret_cast<int8_t *>(at(column) + q_offset(n_blocks));
    }
};

// Spread blocks first to first + n of a quantised column.
PLR_KERNEL inline void pack(const Columns & to, int column, int first, int n,
                            const ColumnBlock * from) {
    float *  d = to.d(column);
    float *  s = to.s(column);
    int8_t * q = to.q(column);
    for (int i = first; i < first + n; ++i, ++from) {
        d[i] = _cvtsh_ss(from->d);
        s[i] = _cvtsh_ss(from->s);
        const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from->q));
        _mm256_store_si256(reinterpret_cast<__m256i *>(q + kBlock * i), bytes);
    }
}

PLR_AVX512 inline __m256i low_and_high_halves(const uint8_t * q) {
    const __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i *>(q));
    const __m256i both  = _mm256_inserti128_si256(_mm256_castsi128_si256(pairs),
                                                  _mm_srli_epi16(pairs, 4), 1);
    return _mm256_and_si256(both, _mm256_set1_epi8(15));
}

// Rows that are not there repeat the first.
PLR_KERNEL inline void unpack(Rows & to, const char * from, size_t stride, int n_rows,
                              int n_blocks) {
    const __m256i d_then_m = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
    const WeightBlock * rows[kRows];
    for (int r = 0; r < kRows; ++r) {
        rows[r] = reinterpret_cast<const WeightBlock *>(from + stride * (r < n_rows ? r : 0));
    }
    for (int i = 0; i < n_blocks; ++i) {
        // What the next call will read, if rows follow each other.
        _mm_prefetch(from + kRows * (stride + i * sizeof(WeightBlock)), _MM_HINT_T0);
        int32_t halves[kRows];  // d and m of each row
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            std::memcpy(&halves[r], &rows[r][i].d, sizeof(halves[r]));
            _mm256_store_si256(reinterpret_cast<__m256i *>(to.q[i][r]),
                               low_and_high_halves(rows[r][i].q));
        }
        const __m256 scales =
            _mm256_cvtph_ps(_mm_setr_epi32(halves[0], halves[1], halves[2], halves[3]));
        _mm256_store_ps(to.scales[i].d, _mm256_permutexvar_ps(d_then_m, scales));
    }
}

PLR_AVX512 inline float sum_of_lanes(__m256 x) {
    __m128 sum = _mm_add_ps(_mm256_extractf128_ps(x, 1), _mm256_castps256_ps128(x));
    sum        = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    sum        = _mm_add_ss(sum, _mm_movehdup_ps(sum));
    return _mm_cvtss_f32(sum);
}

// out[c * stride + r] of the first n_rows rows and C columns from *first*. Loops over
// constants are unrolled, so that arrays of vectors are registers.
template <int C>
PLR_KERNEL inline void tile(const Rows & rows, const Columns & columns, int first,
                            float * out, size_t stride, int n_rows) {
    __m256 acc[C][kRows];
    __m128 sums[C];  // of m * s, a row a lane
    const float *  d[C];
    const float *  s[C];
    const int8_t * q[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
        d[c]    = columns.d(first + c);
        s[c]    = columns.s(first + c);
        q[c]    = columns.q(first + c);
        sums[c] = _mm_setzero_ps();
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            acc[c][r] = _mm256_setzero_ps();
        }
    }
    for (int i = 0; i < columns.n_blocks; ++i) {
        __m256i      weights[kRows];
        const __m128 row_d = _mm_load_ps(rows.scales[i].d);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            weights[r] = _mm256_load_si256(reinterpret_cast<const __m256i *>(rows.q[i][r]));
        }
        // By way of memory: broadcasting loads cost nothing, shuffles would.
        alignas(16) float scale[C][kRows];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            _mm_store_ps(scale[c], _mm_mul_ps(row_d, _mm_set1_ps(d[c][i])));
        }
        asm volatile("" ::: "memory");
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            const __m256i values =
                _mm256_load_si256(reinterpret_cast<const __m256i *>(q[c] + kBlock * i));
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) {
                const __m256 products = _mm256_cvtepi32_ps(
                    _mm256_dpbusd_epi32(_mm256_setzero_si256(), weights[r], values));
                acc[c][r] = _mm256_fmadd_ps(_mm256_set1_ps(scale[c][r]), products, acc[c][r]);
            }
        }
    }
    for (int i = 0; i < columns.n_blocks; ++i) {
        const __m128 row_m = _mm_load_ps(rows.scales[i].m);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            sums[c] = _mm_fmadd_ps(row_m, _mm_set1_ps(s[c][i]), sums[c]);
        }
    }
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
        alignas(16) float sum[kRows];
        _mm_store_ps(sum, sums[c]);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            if (r < n_rows) {
                out[c * stride + r] = sum_of_lanes(acc[c][r]) + sum[r];
            }
        }
    }
}

using Tile = void (*)(const Rows &, const Columns &, int, float *, size_t, int);

constexpr Tile kTiles[kMaxColumns] = {tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>};

// Columns first to last of *n_rows* rows, in tiles of nearly equal width.
inline void tiles(const Rows & rows, const Columns & columns, int first, int last, float * out,
                  size_t stride, int n_rows) {
    for (int n_tiles = (last - first + kMaxColumns - 1) / kMaxColumns; n_tiles > 0; --n_tiles) {
        const int width = (last - first + n_tiles - 1) / n_tiles;
        kTiles[width - 1](rows, columns, first, out + first * stride, stride, n_rows);
        first += width;
    }
}

}  // namespace q4_1
