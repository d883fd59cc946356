// Products of tiles by AVX2: sixteen rows, which are a panel, with six columns, as floats or as 16-bit
// integers.
//
// A tile adds its products in their order, so a column does not depend on others.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ggml.h"
#include "simd.h"

namespace float_tile {

constexpr int kPanel = 16, kColumns = 6;  // the sums of a tile fill 12 registers

PLR_AVX2 inline void transpose(__m256 (&x)[8]) {
    __m256 y[8];
    for (int i = 0; i < 8; i += 2) {
        y[i]     = _mm256_unpacklo_ps(x[i], x[i + 1]);
        y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        x[i]     = _mm256_shuffle_ps(y[i], y[i + 2], 0x44);
        x[i + 1] = _mm256_shuffle_ps(y[i], y[i + 2], 0xee);
        x[i + 2] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0x44);
        x[i + 3] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
        y[i]     = _mm256_permute2f128_ps(x[i], x[i + 4], 0x20);
        y[i + 4] = _mm256_permute2f128_ps(x[i], x[i + 4], 0x31);
    }
    std::copy_n(y, 8, x);
}

PLR_AVX2 inline __m256 at(const float * from) { return _mm256_loadu_ps(from); }
PLR_AVX2 inline __m256 at(const uint16_t * from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
}

PLR_AVX2 inline float one(float value) { return value; }
PLR_AVX2 inline float one(uint16_t half) { return _cvtsh_ss(half); }

// *n* values of sixteen rows of floats or halves, value by value.
template <class Value>
PLR_AVX2 PLR_CALLED inline void pack(float * to, const Value * const (&rows)[kPanel], int n) {
    int k = 0;
    for (; k + 8 <= n; k += 8) {
        for (int half = 0; half < kPanel; half += 8) {
            __m256 x[8];
            for (int r = 0; r < 8; ++r) {
                x[r] = at(rows[half + r] + k);
            }
            transpose(x);
            for (int i = 0; i < 8; ++i) {
                _mm256_store_ps(to + (k + i) * kPanel + half, x[i]);
            }
        }
    }
    for (; k < n; ++k) {
        for (int r = 0; r < kPanel; ++r) {
            to[k * kPanel + r] = one(rows[r][k]);
        }
    }
}

// Adds *n* values of a panel to the sums of six columns, which stand *stride* floats apart; the
// first ones begin the sums.
PLR_AVX2 PLR_CALLED inline void add(float * out, size_t stride, const float * panel,
                                    const float * const (&columns)[kColumns], int n, bool begins) {
    __m256 sums[kColumns][2];
#pragma GCC unroll 6
    for (int c = 0; c < kColumns; ++c) {
        sums[c][0] = begins ? _mm256_setzero_ps() : _mm256_loadu_ps(out + c * stride);
        sums[c][1] = begins ? _mm256_setzero_ps() : _mm256_loadu_ps(out + c * stride + 8);
    }
    const float *c0 = columns[0], *c1 = columns[1], *c2 = columns[2], *c3 = columns[3],
                *c4 = columns[4], *c5 = columns[5];
    for (int k = 0; k < n; ++k, panel += kPanel) {
        const __m256  low = _mm256_load_ps(panel), high = _mm256_load_ps(panel + 8);
        const float * at[kColumns] = {c0 + k, c1 + k, c2 + k, c3 + k, c4 + k, c5 + k};
#pragma GCC unroll 6
        for (int c = 0; c < kColumns; ++c) {
            const __m256 value = _mm256_broadcast_ss(at[c]);
            sums[c][0]         = _mm256_fmadd_ps(value, low, sums[c][0]);
            sums[c][1]         = _mm256_fmadd_ps(value, high, sums[c][1]);
        }
    }
#pragma GCC unroll 6
    for (int c = 0; c < kColumns; ++c) {
        _mm256_storeu_ps(out + c * stride, sums[c][0]);
        _mm256_storeu_ps(out + c * stride + 8, sums[c][1]);
    }
}

