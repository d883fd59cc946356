// Attention of rows to tiles by AVX-512, with a running softmax: keys and values are used as
// they are read, for up to four heads at once.
//
// (Milakov, Gimelshein: Online normalizer calculation for softmax, 2018)
#pragma once

#include <cmath>

#include "attention_rows.h"
#include "simd.h"

namespace attention::avx512 {

constexpr int kVector = 16;  // floats

PLR_AVX512 inline __m512 floats(const char * halves) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(halves)));
}

PLR_KERNEL inline int visible(int32_t * to, const uint16_t * mask, int n_cells) {
    const __m256i hidden = _mm256_set1_epi16(int16_t(0xfc00));  // -infinity
    __m512i       cells  = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    int           n      = 0;
    for (int cell = 0; cell < n_cells; cell += kCells) {
        const __m256i   values = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(mask + cell));
        const __mmask16 seen   = _mm256_cmpneq_epi16_mask(values, hidden);
        if (seen != 0) {
            _mm512_storeu_si512(to + n, _mm512_maskz_compress_epi32(seen, cells));
            n += __builtin_popcount(seen);
        }
        cells = _mm512_add_epi32(cells, _mm512_set1_epi32(kCells));
    }
    if (n > 0) {
        _mm512_storeu_si512(to + n, _mm512_set1_epi32(to[n - 1]));
    }
    return n;
}

// e to the power of x <= 0, within 2e-7 of it.
PLR_AVX512 inline __m512 exponential(__m512 x) {
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512       r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r              = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p       = _mm512_set1_ps(1.0f / 720);
    for (const float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
    }
    return _mm512_scalef_ps(p, n);
}

PLR_KERNEL inline void begin(Rows & rows, int row, const float * q, float scale, int n_key) {
    for (int d = 0; d < n_key; d += kVector) {
        _mm512_store_ps(rows.q[row] + d,
                        _mm512_mul_ps(_mm512_loadu_ps(q + d), _mm512_set1_ps(scale)));
    }
    for (int d = 0; d < kMaxHead; d += kVector) {
        _mm512_store_ps(rows.out[row] + d, _mm512_setzero_ps());
    }
    _mm512_store_ps(rows.sum[row], _mm512_setzero_ps());
    rows.max[row] = -INFINITY;
}

// What the cells of a tile weigh for a row, and by what earlier cells count less from now on.
struct Weights {
    __m512 cells, earlier;
};

PLR_AVX512 inline Weights weigh(Rows & rows, int row, __m512 score, const Tile & tile) {
    const __mmask16 used = __mmask16(tile.used);
    score = _mm512_add_ps(score, floats(reinterpret_cast<const char *>(tile.mask)));
    const float best = _mm512_mask_reduce_max_ps(used, score);
    Weights     weights{_mm512_setzero_ps(), _mm512_set1_ps(1.0f)};
    if (best > rows.max[row]) {  // the first time everything is zero
        weights.earlier =
            exponential(_mm512_set1_ps(std::fmax(rows.max[row] - best, -100.0f)));
        rows.max[row] = best;
    }
    weights.cells = _mm512_maskz_mov_ps(
        used, exponential(_mm512_sub_ps(score, _mm512_set1_ps(rows.max[row]))));
    _mm512_store_ps(rows.sum[row], _mm512_fmadd_ps(_mm512_load_ps(rows.sum[row]),
                                                   weights.earlier, weights.cells));
    return weights;
}

PLR_KERNEL inline void finish(const Rows & rows, int row, float * out, int n_value) {
    const float  sum   = _mm512_reduce_add_ps(_mm512_load_ps(rows.sum[row]));
    const __m512 share = _mm512_set1_ps(sum > 0 ? 1 / sum : 0.0f);  // a row may see nothing
    for (int d = 0; d < n_value; d += kVector) {
        _mm512_storeu_ps(out + d, _mm512_mul_ps(_mm512_load_ps(rows.out[row] + d), share));
    }
}

// Of each four lanes of *cells* the sums, of the four cells in turn.
PLR_AVX512 inline __m512 sums_of_fours(const __m512 (&cells)[4]) {
    const __m512  low    = _mm512_add_ps(_mm512_unpacklo_ps(cells[0], cells[1]),
                                         _mm512_unpackhi_ps(cells[0], cells[1]));
    const __m512  high   = _mm512_add_ps(_mm512_unpacklo_ps(cells[2], cells[3]),
                                         _mm512_unpackhi_ps(cells[2], cells[3]));
    const __m512d low_d  = _mm512_castps_pd(low);
    const __m512d high_d = _mm512_castps_pd(high);
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low_d, high_d)),
                         _mm512_castpd_ps(_mm512_unpackhi_pd(low_d, high_d)));
}

