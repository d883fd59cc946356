// Attention of rows to tiles by AVX2, FMA and F16C: as attention_avx512.h, with two vectors
// where that has one.
#pragma once

#include <cmath>

#include "attention_rows.h"
#include "simd.h"

namespace attention::avx2 {

constexpr int kVector = 8;  // floats

PLR_AVX2 inline __m256 floats(const char * halves) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(halves)));
}

PLR_KERNEL_AVX2 inline int visible(int32_t * to, const uint16_t * mask, int n_cells) {
    const __m256i hidden = _mm256_set1_epi16(int16_t(0xfc00));  // -infinity
    const __m256i eight  = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    int           n      = 0;
    for (int cell = 0; cell < n_cells; cell += kCells) {
        const __m256i values = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(mask + cell));
        const __m256i hides  = _mm256_cmpeq_epi16(values, hidden);
        uint32_t      seen   = ~uint32_t(_mm256_movemask_epi8(hides));  // two bits a cell
        if (seen == ~0u) {
            auto * const first = reinterpret_cast<__m256i *>(to + n);
            _mm256_storeu_si256(first, _mm256_add_epi32(eight, _mm256_set1_epi32(cell)));
            _mm256_storeu_si256(first + 1, _mm256_add_epi32(eight, _mm256_set1_epi32(cell + 8)));
            n += kCells;
            continue;
        }
        for (; seen != 0; seen &= seen - 1, seen &= seen - 1) {
            to[n++] = cell + __builtin_ctz(seen) / 2;
        }
    }
    for (int i = 0; n > 0 && i < kCells; ++i) {
        to[n + i] = to[n - 1];
    }
    return n;
}

// e to the power of x <= 0, within 2e-7 of it; what is less than 1e-37 counts as that.
PLR_AVX2 inline __m256 exponential(__m256 x) {
    x              = _mm256_max_ps(_mm256_set1_ps(-85.0f), x);  // in this order NaN stays
    const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)),
                                     _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256       r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
    r              = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    __m256 p       = _mm256_set1_ps(1.0f / 720);
    for (const float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
        p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(c));
    }
    const __m256i exponent = _mm256_slli_epi32(
        _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(p, _mm256_castsi256_ps(exponent));
}

PLR_KERNEL_AVX2 inline void begin(Rows & rows, int row, const float * q, float scale, int n_key) {
    for (int d = 0; d < n_key; d += kVector) {
        _mm256_store_ps(rows.q[row] + d,
                        _mm256_mul_ps(_mm256_loadu_ps(q + d), _mm256_set1_ps(scale)));
    }
    for (int d = 0; d < kMaxHead; d += kVector) {
        _mm256_store_ps(rows.out[row] + d, _mm256_setzero_ps());
    }
    for (int lane = 0; lane < kCells; lane += kVector) {
        _mm256_store_ps(rows.sum[row] + lane, _mm256_setzero_ps());
    }
    rows.max[row] = -INFINITY;
}

PLR_AVX2 inline float largest(__m256 x) {
    __m128 most = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    most        = _mm_max_ps(most, _mm_movehl_ps(most, most));
    return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
}

PLR_AVX2 inline float total(__m256 x) {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    sum        = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

// All bits of each lane whose cell is used.
PLR_AVX2 inline __m256 lanes(uint32_t used) {
    const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i have = _mm256_and_si256(_mm256_set1_epi32(int(used)), bits);
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(have, bits));
}

// Of scores make what the cells of a tile weigh for a row; returns by what earlier cells count
// less from now on.
PLR_AVX2 inline float weigh(Rows & rows, int row, float (&scores)[kCells], const Tile & tile) {
    const auto * masks = reinterpret_cast<const char *>(tile.mask);
    const __m256 low   = _mm256_add_ps(_mm256_load_ps(scores), floats(masks));
    const __m256 high  = _mm256_add_ps(_mm256_load_ps(scores + kVector), floats(masks + kCells));
    const float  best  = largest(_mm256_max_ps(low, high));  // unused ones repeat a cell
    float        earlier = 1.0f;
    if (best > rows.max[row]) {  // the first time everything is zero
        const float less = std::fmax(rows.max[row] - best, -100.0f);
        earlier          = _mm256_cvtss_f32(exponential(_mm256_set1_ps(less)));
        rows.max[row]    = best;
    }
    const __m256 max = _mm256_set1_ps(rows.max[row]), less = _mm256_set1_ps(earlier);
    const __m256 weights[2] = {
        _mm256_and_ps(lanes(tile.used), exponential(_mm256_sub_ps(low, max))),
        _mm256_and_ps(lanes(tile.used >> kVector), exponential(_mm256_sub_ps(high, max)))};
    for (int half = 0; half < 2; ++half) {
        float * const sum = rows.sum[row] + half * kVector;
        _mm256_store_ps(sum, _mm256_fmadd_ps(_mm256_load_ps(sum), less, weights[half]));
        _mm256_store_ps(scores + half * kVector, weights[half]);
    }
    return earlier;
}