// Those that do not exist repeat the last one.
template <class Value>
inline void rows_of(const Value * (&rows)[kPanel], const char * from, size_t stride, int n_rows) {
    for (int r = 0; r < kPanel; ++r) {
        rows[r] = reinterpret_cast<const Value *>(from + std::min(r, n_rows - 1) * stride);
    }
}

// For FloatProduct, which reads columns where they are.
struct Tile {
    static constexpr ggml_type kType         = GGML_TYPE_F32;
    static constexpr bool      kPacksColumns = false;
    static constexpr int       kDepth = 192;  // values of a row at a time: a panel is 12 KiB
    static constexpr int       kOnce  = 1;    // a row has a multiple of these

    // libllama multiplies floats by the wider vectors of AVX-512 where there are some.
    static bool is_usable() { return has_avx2() && !has_avx512(); }

    using Column = float[kDepth];
    struct Panel {
        alignas(64) float values[kDepth * kPanel];
    };

    static void pack(Panel & to, const char * from, size_t stride, int n_rows, int n) {
        const float * rows[kPanel];
        rows_of(rows, from, stride, n_rows);
        float_tile::pack(to.values, rows, n);
    }

    static void add(float * out, size_t stride, const Panel & panel,
                    const Column * const (&columns)[kColumns], int n, bool begins) {
        const float * at[kColumns];
        for (int c = 0; c < kColumns; ++c) {
            at[c] = *columns[c];
        }
        float_tile::add(out, stride, panel.values, at, n, begins);
    }
};

}  // namespace float_tile

// Products of 16-bit integers: of rows of half floats with columns of floats. An instruction multiplies
// twice as many of them as of floats.
//
// A part of a row or a column is scaled to a length of 32767 before it is rounded. So all sums
// of products have 32 bits (Cauchy and Schwarz), and are exact. Rounding loses about as much as
// half floats do, in which libllama would round the columns.
namespace short_tile {

constexpr int   kPanel = float_tile::kPanel, kColumns = float_tile::kColumns;
constexpr int   kOnce   = 16;  // values that are rounded at a time; a row has a multiple
constexpr float kLength = 32767;

// Sixteen floats as integers, in an order that is the same for rows and columns.
PLR_AVX2 inline __m256i rounded(__m256 low, __m256 high, __m256 scale) {
    return _mm256_packs_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(low, scale)),
                              _mm256_cvtps_epi32(_mm256_mul_ps(high, scale)));
}

using float_tile::at;

// What an integer is worth if the *n* values have a length of 32767; NaN if one of them is none.
template <class Value>
PLR_AVX2 inline float unit_of(const Value * from, int n) {
    __m256 low = _mm256_setzero_ps(), high = _mm256_setzero_ps();
    for (int k = 0; k < n; k += kOnce) {
        const __m256 x = at(from + k), y = at(from + k + 8);
        low  = _mm256_fmadd_ps(x, x, low);
        high = _mm256_fmadd_ps(y, y, high);
    }
    alignas(32) float sums[8];
    _mm256_store_ps(sums, _mm256_add_ps(low, high));
    for (int i = 1; i < 8; ++i) {
        sums[0] += sums[i];
    }
    return std::sqrt(sums[0]) / kLength;
}

// Adds in this order and in place, or the compiler runs out of registers for the sums.
PLR_AVX2 inline void add_products(__m256i & sums, __m256i a, __m256i b) {
    asm volatile("vpaddd %1, %0, %0" : "+x"(sums) : "x"(_mm256_madd_epi16(a, b)) : "memory");
}

struct Tile {
    static constexpr ggml_type kType         = GGML_TYPE_F16;
    static constexpr bool      kPacksColumns = true;
    static constexpr int       kDepth = 384;  // values of a row at a time: a panel is 12 KiB
    static constexpr int       kOnce  = short_tile::kOnce;

