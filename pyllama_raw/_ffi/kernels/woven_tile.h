// Products of woven weights (woven_types.h) with quantised columns: 16 rows by up to four columns
// at once.
//
// Integers are exact. Floats are added once a block, in the order of the blocks, by each row for
// itself. So a result depends neither on the columns that are computed beside it, nor on threads.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "simd.h"
#include "woven_types.h"

namespace woven {

// Columns, quantised to 8 bits by blocks: value = d * q.
struct Columns {
    char *          data;
    int             n_blocks;
    const int32_t * order = nullptr;  // where each is; else they stand as they are counted

    // Of a column: d and the sum of values of each block, integer sums of its halves, q, and q in
    // two parts, because types differ in what they multiply.
    static size_t bytes(int n_blocks) {
        return (size_t(n_blocks) * (2 * sizeof(float) + 2 * sizeof(int16_t) + 3 * kBlock) + 63) /
               64 * 64;
    }

    char * at(int column) const {
        return data + (order == nullptr ? column : order[column]) * bytes(n_blocks);
    }
    float *   d(int column) const { return reinterpret_cast<float *>(at(column)); }
    float *   sums(int column) const { return d(column) + n_blocks; }
    int16_t * half_sums(int column) const {
        return reinterpret_cast<int16_t *>(sums(column) + n_blocks);
    }
    int8_t * q(int column) const {
        return reinterpret_cast<int8_t *>(half_sums(column) + 2 * n_blocks);
    }
    int8_t * parts(int column) const { return q(column) + size_t(n_blocks) * kBlock; }
};

PLR_AVX2 inline __m256i coarse_part(__m128i q) {  // as 16 bits, because bytes hold no 127 + 8
    return _mm256_srai_epi16(_mm256_add_epi16(_mm256_cvtepi8_epi16(q), _mm256_set1_epi16(8)), 4);
}

// Quantise blocks first to last of *from*.
PLR_AVX2 PLR_CALLED inline void pack(const Columns & to, int column, int first, int last,
                                     const float * from) {
    const __m256 no_sign = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (int i = first; i < last; ++i) {
        __m256 x[4], most = _mm256_setzero_ps();
        for (int k = 0; k < 4; ++k) {
            x[k] = _mm256_loadu_ps(from + i * kBlock + 8 * k);
            most = _mm256_max_ps(most, _mm256_and_ps(x[k], no_sign));
        }
        __m128 top = _mm_max_ps(_mm256_castps256_ps128(most), _mm256_extractf128_ps(most, 1));
        top        = _mm_max_ps(top, _mm_movehl_ps(top, top));
        top        = _mm_max_ss(top, _mm_movehdup_ps(top));
        const float  largest = _mm_cvtss_f32(top);
        const __m256 inverse = _mm256_set1_ps(largest > 0 ? 127.0f / largest : 0.0f);
        __m256i      q[4];
        for (int k = 0; k < 4; ++k) {
            q[k] = _mm256_cvtps_epi32(_mm256_mul_ps(x[k], inverse));
        }
        const __m256i packed = _mm256_permutevar8x32_epi32(
            _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3])),
            in_order);
        auto * bytes = to.q(column) + i * kBlock;
        auto * parts = reinterpret_cast<__m256i *>(to.parts(column) + 2 * i * kBlock);
        // q = 16 * coarse + fine, both from -8 to 8.
        const __m256i eight  = _mm256_set1_epi8(8);
        const __m256i fine   = _mm256_sub_epi8(
            _mm256_and_si256(_mm256_add_epi8(packed, eight), _mm256_set1_epi8(15)), eight);
        const __m256i coarse = _mm256_permute4x64_epi64(
            _mm256_packs_epi16(coarse_part(_mm256_castsi256_si128(packed)),
                               coarse_part(_mm256_extracti128_si256(packed, 1))), 0xd8);
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(bytes), packed);
        _mm256_storeu_si256(parts, coarse);
        _mm256_storeu_si256(parts + 1, fine);
        int sum[2] = {};
        for (int k = 0; k < kBlock; ++k) {
            sum[k / 16] += bytes[k];
        }
        const float d             = largest / 127.0f;
        to.d(column)[i]           = d;
        to.sums(column)[i]        = d * float(sum[0] + sum[1]);
        to.half_sums(column)[2 * i]     = int16_t(sum[0]);
        to.half_sums(column)[2 * i + 1] = int16_t(sum[1]);
    }
}

