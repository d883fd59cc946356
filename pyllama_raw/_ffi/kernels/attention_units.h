// The rows of attention, tiles of 16 cells that a row looks at, and the vectors that compute them: of 8
// floats by AVX2, FMA and F16C, and of 16 by AVX-512. What both do with them is attention_frame.h.
//
// A tile holds only cells that its row sees, so the result of a row does not depend on other
// rows.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "float_tile.h"
#include "simd.h"

namespace attention {

constexpr int kCells = 16, kMaxRows = 48, kMaxHead = 128;
constexpr int kHeadsOnce = 4;  // heads that share what is read of a tile

// Rows of one key head; a row is a head of a token.
struct Rows {
    alignas(64) float q[kMaxRows][kMaxHead];  // scaled
    alignas(64) float out[kMaxRows][kMaxHead];
    alignas(64) float sum[kMaxRows][kCells];  // of weights, by cell of a tile
    float max[kMaxRows];
    float slope[kMaxRows];  // by what a mask counts
};

// Keys and values of up to 16 cells as half floats, wherever they are.
struct Tile {
    const uint16_t *k[kCells], *v[kCells];
    uint16_t    mask[kCells];  // half floats, added to the scores by the slope of a row
    uint32_t    used;          // a bit a cell; the others repeat a cell
};

// The functions for one kind of CPU.
struct Unit {
    int vector;  // floats; heads are multiples of it
    // Writes the cells that *mask* does not hide, in order, and returns how many these are.
    // n_cells is a multiple of 16; *to* has room for 16 more cells, which repeat the last.
    int (*visible)(int32_t * to, const uint16_t * mask, int n_cells);
    void (*begin)(Rows & rows, int row, const float * q, float scale, int n_key, int n_value);
    // The n_heads rows of a token, from *first* on, look at the cells of *tile*.
    void (*attend)(Rows & rows, int first, int n_heads, const Tile & tile, int n_key,
                   int n_value);
    void (*finish)(const Rows & rows, int row, float * out, int n_value);
    void (*gelu)(float * to, const float * from, int64_t n);
};

}  // namespace attention

// ---------------------------------------------------------------------------------------------

#define PLR_TARGET PLR_AVX2

namespace attention::avx2 {

using Vector = __m256;

constexpr int kVector = 8;
constexpr int kOrder[kVector] = {0, 1, 2, 3, 4, 5, 6, 7};  // of PartialSums
constexpr int kMany = kMaxRows + 1;  // rows that gain by panels: none, a tile has two vectors of cells

// How many vectors of each head are summed at once, so that all sums stay in 16 registers.
constexpr int vectors_once(int n_heads) { return n_heads > 2 ? 2 : 4; }

PLR_TARGET inline Vector all(float x) { return _mm256_set1_ps(x); }
PLR_TARGET inline Vector load(const float * from) { return _mm256_load_ps(from); }
PLR_TARGET inline Vector load_unaligned(const float * from) { return _mm256_loadu_ps(from); }
PLR_TARGET inline void   store(float * to, Vector x) { _mm256_store_ps(to, x); }
PLR_TARGET inline void   store_unaligned(float * to, Vector x) { _mm256_storeu_ps(to, x); }
PLR_TARGET inline Vector plus_product(Vector x, Vector a, Vector b) {
    return _mm256_fmadd_ps(a, b, x);
}
PLR_TARGET inline Vector minus_product(Vector x, Vector a, Vector b) {
    return _mm256_fnmadd_ps(a, b, x);
}
PLR_TARGET inline Vector floats(const uint16_t * halves) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(halves)));
}

// For exponential(), whose results below 1e-37 become that.
PLR_TARGET inline Vector bounded(Vector x) {
    return _mm256_max_ps(_mm256_set1_ps(-85.0f), x);  // in this order NaN stays
}
PLR_TARGET inline Vector smaller(Vector x, Vector y) { return _mm256_min_ps(y, x); }  // or NaN
PLR_TARGET inline Vector rounded(Vector x) {
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
PLR_TARGET inline Vector times_two_to(Vector x, Vector n) {
    const __m256i exponent = _mm256_slli_epi32(
        _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(x, _mm256_castsi256_ps(exponent));
}

PLR_TARGET inline float largest(const Vector (&of)[2], uint32_t) {  // unused cells repeat another
    const __m256 x    = _mm256_max_ps(of[0], of[1]);
    __m128       most = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    most              = _mm_max_ps(most, _mm_movehl_ps(most, most));
    return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
}

PLR_TARGET inline float total(const float (&of)[kCells]) {
    const __m256 x   = _mm256_add_ps(load(of), load(of + kVector));
    __m128       sum = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    sum              = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

// *x* with 0 in place of each cell that is not used.
PLR_TARGET inline Vector only(uint32_t used, Vector x) {
    const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i have = _mm256_and_si256(_mm256_set1_epi32(int(used)), bits);
    return _mm256_and_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(have, bits)), x);
}

// Eight vectors, one for each cell; sums() has the sum of each.
struct PartialSums {
    Vector cells[kVector];

    template <int N>
    PLR_TARGET inline void take(int group, const Vector (&of)[N]) {
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) {
            cells[group * N + i] = of[i];
        }
    }

    PLR_TARGET inline Vector sums() const {
        const Vector low  = _mm256_hadd_ps(_mm256_hadd_ps(cells[0], cells[1]),
                                           _mm256_hadd_ps(cells[2], cells[3]));
        const Vector high = _mm256_hadd_ps(_mm256_hadd_ps(cells[4], cells[5]),
                                           _mm256_hadd_ps(cells[6], cells[7]));
        return _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20),
                             _mm256_permute2f128_ps(low, high, 0x31));
    }
};

PLR_TARGET PLR_CALLED inline int visible(int32_t * to, const uint16_t * mask, int n_cells) {
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

#include "attention_frame.h"

}  // namespace attention::avx2

// ---------------------------------------------------------------------------------------------

#define PLR_TARGET PLR_AVX512

namespace attention::avx512 {

using Vector = __m512;

constexpr int kVector = 16;
constexpr int kOrder[kVector] = {0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15};  // of PartialSums
constexpr int kMany = 8;  // rows that gain by panels

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