PLR_KERNEL_AVX2 inline void finish(const Rows & rows, int row, float * out, int n_value) {
    const float  sum   = total(_mm256_add_ps(_mm256_load_ps(rows.sum[row]),
                                             _mm256_load_ps(rows.sum[row] + kVector)));
    const __m256 share = _mm256_set1_ps(sum > 0 ? 1 / sum : 0.0f);  // a row may see nothing
    for (int d = 0; d < n_value; d += kVector) {
        _mm256_storeu_ps(out + d, _mm256_mul_ps(_mm256_load_ps(rows.out[row] + d), share));
    }
}

// The sum of each of eight vectors, a vector a lane.
PLR_AVX2 inline __m256 sums(const __m256 (&of)[kVector]) {
    const __m256 low  = _mm256_hadd_ps(_mm256_hadd_ps(of[0], of[1]), _mm256_hadd_ps(of[2], of[3]));
    const __m256 high = _mm256_hadd_ps(_mm256_hadd_ps(of[4], of[5]), _mm256_hadd_ps(of[6], of[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20),
                         _mm256_permute2f128_ps(low, high, 0x31));
}

// Two cells at a time for many heads, four for few: as many sums as there are registers.
template <int H>
PLR_AVX2 inline void scores(float (&to)[H][kCells], const Rows & rows, int first,
                            const Tile & tile, int n_key) {
    constexpr int kOnce = H > 2 ? 2 : 4;
    for (int half = 0; half < kCells; half += kVector) {
        __m256 cells[H][kVector];
        for (int group = 0; group < kVector; group += kOnce) {
            __m256 parts[H][kOnce];
#pragma GCC unroll 4
            for (int h = 0; h < H; ++h) {
#pragma GCC unroll 4
                for (int i = 0; i < kOnce; ++i) {
                    parts[h][i] = _mm256_setzero_ps();
                }
            }
            for (int d = 0; d < n_key; d += kVector) {
                __m256 key[kOnce];
#pragma GCC unroll 4
                for (int i = 0; i < kOnce; ++i) {
                    key[i] = floats(tile.k[half + group + i] + d * sizeof(uint16_t));
                }
#pragma GCC unroll 4
                for (int h = 0; h < H; ++h) {
                    const __m256 q = _mm256_load_ps(rows.q[first + h] + d);
#pragma GCC unroll 4
                    for (int i = 0; i < kOnce; ++i) {
                        parts[h][i] = _mm256_fmadd_ps(q, key[i], parts[h][i]);
                    }
                }
            }
#pragma GCC unroll 4
            for (int h = 0; h < H; ++h) {
#pragma GCC unroll 4
                for (int i = 0; i < kOnce; ++i) {
                    cells[h][group + i] = parts[h][i];
                }
            }
        }
        for (int h = 0; h < H; ++h) {
            _mm256_store_ps(to[h] + half, sums(cells[h]));
        }
    }
}

// V vectors of the values, from dimension d.
template <int H, int V>
PLR_AVX2 inline void add_values(Rows & rows, int first, const Tile & tile, int d,
                                const float (&weight)[H][kCells], const float (&earlier)[H]) {
    __m256 out[H][V];
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
#pragma GCC unroll 8
        for (int i = 0; i < V; ++i) {
            const float * from = rows.out[first + h] + d + i * kVector;
            out[h][i] = _mm256_mul_ps(_mm256_load_ps(from), _mm256_set1_ps(earlier[h]));
        }
    }
    for (int cell = 0; cell < kCells; ++cell) {
        const char * values = tile.v[cell] + d * sizeof(uint16_t);
        __m256       value[V];
#pragma GCC unroll 8
        for (int i = 0; i < V; ++i) {
            value[i] = floats(values + i * kVector * sizeof(uint16_t));
        }
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h) {
            const __m256 share = _mm256_broadcast_ss(&weight[h][cell]);
#pragma GCC unroll 8
            for (int i = 0; i < V; ++i) {
                out[h][i] = _mm256_fmadd_ps(share, value[i], out[h][i]);
            }
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
#pragma GCC unroll 8
        for (int i = 0; i < V; ++i) {
            _mm256_store_ps(rows.out[first + h] + d + i * kVector, out[h][i]);
        }
    }
}

// Rows first to first + H.
template <int H>
PLR_KERNEL_AVX2 inline void attend_heads(Rows & rows, int first, const Tile & tile, int n_key,
                                         int n_value) {
    alignas(32) float weight[H][kCells];
    float             earlier[H];
    scores<H>(weight, rows, first, tile, n_key);
    for (int h = 0; h < H; ++h) {
        earlier[h] = weigh(rows, first + h, weight[h], tile);
    }
    constexpr int kOnce = H > 2 ? 2 : 4;  // as many sums as there are registers for
    int           d     = 0;
    for (; d + kOnce * kVector <= n_value; d += kOnce * kVector) {
        add_values<H, kOnce>(rows, first, tile, d, weight, earlier);
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

}  // namespace attention::avx2
