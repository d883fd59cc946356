// Dot products of Q4_1 weights with Q8_1 columns, eight rows by up to four columns at once.
//
// libllama takes one row and one column at a time and unpacks the row again for each. Here
// a row is unpacked once for many columns, sums stay in registers, and two rows share a
// vector, but every sum adds the same numbers in the same order as ggml_vec_dot_q4_1_q8_1
// with AVX2: the same bits.
#pragma once

#include <cstdint>
#include <cstring>

#include "avx512.h"

namespace q4_1 {

constexpr int kBlock = 32, kRows = 8, kMaxColumns = 4, kMaxBlocks = 256;
constexpr int kPairs = kRows / 2, kLine = 64;

// ggml-common.h: block_q4_1 and block_q8_1; d, m and s are half floats.
struct WeightBlock {
    uint16_t d, m;
    uint8_t  q[kBlock / 2];
};
struct ColumnBlock {
    uint16_t d, s;
    int8_t   q[kBlock];
};

// Eight rows, a byte a weight: weight = d * q + m. Of two rows that follow each other, four
// bytes of one and four of the other take turns, so that both fit into one vector.
struct Rows {
    alignas(64) uint8_t q[kMaxBlocks][kPairs][2 * kBlock];
    struct Scales {
        alignas(64) float d[kRows];
        float m[kRows];
    } scales[kMaxBlocks];
};

// One column after another in memory: n_blocks of d, as many of s = d * sum(q), then q, of
// which every four bytes are there twice: once for each row of a pair.
struct Columns {
    char * data;
    int    n_blocks;

    static constexpr size_t bytes(int n_blocks) {
        return q_offset(n_blocks) + size_t(n_blocks) * 2 * kBlock;
    }
    static constexpr size_t q_offset(int n_blocks) { return (size_t(n_blocks) * 8 + 63) / 64 * 64; }

    char *   at(int column) const { return data + column * bytes(n_blocks); }
    float *  d(int column) const { return reinterpret_cast<float *>(at(column)); }
    float *  s(int column) const { return d(column) + n_blocks; }
    int8_t * q(int column) const {
        return reinterpret_cast<int8_t *>(at(column) + q_offset(n_blocks));
    }
};

// Four bytes of *a* and four of *b* in turn, in the order in which it takes two instructions.
PLR_AVX512 inline __m512i in_turn(__m256i a, __m256i b) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_unpacklo_epi32(a, b)),
                              _mm256_unpackhi_epi32(a, b), 1);
}

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
        _mm512_store_si512(q + 2 * kBlock * i, in_turn(bytes, bytes));
    }
}

PLR_AVX512 inline __m256i low_and_high_halves(const uint8_t * q) {
    const __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i *>(q));
    const __m256i both  = _mm256_inserti128_si256(_mm256_castsi128_si256(pairs),
                                                  _mm_srli_epi16(pairs, 4), 1);
    return _mm256_and_si256(both, _mm256_set1_epi8(15));
}

// Rows that are not there repeat the first. *ahead*: load into the cache what the next call
// will read, if rows follow each other.
PLR_KERNEL inline void unpack(Rows & to, const char * from, size_t stride, int n_rows,
                              int n_blocks, bool ahead) {
    const __m512i d_then_m =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    const WeightBlock * rows[kRows];
    for (int r = 0; r < kRows; ++r) {
        rows[r] = reinterpret_cast<const WeightBlock *>(from + stride * (r < n_rows ? r : 0));
    }
    for (int i = 0; i < n_blocks; ++i) {
        for (size_t at = 0; ahead && at < kRows * sizeof(WeightBlock); at += kLine) {
            _mm_prefetch(from + kRows * (stride + i * sizeof(WeightBlock)) + at, _MM_HINT_T0);
        }
        alignas(32) int32_t halves[kRows];  // d and m of each row
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            std::memcpy(&halves[r], &rows[r][i].d, sizeof(halves[r]));
        }
#pragma GCC unroll 8
        for (int p = 0; p < kPairs; ++p) {
            _mm512_store_si512(to.q[i][p], in_turn(low_and_high_halves(rows[2 * p][i].q),
                                                   low_and_high_halves(rows[2 * p + 1][i].q)));
        }
        const __m512 scales =
            _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i *>(halves)));
        _mm512_store_ps(&to.scales[i], _mm512_permutexvar_ps(d_then_m, scales));
    }
}

