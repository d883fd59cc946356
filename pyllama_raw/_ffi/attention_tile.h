// Attention of one token to one tile: keys and values are used as they are read, for up to four
// heads at once.
#pragma once

#include "attention_rows.h"

namespace attention {

constexpr int kHeadsOnce = 4;

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

// Let *n_heads* rows from *first*, those of a token, look at the cells of *tile*.
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

}  // namespace attention
