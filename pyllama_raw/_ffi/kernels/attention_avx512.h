// Vectors of 16 floats by AVX-512, for attention_frame.h.
#pragma once

#include <cmath>
#include <cstring>

#include "attention_rows.h"
#include "float_tile.h"
#include "simd.h"

#define PLR_TARGET PLR_AVX512

namespace attention::avx512 {

using Vector = __m512;

constexpr int kVector = 16;
constexpr int kOrder[kVector] = {0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15};  // of PartialSums

// How many vectors of each head are summed at once, so that all sums stay in 32 registers.
constexpr int vectors_once(int) { return 4; }

PLR_TARGET inline Vector all(float x) { return _mm512_set1_ps(x); }
PLR_TARGET inline Vector load(const float * from) { return _mm512_load_ps(from); }
PLR_TARGET inline Vector load_unaligned(const float * from) { return _mm512_loadu_ps(from); }
PLR_TARGET inline void   store(float * to, Vector x) { _mm512_store_ps(to, x); }
PLR_TARGET inline void   store_unaligned(float * to, Vector x) { _mm512_storeu_ps(to, x); }
PLR_TARGET inline Vector plus_product(Vector x, Vector a, Vector b) {
    return _mm512_fmadd_ps(a, b, x);
}
PLR_TARGET inline Vector minus_product(Vector x, Vector a, Vector b) {
    return _mm512_fnmadd_ps(a, b, x);
}
PLR_TARGET inline Vector floats(const uint16_t * halves) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(halves)));
}

// For exponential(); nothing is too small for times_two_to().
PLR_TARGET inline Vector bounded(Vector x) { return x; }
PLR_TARGET inline Vector smaller(Vector x, Vector y) { return _mm512_min_ps(y, x); }  // or NaN
PLR_TARGET inline Vector rounded(Vector x) { return _mm512_roundscale_ps(x, 0); }
PLR_TARGET inline Vector times_two_to(Vector x, Vector n) { return _mm512_scalef_ps(x, n); }

PLR_TARGET inline float largest(const Vector (&of)[1], uint32_t used) {
    return _mm512_mask_reduce_max_ps(__mmask16(used), of[0]);
}
PLR_TARGET inline float total(const float (&of)[kCells]) {
    return _mm512_reduce_add_ps(load(of));
}
// *x* with 0 in place of each cell that is not used.
PLR_TARGET inline Vector only(uint32_t used, Vector x) {
    return _mm512_maskz_mov_ps(__mmask16(used), x);
}

// 16 vectors, one for each cell; sums() has the sum of each.
struct PartialSums {
    Vector fours[4];  // sums of four elements each, of four cells in turn

    PLR_TARGET inline void take(int group, const Vector (&of)[4]) {
        const __m512  low    = _mm512_add_ps(_mm512_unpacklo_ps(of[0], of[1]),
                                             _mm512_unpackhi_ps(of[0], of[1]));
        const __m512  high   = _mm512_add_ps(_mm512_unpacklo_ps(of[2], of[3]),
                                             _mm512_unpackhi_ps(of[2], of[3]));
        const __m512d low_d  = _mm512_castps_pd(low);
        const __m512d high_d = _mm512_castps_pd(high);
        fours[group] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low_d, high_d)),
                                     _mm512_castpd_ps(_mm512_unpackhi_pd(low_d, high_d)));
    }

    PLR_TARGET inline Vector sums() const {
        const __m512 low  = _mm512_add_ps(_mm512_shuffle_f32x4(fours[0], fours[1], 0x44),
                                          _mm512_shuffle_f32x4(fours[0], fours[1], 0xee));
        const __m512 high = _mm512_add_ps(_mm512_shuffle_f32x4(fours[2], fours[3], 0x44),
                                          _mm512_shuffle_f32x4(fours[2], fours[3], 0xee));
        return _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88),
                             _mm512_shuffle_f32x4(low, high, 0xdd));
    }
};

PLR_TARGET PLR_CALLED inline int visible(int32_t * to, const uint16_t * mask, int n_cells) {
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

#include "attention_frame.h"

}  // namespace attention::avx512