    static bool is_usable() { return has_avx2(); }

    struct Column {
        alignas(32) int16_t values[kDepth];
        float unit;
    };
    struct Panel {
        alignas(64) int16_t values[kDepth * kPanel];  // two of each row in turn
        alignas(32) float units[kPanel];
    };

    PLR_AVX2 PLR_CALLED static void pack(Column & to, const float * from, int n) {
        to.unit            = unit_of(from, n);
        const __m256 scale = _mm256_set1_ps(to.unit == 0 ? 0 : 1 / to.unit);
        for (int k = 0; k < n; k += kOnce) {
            _mm256_store_si256(reinterpret_cast<__m256i *>(to.values + k),
                               rounded(at(from + k), at(from + k + 8), scale));
        }
    }

    PLR_AVX2 PLR_CALLED static void pack(Panel & to, const char * from, size_t stride, int n_rows,
                                         int n) {
        const uint16_t * rows[kPanel];
        __m256           scales[kPanel];
        float_tile::rows_of(rows, from, stride, n_rows);
        for (int r = 0; r < kPanel; ++r) {
            to.units[r] = unit_of(rows[r], n);
            scales[r]   = _mm256_set1_ps(to.units[r] == 0 ? 0 : 1 / to.units[r]);
        }
        for (int k = 0; k < n; k += kOnce) {
            for (int half = 0; half < kPanel; half += 8) {
                __m256 pairs[8];
                for (int i = 0; i < 8; ++i) {
                    const uint16_t * row = rows[half + i] + k;
                    pairs[i] = _mm256_castsi256_ps(rounded(at(row), at(row + 8), scales[half + i]));
                }
                float_tile::transpose(pairs);
                for (int i = 0; i < 8; ++i) {
                    int16_t * place = to.values + (k + 2 * i) * kPanel + 2 * half;
                    _mm256_store_ps(reinterpret_cast<float *>(place), pairs[i]);
                }
            }
        }
    }

    // Adds *n* values of a panel to the sums of six columns, which stand *stride* floats apart;
    // the first ones begin the sums.
    PLR_AVX2 PLR_CALLED static void add(float * out, size_t stride, const Panel & panel,
                                        const Column * const (&columns)[kColumns], int n,
                                        bool begins) {
        __m256i sums[kColumns][2];
#pragma GCC unroll 6
        for (int c = 0; c < kColumns; ++c) {
            sums[c][0] = sums[c][1] = _mm256_setzero_si256();
        }
        const int16_t * rows = panel.values;
        const int16_t * at[kColumns] = {columns[0]->values, columns[1]->values, columns[2]->values,
                                        columns[3]->values, columns[4]->values, columns[5]->values};
        for (int k = 0; k < n; k += 2, rows += 2 * kPanel) {
            const auto *  two = reinterpret_cast<const __m256i *>(rows);
            const __m256i low = _mm256_load_si256(two), high = _mm256_load_si256(two + 1);
#pragma GCC unroll 6
            for (int c = 0; c < kColumns; ++c) {
                int32_t pair;
                std::memcpy(&pair, at[c] + k, sizeof(pair));
                const __m256i both = _mm256_set1_epi32(pair);
                add_products(sums[c][0], both, low);
                add_products(sums[c][1], both, high);
            }
        }
#pragma GCC unroll 6
        for (int c = 0; c < kColumns; ++c, out += stride) {
            const __m256 unit = _mm256_set1_ps(columns[c]->unit);
#pragma GCC unroll 2
            for (int i = 0; i < 2; ++i) {
                const __m256 worth = _mm256_mul_ps(unit, _mm256_load_ps(panel.units + 8 * i));
                const __m256 old = begins ? _mm256_setzero_ps() : _mm256_loadu_ps(out + 8 * i);
                _mm256_storeu_ps(out + 8 * i,
                                 _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[c][i]), worth, old));
            }
        }
    }
};

}  // namespace short_tile
