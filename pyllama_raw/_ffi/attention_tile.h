// Attention of a few rows to 16 cells at a time, with a running softmax.
//
// Tiles begin at multiples of 16 cells. A tile in which a row sees nothing leaves the row
// as it is, so the result of a row depends on its own cells only, whatever is computed
// beside it. (Milakov, Gimelshein: Online normalizer calculation for softmax, 2018)
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "avx512.h"

namespace attention {

constexpr int kCells = 16, kMaxRows = 48, kMaxHead = 128;
constexpr int kVector = 16;  // floats

// Rows of one key head; a row is a head of a token.
struct Rows {
    alignas(64) float q[kMaxRows][kMaxHead];  // scaled
    alignas(64) float out[kMaxRows][kMaxHead];
    alignas(64) float sum[kMaxRows][kVector];  // of weights, a lane for each cell of a tile
    float max[kMaxRows];
};

// Keys are turned, so that a register holds one dimension of all cells.
struct Cells {
    alignas(64) float k[kMaxHead][kCells];
    alignas(64) float v[kCells][kMaxHead];
};

// Which of the 16 cells a row sees.
PLR_KERNEL inline uint32_t visible(const uint16_t * mask) {
    const __m256i hidden = _mm256_set1_epi16(int16_t(0xfc00));  // -infinity
    const __m256i values = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(mask));
    return _mm256_cmpneq_epi16_mask(values, hidden);
}

PLR_AVX512 inline void transpose(__m512 (&rows)[16]) {
    __m512 next[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        next[i]     = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
        next[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j) {
            const __m512d a     = _mm512_castps_pd(next[i + j]);
            const __m512d b     = _mm512_castps_pd(next[i + j + 2]);
            rows[i + 2 * j]     = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            rows[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
    }
    // Now rows[4 * i + j] holds, in lane group g, element 4 * g + j of rows 4 * i and on.
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        const __m512 low_a  = _mm512_shuffle_f32x4(rows[j], rows[4 + j], 0x88);
        const __m512 low_b  = _mm512_shuffle_f32x4(rows[8 + j], rows[12 + j], 0x88);
        const __m512 high_a = _mm512_shuffle_f32x4(rows[j], rows[4 + j], 0xdd);
        const __m512 high_b = _mm512_shuffle_f32x4(rows[8 + j], rows[12 + j], 0xdd);
        next[j]             = _mm512_shuffle_f32x4(low_a, low_b, 0x88);
        next[8 + j]         = _mm512_shuffle_f32x4(low_a, low_b, 0xdd);
        next[4 + j]         = _mm512_shuffle_f32x4(high_a, high_b, 0x88);
        next[12 + j]        = _mm512_shuffle_f32x4(high_a, high_b, 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
        rows[i] = next[i];
    }
}

// Half floats, one cell every *stride* bytes.
PLR_KERNEL inline void load_keys(Cells & to, const char * from, size_t stride, int n_head) {
    for (int d = 0; d < n_head; d += kVector) {
        __m512 rows[16];
#pragma GCC unroll 16
        for (int cell = 0; cell < kCells; ++cell) {
            const char * halves = from + cell * stride + d * sizeof(uint16_t);
            rows[cell] =
                _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(halves)));
        }
        transpose(rows);
#pragma GCC unroll 16
        for (int i = 0; i < kVector; ++i) {
            _mm512_store_ps(to.k[d + i], rows[i]);
        }
    }
}

PLR_KERNEL inline void load_values(Cells & to, const char * from, size_t stride, int n_head) {
    for (int cell = 0; cell < kCells; ++cell) {
        for (int d = 0; d < n_head; d += kVector) {
            const char * halves = from + cell * stride + d * sizeof(uint16_t);
            _mm512_store_ps(
                to.v[cell] + d,
                _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(halves))));
        }
    }
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

// Let a row look at the cells that it sees. *mask* is added to the scores.
PLR_KERNEL inline void attend(Rows & rows, int row, const Cells & cells, const uint16_t * mask,
                              uint32_t seen, int n_key, int n_value) {
    const float * q = rows.q[row];
    __m512        scores[4];  // four sums do not wait for each other
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        scores[i] = _mm512_setzero_ps();
    }
    for (int d = 0; d < n_key; d += 4) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            scores[i] = _mm512_fmadd_ps(_mm512_set1_ps(q[d + i]), _mm512_load_ps(cells.k[d + i]),
                                        scores[i]);
        }
    }
    const __m512 added =
        _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(mask)));
    const __m512 score = _mm512_add_ps(
        _mm512_add_ps(_mm512_add_ps(scores[0], scores[1]), _mm512_add_ps(scores[2], scores[3])),
        added);
    const float best   = _mm512_mask_reduce_max_ps(__mmask16(seen), score);
    __m512      shrink = _mm512_set1_ps(1.0f);
    if (best > rows.max[row]) {  // the first time everything is zero
        shrink = exponential(_mm512_set1_ps(std::fmax(rows.max[row] - best, -100.0f)));
        rows.max[row] = best;
    }
    alignas(64) float weights[kCells];
    const __m512      weight = _mm512_maskz_mov_ps(
        __mmask16(seen), exponential(_mm512_sub_ps(score, _mm512_set1_ps(rows.max[row]))));
    _mm512_store_ps(weights, weight);
    _mm512_store_ps(rows.sum[row],
                    _mm512_fmadd_ps(_mm512_load_ps(rows.sum[row]), shrink, weight));
    float * out = rows.out[row];
    for (int d = 0; d < n_value; d += kVector) {
        __m512 sum = _mm512_mul_ps(_mm512_load_ps(out + d), shrink);
#pragma GCC unroll 16
        for (int cell = 0; cell < kCells; ++cell) {
            sum = _mm512_fmadd_ps(_mm512_set1_ps(weights[cell]),
                                  _mm512_load_ps(cells.v[cell] + d), sum);
        }
        _mm512_store_ps(out + d, sum);
    }
}

PLR_KERNEL inline void finish(const Rows & rows, int row, float * out, int n_value) {
    const float  sum   = _mm512_reduce_add_ps(_mm512_load_ps(rows.sum[row]));
    const __m512 share = _mm512_set1_ps(sum > 0 ? 1 / sum : 0.0f);  // a row may see nothing
    for (int d = 0; d < n_value; d += kVector) {
        _mm512_storeu_ps(out + d, _mm512_mul_ps(_mm512_load_ps(rows.out[row] + d), share));
    }
}

}  // namespace attention