PLR_AVX512 inline float sum_of_lanes(__m256 x) {
    __m128 sum = _mm_add_ps(_mm256_extractf128_ps(x, 1), _mm256_castps256_ps128(x));
    sum        = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    sum        = _mm_add_ss(sum, _mm_movehdup_ps(sum));
    return _mm_cvtss_f32(sum);
}

// The first row's lanes in the low half, the second's in the high one, each in order.
PLR_AVX512 inline __m512 one_by_one(__m512 pair) {
    return _mm512_permutexvar_ps(
        _mm512_setr_epi32(0, 2, 8, 10, 4, 6, 12, 14, 1, 3, 9, 11, 5, 7, 13, 15), pair);
}

// out[c * stride + r] of the first n_rows rows and C columns from *first*. Loops over
// constants are unrolled, so that arrays of vectors are registers.
template <int C>
PLR_KERNEL inline void tile(const Rows & rows, const Columns & columns, int first,
                            float * out, size_t stride, int n_rows) {
    __m512 acc[C][kPairs];
    __m256 sums[C];  // of m * s, a row a lane
    const float *  d[C];
    const float *  s[C];
    const int8_t * q[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
        d[c]    = columns.d(first + c);
        s[c]    = columns.s(first + c);
        q[c]    = columns.q(first + c);
        sums[c] = _mm256_setzero_ps();
#pragma GCC unroll 8
        for (int p = 0; p < kPairs; ++p) {
            acc[c][p] = _mm512_setzero_ps();
        }
    }
    for (int i = 0; i < columns.n_blocks; ++i) {
        __m512i      weights[kPairs];
        const __m256 row_d = _mm256_load_ps(rows.scales[i].d);
#pragma GCC unroll 8
        for (int p = 0; p < kPairs; ++p) {
            weights[p] = _mm512_load_si512(rows.q[i][p]);
        }
        // By way of memory: broadcasting loads cost nothing, shuffles would.
        alignas(32) float scale[C][kRows];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            _mm256_store_ps(scale[c], _mm256_mul_ps(row_d, _mm256_set1_ps(d[c][i])));
        }
        asm volatile("" ::: "memory");
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            __m512i values = _mm512_load_si512(q[c] + 2 * kBlock * i);
            asm("" : "+v"(values));  // loaded once, not by each product
#pragma GCC unroll 8
            for (int p = 0; p < kPairs; ++p) {
                const __m512 products = _mm512_cvtepi32_ps(
                    _mm512_dpbusd_epi32(_mm512_setzero_si512(), weights[p], values));
                double both;  // scales of the pair
                std::memcpy(&both, &scale[c][2 * p], sizeof(both));
                acc[c][p] = _mm512_fmadd_ps(_mm512_castpd_ps(_mm512_set1_pd(both)), products,
                                            acc[c][p]);
            }
        }
    }
    for (int i = 0; i < columns.n_blocks; ++i) {
        const __m256 row_m = _mm256_load_ps(rows.scales[i].m);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            sums[c] = _mm256_fmadd_ps(row_m, _mm256_set1_ps(s[c][i]), sums[c]);
        }
    }
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
        alignas(32) float sum[kRows];
        _mm256_store_ps(sum, sums[c]);
#pragma GCC unroll 8
        for (int p = 0; p < kPairs; ++p) {
            const __m512 lanes = one_by_one(acc[c][p]);
            sum[2 * p] = sum_of_lanes(_mm512_castps512_ps256(lanes)) + sum[2 * p];
            sum[2 * p + 1] = sum_of_lanes(_mm512_extractf32x8_ps(lanes, 1)) + sum[2 * p + 1];
        }
        std::memcpy(out + c * stride, sum, n_rows * sizeof(float));
    }
}

using Tile = void (*)(const Rows &, const Columns &, int, float *, size_t, int);

constexpr Tile kTiles[kMaxColumns] = {tile<1>, tile<2>, tile<3>, tile<4>};

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
