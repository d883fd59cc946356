// Dot products of rows of weights with quantised columns: eight rows by up to four columns at
// once.
//
// libllama takes one row and one column of Q4_1 at a time, and unpacks the row again for each
// column; of Q8_0 it takes four rows by four columns, in vectors of half the width. Here a row
// is unpacked once for many columns, sums stay in registers, and two rows share a vector. Every
// sum adds the same numbers in the same order as ggml_vec_dot_..._q8_... with AVX2, so the bits
// are the same.
#pragma once

#include <cstdint>
#include <cstring>

#include "weight_blocks.h"

namespace product {

constexpr int kRows = 8, kMaxColumns = 4, kMaxBlocks = 256;
constexpr int kPairs = kRows / 2, kLine = 64;

// Eight rows with a byte for each weight: weight = d * (q - kZero) + m. Two rows that follow
// each other stand in one vector: four bytes of the first, four of the second, and so on.
struct Rows {
    alignas(64) uint8_t q[kMaxBlocks][kPairs][2 * kBlock];
    struct Scales {
        alignas(64) float d[kRows];
        float m[kRows];
    } scales[kMaxBlocks];
};

// Columns, one after another in memory. A column has d of each block, then s of each block, then
// q of each block, in which every four bytes stand twice, once for each row of a pair. If kZero
// is not 0, what it takes from the product of each four bytes follows q, as 32-bit integers.
template <class W>
struct Columns {
    char * data;
    int    n_blocks;

    static constexpr int kLines = W::kZero == 0 ? 1 : 2;  // of each block

    static constexpr size_t bytes(int n_blocks) {
        return q_offset(n_blocks) + size_t(n_blocks) * kLines * kLine;
    }
    static constexpr size_t q_offset(int n_blocks) { return (size_t(n_blocks) * 8 + 63) / 64 * 64; }

    char *   at(int column) const { return data + column * bytes(n_blocks); }
    float *  d(int column) const { return reinterpret_cast<float *>(at(column)); }
    float *  s(int column) const { return d(column) + n_blocks; }
    int8_t * q(int column) const {
        return reinterpret_cast<int8_t *>(at(column) + q_offset(n_blocks));
    }
};

// Four bytes of *a* and four of *b* in turn. The order of these is the one that takes only two
// instructions.
PLR_AVX512 inline __m512i in_turn(__m256i a, __m256i b) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_unpacklo_epi32(a, b)),
                              _mm256_unpackhi_epi32(a, b), 1);
}

// Spread blocks first to first + n of a quantised column.
template <class W>
PLR_KERNEL inline void pack(const Columns<W> & to, int column, int first, int n,
                            const typename W::ColumnBlock * from) {
    float *  d = to.d(column);
    float *  s = to.s(column);
    int8_t * q = to.q(column) + first * to.kLines * kLine;
    for (int i = first; i < first + n; ++i, ++from, q += to.kLines * kLine) {
        d[i] = _cvtsh_ss(from->d);
        s[i] = W::sum(*from);
        const __m256i bytes  = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from->q));
        const __m512i values = in_turn(bytes, bytes);
        _mm512_store_si512(q, values);
        if constexpr (W::kZero != 0) {
            const __m512i zero = _mm512_setzero_si512();
            const __m512i sums =
                _mm512_dpbusd_epi32(zero, _mm512_set1_epi8(char(W::kZero)), values);
            _mm512_store_si512(q + kLine, _mm512_sub_epi32(zero, sums));
        }
    }
}

// Rows that do not exist repeat the first. With *ahead* the rows that the next call will read are
// loaded into the cache.
template <class W>
PLR_KERNEL inline void unpack(Rows & to, const char * from, size_t stride, int n_rows,
                              int n_blocks, bool ahead) {
    const __m512i d_then_m =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    using Block = typename W::Block;
    const Block * rows[kRows];
    for (int r = 0; r < kRows; ++r) {
        rows[r] = reinterpret_cast<const Block *>(from + stride * (r < n_rows ? r : 0));
    }
    for (int i = 0; i < n_blocks; ++i) {
        for (size_t at = 0; ahead && at < kRows * sizeof(Block); at += kLine) {
            _mm_prefetch(from + kRows * (stride + i * sizeof(Block)) + at, _MM_HINT_T0);
        }
        alignas(32) uint32_t halves[kRows];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            halves[r] = W::d_and_m(rows[r][i]);
        }
#pragma GCC unroll 8
        for (int p = 0; p < kPairs; ++p) {
            _mm512_store_si512(to.q[i][p], in_turn(W::bytes(rows[2 * p][i]),
                                                   W::bytes(rows[2 * p + 1][i])));
        }
        const __m512 scales =
            _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i *>(halves)));
        _mm512_store_ps(&to.scales[i], _mm512_permutexvar_ps(d_then_m, scales));
    }
}