// What sums_of_fours() gave of 16 cells, summed: a cell a lane.
PLR_AVX512 inline __m512 sums_of_sums(const __m512 (&fours)[4]) {
    const __m512 low  = _mm512_add_ps(_mm512_shuffle_f32x4(fours[0], fours[1], 0x44),
                                      _mm512_shuffle_f32x4(fours[0], fours[1], 0xee));
    const __m512 high = _mm512_add_ps(_mm512_shuffle_f32x4(fours[2], fours[3], 0x44),
                                      _mm512_shuffle_f32x4(fours[2], fours[3], 0xee));
    return _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88),
                         _mm512_shuffle_f32x4(low, high, 0xdd));
}

template <int H>
PLR_AVX512 inline void scores(__m512 (&to)[H], const Rows & rows, int first, const Tile & tile,
                              int n_key) {
    __m512 fours[H][4];
#pragma GCC unroll 4
    for (int group = 0; group < 4; ++group) {
        __m512       sums[H][4];
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h) {
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                sums[h][i] = _mm512_setzero_ps();
            }
        }
        for (int d = 0; d < n_key; d += kVector) {
            __m512 key[4];
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                key[i] = floats(tile.k[4 * group + i] + d * sizeof(uint16_t));
            }
#pragma GCC unroll 4
            for (int h = 0; h < H; ++h) {
                const __m512 q = _mm512_load_ps(rows.q[first + h] + d);
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i) {
                    sums[h][i] = _mm512_fmadd_ps(q, key[i], sums[h][i]);
                }
            }
        }
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h) {
            fours[h][group] = sums_of_fours(sums[h]);
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
        to[h] = sums_of_sums(fours[h]);
    }
}

// V vectors of the values, from dimension d.
template <int H, int V>
PLR_AVX512 inline void add_values(Rows & rows, int first, const Tile & tile, int d,
                                  const float (&weight)[H][kCells],
                                  const __m512 (&earlier)[H]) {
    __m512 out[H][V];
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
#pragma GCC unroll 4
        for (int i = 0; i < V; ++i) {
            const float * from = rows.out[first + h] + d + i * kVector;
            out[h][i]          = _mm512_mul_ps(_mm512_load_ps(from), earlier[h]);
        }
    }
    for (int cell = 0; cell < kCells; ++cell) {
        const char * values = tile.v[cell] + d * sizeof(uint16_t);
#pragma GCC unroll 4
        for (int i = 0; i < V; ++i) {
            const __m512 value = floats(values + i * kVector * sizeof(uint16_t));
#pragma GCC unroll 4
            for (int h = 0; h < H; ++h) {
                out[h][i] = _mm512_fmadd_ps(_mm512_set1_ps(weight[h][cell]), value, out[h][i]);
            }
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
#pragma GCC unroll 4
        for (int i = 0; i < V; ++i) {
            _mm512_store_ps(rows.out[first + h] + d + i * kVector, out[h][i]);
        }
    }
}

// Rows first to first + H.
template <int H>
PLR_KERNEL inline void attend_heads(Rows & rows, int first, const Tile & tile, int n_key,
                                    int n_value) {
    __m512 score[H], earlier[H];
    scores<H>(score, rows, first, tile, n_key);
    alignas(64) float weight[H][kCells];
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
        const Weights weights = weigh(rows, first + h, score[h], tile);
        _mm512_store_ps(weight[h], weights.cells);
        earlier[h] = weights.earlier;
    }
    int d = 0;
    for (; d + 4 * kVector <= n_value; d += 4 * kVector) {
        add_values<H, 4>(rows, first, tile, d, weight, earlier);
    }
    for (; d < n_value; d += kVector) {
        add_values<H, 1>(rows, first, tile, d, weight, earlier);
    }
}

inline void attend(Rows & rows, int first, int n_heads, const Tile & tile, int n_key,
                   int n_value) {
    using Heads = void (*)(Rows &, int, const Tile &, int, int);
    constexpr Heads kHeads[kHeadsOnce] = {attend_heads<1>, attend_heads<2>, attend_heads<3>,
                                          attend_heads<4>};
    for (int h = 0; h < n_heads; h += kHeadsOnce) {
        const int n = n_heads - h < kHeadsOnce ? n_heads - h : kHeadsOnce;
        kHeads[n - 1](rows, first + h, tile, n_key, n_value);
    }
}

inline const Unit kUnit = {kVector, visible, begin, attend, finish};

}  // namespace attention::avx512