// out[c * stride + r] of the first n_rows of 16 woven rows and C columns from *first*. Sums of
// floats are in memory, because registers do not hold them beside those of integers, and the
// compiler would spill the latter, which are used eight times as often.
template <class W, int C>
PLR_AVX2 PLR_CALLED void tile(const uint8_t * rows, const Columns & columns, int first, float * out,
                              size_t stride, int n_rows) {
    alignas(32) float acc[C][kRows] = {};
    const float *     d[C];
    const float *     s[C];
    Column            column[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
        d[c] = columns.d(first + c), s[c] = columns.sums(first + c);
        column[c] = {columns.q(first + c), columns.parts(first + c), columns.half_sums(first + c)};
    }
    for (int i = 0; i < columns.n_blocks; ++i) {
        const uint8_t * from = rows + size_t(i / W::kBlocks) * W::kBytes;
        if (C == 1) {  // reads each weight once, so memory is the limit
            for (int at = 0; at < W::kBytes / W::kBlocks; at += 64) {
                _mm_prefetch(reinterpret_cast<const char *>(from) + 2048 + at, _MM_HINT_T0);
            }
        }
        __m256i sums[C][2];
        W::template dot<C>(from, i % W::kBlocks, column, sums);
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const Scales scales = W::scales(from, i % W::kBlocks, half);
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) {
                float *      sum = &acc[c][kHalf * half];
                const __m256 by  = _mm256_mul_ps(scales.d, _mm256_set1_ps(d[c][i]));
                __m256 value = _mm256_fmadd_ps(by, _mm256_cvtepi32_ps(sums[c][half]), _mm256_load_ps(sum));
                if constexpr (W::kMinimum == Minimum::OF_BLOCK) {
                    value = _mm256_fmadd_ps(scales.m, _mm256_set1_ps(s[c][i]), value);
                } else if constexpr (W::kMinimum == Minimum::OF_HALVES) {
                    const __m256i minima = _mm256_madd_epi16(scales.minima, four_bytes(column[c].half_sums));
                    value = _mm256_fmadd_ps(_mm256_mul_ps(scales.m, _mm256_set1_ps(d[c][i])),
                                            _mm256_cvtepi32_ps(minima), value);
                }
                _mm256_store_ps(sum, value);
            }
        }
        asm volatile("" ::: "memory");
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
            column[c].q += kBlock, column[c].parts += 2 * kBlock, column[c].half_sums += 2;
        }
    }
    for (int c = 0; c < C; ++c) {
        std::memcpy(out + c * stride, acc[c], n_rows * sizeof(float));
    }
}

// Columns first to last, in tiles of nearly equal width.
template <class W>
inline void tiles(const uint8_t * rows, const Columns & columns, int first, int last, float * out,
                  size_t stride, int n_rows) {
    using Tile = void (*)(const uint8_t *, const Columns &, int, float *, size_t, int);
    constexpr Tile kTiles[kMaxColumns] = {tile<W, 1>, tile<W, 2>, tile<W, 3>, tile<W, 4>};
    for (int n_tiles = (last - first + kMaxColumns - 1) / kMaxColumns; n_tiles > 0; --n_tiles) {
        const int width = (last - first + n_tiles - 1) / n_tiles;
        kTiles[width - 1](rows, columns, first, out + first * stride, stride, n_rows);
        first += width;
    }
}

}  // namespace woven