PLR_AVX512 inline float sum_of_elements(__m256 x) {
    __m128 sum = _mm_add_ps(_mm256_extractf128_ps(x, 1), _mm256_castps256_ps128(x));
    sum        = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    sum        = _mm_add_ss(sum, _mm_movehdup_ps(sum));
    return _mm_cvtss_f32(sum);
}

// The elements of the first row in the low half and those of the second in the high half.
PLR_AVX512 inline __m512 one_by_one(__m512 pair) {
    return _mm512_permutexvar_ps(
        _mm512_setr_epi32(0, 2, 8, 10, 4, 6, 12, 14, 1, 3, 9, 11, 5, 7, 13, 15), pair);
}

// out[c * stride + r] of the first n_rows rows and C columns from *first*. Loops over
// constants are unrolled, so that arrays of vectors are registers.
template <class W, int C>
PLR_KERNEL inline void tile(const Rows & rows, const Columns<W> & columns, int first,
                            float * out, size_t stride, int n_rows) {
    __m512 acc[C][kPairs];
    __m256 sums[C];  // of m * s, by row
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
        // Through memory, because loads that broadcast cost nothing and shuffles do.
        alignas(32) float scale[C][kRows];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            _mm256_store_ps(scale[c], _mm256_mul_ps(row_d, _mm256_set1_ps(d[c][i])));
        }
        asm volatile("" ::: "memory");
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            const int8_t * at     = q[c] + columns.kLines * kLine * i;
            __m512i        values = _mm512_load_si512(at);
            __m512i        begin  = _mm512_setzero_si512();
            if constexpr (W::kZero != 0) {
                begin = _mm512_load_si512(at + kLine);
            }
            asm("" : "+v"(values), "+v"(begin));  // loaded once, not by each product
#pragma GCC unroll 8
            for (int p = 0; p < kPairs; ++p) {
                const __m512 products = _mm512_cvtepi32_ps(
                    _mm512_dpbusd_epi32(begin, weights[p], values));
                double both;  // scales of the pair
                std::memcpy(&both, &scale[c][2 * p], sizeof(both));
                acc[c][p] = _mm512_fmadd_ps(_mm512_castpd_ps(_mm512_set1_pd(both)), products,
                                            acc[c][p]);
            }
        }
    }
    for (int i = 0; W::kHasMinimum && i < columns.n_blocks; ++i) {
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
            const __m512 pair = one_by_one(acc[c][p]);
            const float  even  = sum_of_elements(_mm512_castps512_ps256(pair));
            const float  odd   = sum_of_elements(_mm512_extractf32x8_ps(pair, 1));
            sum[2 * p]     = W::kHasMinimum ? even + sum[2 * p] : even;
            sum[2 * p + 1] = W::kHasMinimum ? odd + sum[2 * p + 1] : odd;
        }
        std::memcpy(out + c * stride, sum, n_rows * sizeof(float));
    }
}

// Columns first to last of *n_rows* rows, in tiles of nearly equal width.
template <class W>
inline void tiles(const Rows & rows, const Columns<W> & columns, int first, int last,
                  float * out, size_t stride, int n_rows) {
    using Tile = void (*)(const Rows &, const Columns<W> &, int, float *, size_t, int);
    constexpr Tile kTiles[kMaxColumns] = {tile<W, 1>, tile<W, 2>, tile<W, 3>, tile<W, 4>};
    for (int n_tiles = (last - first + kMaxColumns - 1) / kMaxColumns; n_tiles > 0; --n_tiles) {
        const int width = (last - first + n_tiles - 1) / n_tiles;
        kTiles[width - 1](rows, columns, first, out + first * stride, stride, n_rows);
        first += width;
    }
}

}  // namespace product
