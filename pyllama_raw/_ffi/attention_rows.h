// Rows of attention with a running softmax over tiles of 16 cells.
//
// A tile holds cells that its row sees, so what comes of a row does not depend on others.
// (Milakov, Gimelshein: Online normalizer calculation for softmax, 2018)
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

// Keys and values of up to 16 cells as half floats, wherever they are.
struct Tile {
    const char *k[kCells], *v[kCells];
    uint16_t    mask[kCells];  // half floats, added to the scores
    uint32_t    used;          // a bit a cell; the others repeat a cell
};

PLR_AVX512 inline __m512 floats(const char * halves) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(halves)));
}

// Which of the cells, a multiple of 16, *mask* does not hide, in order; returns how many.
// *to* has room for 16 more, which repeat the last.
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

}  // namespace attention
