// Products of woven weights with quantised columns: 16 rows by up to four columns at once.
//
// Rows are lanes: four bytes of each of 16 rows stand beside each other, so one broadcast of four
// bytes of a column feeds 16 rows, and no sum runs across lanes. Weights are woven once, in the
// size that they have in the file. A block of 32 weights of 16 rows is
//
//   nibbles  256 bytes: group g of four weights, row by row; groups 0 to 3 are the low halves of
//            the bytes, groups 4 to 7 the high ones
//   planes   of types with more bits: a byte has the bits of several groups (see high_bits())
//   scales   as the type has them, row by row
//
// Types of 8 bits have two bytes of each row beside each other instead, and become 16 bits.
//
// Integers are exact. Floats are added once a block, in the order of the blocks, by each row for
// itself. So a result depends neither on the columns that are computed beside it, nor on threads.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "ggml.h"
#include "simd.h"

namespace woven {

constexpr int kBlock = 32, kRows = 16, kHalf = 8, kGroups = 8, kMaxColumns = 4;
constexpr int kNibbles = kRows * kBlock / 2;

PLR_AVX2 inline __m256 halves(const uint8_t * from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
}

PLR_AVX2 inline __m256 bytes(const uint8_t * from) {
    return _mm256_cvtepi32_ps(
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(from))));
}

// What a tile needs of a block of one half of the rows: weight = d * q + m.
struct Scales {
    __m256 d, m;
};

// Columns, quantised to 8 bits by blocks: value = d * q.
struct Columns {
    char *          data;
    int             n_blocks;
    const int32_t * order = nullptr;  // where each is; else they stand as they are counted

    // Of a column: d and the sum of values of each block, integer sums of its halves, then q as
    // bytes and as 16-bit integers, because types differ in what they multiply.
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
    int16_t * wide(int column) const {
        return reinterpret_cast<int16_t *>(q(column) + size_t(n_blocks) * kBlock);
    }
};

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
        auto *        bytes = to.q(column) + i * kBlock;
        auto *        wide  = to.wide(column) + i * kBlock;
        const __m256i low   = _mm256_cvtepi8_epi16(_mm256_castsi256_si128(packed));
        const __m256i high  = _mm256_cvtepi8_epi16(_mm256_extracti128_si256(packed, 1));
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(bytes), packed);
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(wide), low);
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(wide + 16), high);
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

// Four bytes of each row, of group *j* of the low nibbles and group j + 4 of the high ones.
template <int kPlaneBits>
struct Nibbles {
    // The upper bits of group *g*, at bits 4 and 5. A byte of a plane has one bit of eight groups
    // or two bits of four.
    PLR_AVX2 static inline __m256i high_bits(const uint8_t * planes, int g, int half) {
        if constexpr (kPlaneBits == 1) {
            const __m256i plane = load(planes + 32 * half);
            const __m256i moved = g < 4 ? _mm256_slli_epi16(plane, 4 - g) : _mm256_srli_epi16(plane, g - 4);
            return _mm256_and_si256(moved, _mm256_set1_epi8(0x10));
        } else {
            const __m256i plane = load(planes + 64 * (g / 4) + 32 * half);
            const int     i     = g % 4;  // bits 2 * i and 2 * i + 1
            const __m256i moved = i < 2 ? _mm256_slli_epi16(plane, 4 - 2 * i)
                                        : _mm256_srli_epi16(plane, 2 * i - 4);
            return _mm256_and_si256(moved, _mm256_set1_epi8(0x30));
        }
    }

    PLR_AVX2 static inline __m256i load(const uint8_t * from) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
    }

    PLR_AVX2 static inline __m256i group(const uint8_t * block, int g, int half) {
        const __m256i both = load(block + 64 * (g % 4) + 32 * half);
        const __m256i four = _mm256_and_si256(g < 4 ? both : _mm256_srli_epi16(both, 4),
                                              _mm256_set1_epi8(15));
        if constexpr (kPlaneBits == 0) {
            return four;
        } else {
            return _mm256_or_si256(four, high_bits(block + kNibbles, g, half));
        }
    }

    static constexpr int kBytes = kNibbles + kPlaneBits * kRows * kBlock / 8;

    // Put the weights of row *r*, numbers without sign, in their places.
    static void put(uint8_t * block, int r, const uint8_t (&q)[kBlock]) {
        uint8_t pairs[kBlock / 2];  // of groups g and g + 4
        for (int k = 0; k < kBlock / 2; ++k) {
            pairs[k] = uint8_t((q[k] & 15) | q[k + 16] << 4);
        }
        put_pairs(block, r, pairs);
        uint8_t planes[2][4] = {};
        for (int k = 0; kPlaneBits > 0 && k < kBlock; ++k) {
            const int g = k / 4;
            planes[kPlaneBits == 1 ? 0 : g / 4][k % 4] |=
                uint8_t(q[k] >> 4 << (kPlaneBits == 1 ? g : 2 * (g % 4)));
        }
        for (int plane = 0; plane < kPlaneBits; ++plane) {
            std::memcpy(block + kNibbles + 64 * plane + 4 * r, planes[plane], 4);
        }
    }

    static void put_pairs(uint8_t * block, int r, const uint8_t * pairs) {
        for (int j = 0; j < kGroups / 2; ++j) {
            std::memcpy(block + 64 * j + 4 * r, pairs + 4 * j, 4);
        }
    }
};

PLR_AVX2 inline __m256i four_of(const int8_t * column, int g) {
    int32_t four;
    std::memcpy(&four, column + 4 * g, sizeof(four));
    return _mm256_set1_epi32(four);
}

// Sums of products of each row of both halves with C columns, of a block with one scale. As many
// groups are added in 16 bits as cannot overflow: q <= 15 allows 8, q <= 31 allows 4.
template <int kPlaneBits, int C>
PLR_AVX2 inline void multiply(const uint8_t * block, const int8_t * const * q, __m256i (*sums)[2]) {
    constexpr int kOnce = kPlaneBits == 0 ? 8 : 4;
    const __m256i ones  = _mm256_set1_epi16(1);
#pragma GCC unroll 2
    for (int from = 0; from < kGroups; from += kOnce) {
        __m256i part[C][2];
#pragma GCC unroll 8
        for (int i = 0; i < kOnce; ++i) {
            // A low group, then the high one of the same bytes, if both are in one sum.
            const int     g       = kOnce == 8 ? i / 2 + 4 * (i % 2) : from + i;
            const __m256i upper   = Nibbles<kPlaneBits>::group(block, g, 0);
            const __m256i lower   = Nibbles<kPlaneBits>::group(block, g, 1);
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) {
                const __m256i four = four_of(q[c], g);
                const __m256i u = _mm256_maddubs_epi16(upper, four), l = _mm256_maddubs_epi16(lower, four);
                part[c][0] = i == 0 ? u : _mm256_add_epi16(part[c][0], u);
                part[c][1] = i == 0 ? l : _mm256_add_epi16(part[c][1], l);
            }
        }
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const __m256i sum = _mm256_madd_epi16(part[c][half], ones);
                sums[c][half]     = from == 0 ? sum : _mm256_add_epi32(sums[c][half], sum);
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------
// Types. Each says how its blocks are woven, and what a tile multiplies and adds.
//   kBlocks   blocks of 32 that share what the type has once, 8 of the types with 256 weights
//   kBytes    woven bytes of these, of 16 rows
//   weave()   *rows* are the same blocks of 16 rows
//   dot()     integer sums of block *i* of these
//   scales()  of block *i*, for a half of the rows

template <ggml_type kGgmlType, int kPlaneBits, bool kHasMinimum, int kZero>
struct Plain {  // Q4_0, Q4_1, Q5_0, Q5_1: d, perhaps m, perhaps a fifth bit of each weight, nibbles
    static constexpr ggml_type kType   = kGgmlType;
    static constexpr int       kBlocks = 1;
    static constexpr int       kScales = Nibbles<kPlaneBits>::kBytes;
    static constexpr int       kBytes  = kScales + (kHasMinimum ? 4 : 2) * kRows;
    static constexpr int       kQ      = (kHasMinimum ? 4 : 2) + (kPlaneBits ? 4 : 0);

    static void weave(const char * const * rows, uint8_t * to) {
        for (int r = 0; r < kRows; ++r) {
            const auto * from = reinterpret_cast<const uint8_t *>(rows[r]);
            uint32_t     bits = 0;
            if (kPlaneBits) {
                std::memcpy(&bits, from + kQ - 4, sizeof(bits));
            }
            if (kPlaneBits == 0) {
                Nibbles<0>::put_pairs(to, r, from + kQ);  // pairs of the file are those of a block
            } else {
                uint8_t q[kBlock];
                for (int k = 0; k < 16; ++k) {
                    q[k]      = uint8_t((from[kQ + k] & 15) | (bits >> k & 1) << 4);
                    q[k + 16] = uint8_t(from[kQ + k] >> 4 | (bits >> (k + 16) & 1) << 4);
                }
                Nibbles<kPlaneBits>::put(to, r, q);
            }
            std::memcpy(to + kScales + 2 * r, from, 2);
            if (kHasMinimum) {
                std::memcpy(to + kScales + 2 * (kRows + r), from + 2, 2);
            }
        }
    }

    template <int C>
    PLR_AVX2 static inline void dot(const uint8_t * from, int, const int8_t * const * q,
                                    const int16_t * const *, const int16_t * const *,
                                    __m256i (*sums)[2]) {
        multiply<kPlaneBits, C>(from, q, sums);
    }

    PLR_AVX2 static inline Scales scales(const uint8_t * from, int, int half) {
        const __m256 d = halves(from + kScales + 16 * half);
        if constexpr (kHasMinimum) {
            return {d, halves(from + kScales + 2 * kRows + 16 * half)};
        }
        return {d, _mm256_mul_ps(d, _mm256_set1_ps(-float(kZero)))};
    }
};

using Q4_0 = Plain<GGML_TYPE_Q4_0, 0, false, 8>;
using Q4_1 = Plain<GGML_TYPE_Q4_1, 0, true, 0>;
using Q5_0 = Plain<GGML_TYPE_Q5_0, 1, false, 16>;
using Q5_1 = Plain<GGML_TYPE_Q5_1, 1, true, 0>;

template <ggml_type kGgmlType, int kPlaneBits>
struct Super {  // Q4_K, Q5_K: d and dmin of 256 weights, 6-bit scales and minima of each 32
    static constexpr ggml_type kType   = kGgmlType;
    static constexpr int       kBlocks = 8;
    static constexpr int       kOne    = Nibbles<kPlaneBits>::kBytes + 2 * kRows;  // of a block
    static constexpr int       kBytes  = kBlocks * kOne + 4 * kRows;
    static constexpr int       kQ      = 4 + 12 + (kPlaneBits ? 32 : 0);

    static void weave(const char * const * rows, uint8_t * to) {
        for (int r = 0; r < kRows; ++r) {
            const auto * from = reinterpret_cast<const uint8_t *>(rows[r]);
            for (int i = 0; i < kBlocks; ++i) {
                uint8_t * block = to + i * kOne;
                uint8_t   q[kBlock];
                for (int k = 0; k < kBlock; ++k) {
                    const uint8_t both = from[kQ + 32 * (i / 2) + k];
                    const int     low  = i % 2 == 0 ? both & 15 : both >> 4;
                    const int     bit  = kPlaneBits ? from[16 + k] >> i & 1 : 0;
                    q[k]               = uint8_t(low | bit << 4);
                }
                Nibbles<kPlaneBits>::put(block, r, q);
                // Six bits each; those of blocks 4 to 7 have their upper two in the first eight bytes.
                const uint8_t * s = from + 4;
                uint8_t *       scales = block + Nibbles<kPlaneBits>::kBytes;
                scales[r]         = i < 4 ? s[i] & 63 : uint8_t((s[i + 4] & 15) | (s[i - 4] >> 6) << 4);
                scales[kRows + r] = i < 4 ? s[i + 4] & 63 : uint8_t((s[i + 4] >> 4) | (s[i] >> 6) << 4);
            }
            std::memcpy(to + kBlocks * kOne + 2 * r, from, 2);
            std::memcpy(to + kBlocks * kOne + 2 * (kRows + r), from + 2, 2);
        }
    }

    template <int C>
    PLR_AVX2 static inline void dot(const uint8_t * from, int i, const int8_t * const * q,
                                    const int16_t * const *, const int16_t * const *,
                                    __m256i (*sums)[2]) {
        multiply<kPlaneBits, C>(from + i * kOne, q, sums);
    }

    PLR_AVX2 static inline Scales scales(const uint8_t * from, int i, int half) {
        const uint8_t * of_block = from + i * kOne + Nibbles<kPlaneBits>::kBytes + 8 * half;
        const uint8_t * of_all   = from + kBlocks * kOne + 16 * half;
        const __m256    minimum  = _mm256_mul_ps(halves(of_all + 2 * kRows), bytes(of_block + kRows));
        return {_mm256_mul_ps(halves(of_all), bytes(of_block)),
                _mm256_sub_ps(_mm256_setzero_ps(), minimum)};
    }
};

using Q4_K = Super<GGML_TYPE_Q4_K, 0>;
using Q5_K = Super<GGML_TYPE_Q5_K, 1>;

struct Q6_K {  // d of 256 weights, an 8-bit scale of each 16; a weight is d * scale * (q - 32)
    static constexpr ggml_type kType   = GGML_TYPE_Q6_K;
    static constexpr int       kBlocks = 8;
    static constexpr int       kOne    = Nibbles<2>::kBytes + 2 * kRows;
    static constexpr int       kBytes  = kBlocks * kOne + 2 * kRows;

    static void weave(const char * const * rows, uint8_t * to) {
        for (int r = 0; r < kRows; ++r) {
            const auto * from = reinterpret_cast<const uint8_t *>(rows[r]);
            for (int i = 0; i < kBlocks; ++i) {
                // Of each 128 weights: 64 bytes of nibbles, 32 bytes with two bits of four blocks.
                const int part = i / 4, b = i % 4;
                uint8_t   q[kBlock];
                for (int k = 0; k < kBlock; ++k) {
                    const uint8_t both = from[64 * part + 32 * (b % 2) + k];
                    const int     low  = b < 2 ? both & 15 : both >> 4;
                    const int     high = from[128 + 32 * part + k] >> (2 * b) & 3;
                    q[k]               = uint8_t(low | high << 4);
                }
                Nibbles<2>::put(to + i * kOne, r, q);
                std::memcpy(to + i * kOne + Nibbles<2>::kBytes + 2 * r, from + 192 + 2 * i, 2);
            }
            std::memcpy(to + kBlocks * kOne + 2 * r, from + 208, 2);
        }
    }

    // Two groups are added in 16 bits, because q <= 63. What the zero of 32 adds is taken away by
    // the sums of each 16 values of a column.
    template <int C>
    PLR_AVX2 static inline void dot(const uint8_t * from, int i, const int8_t * const * q,
                                    const int16_t * const *, const int16_t * const * half_sums,
                                    __m256i (*sums)[2]) {
        const uint8_t * block = from + i * kOne;
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            // both scales of a row as 16-bit integers, then each of them twice
            const __m256i pairs = _mm256_cvtepi8_epi16(_mm_loadu_si128(
                reinterpret_cast<const __m128i *>(block + Nibbles<2>::kBytes + 16 * half)));
            const __m256i first  = _mm256_or_si256(_mm256_slli_epi32(pairs, 16),
                                                   _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff)));
            const __m256i second = _mm256_or_si256(
                _mm256_srli_epi32(pairs, 16), _mm256_and_si256(pairs, _mm256_set1_epi32(int(0xffff0000))));
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) {
                int32_t both;
                std::memcpy(&both, half_sums[c], sizeof(both));
                const __m256i zero = _mm256_madd_epi16(pairs, _mm256_set1_epi32(both));
                sums[c][half]      = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_slli_epi32(zero, 5));
            }
#pragma GCC unroll 4
            for (int g = 0; g < kGroups; g += 2) {
                const __m256i even = Nibbles<2>::group(block, g, half);
                const __m256i odd  = Nibbles<2>::group(block, g + 1, half);
#pragma GCC unroll 4
                for (int c = 0; c < C; ++c) {
                    const __m256i sum = _mm256_add_epi16(_mm256_maddubs_epi16(even, four_of(q[c], g)),
                                                         _mm256_maddubs_epi16(odd, four_of(q[c], g + 1)));
                    sums[c][half] = _mm256_add_epi32(sums[c][half],
                                                     _mm256_madd_epi16(sum, g < 4 ? first : second));
                }
            }
        }
    }

    PLR_AVX2 static inline Scales scales(const uint8_t * from, int, int half) {
        return {halves(from + kBlocks * kOne + 16 * half), _mm256_setzero_ps()};
    }
};

struct Q8_0 {  // two bytes of each row beside each other, which are multiplied as 16 bits
    static constexpr ggml_type kType   = GGML_TYPE_Q8_0;
    static constexpr int       kBlocks = 1;
    static constexpr int       kBytes  = kRows * (kBlock + 2);

    static void weave(const char * const * rows, uint8_t * to) {
        for (int r = 0; r < kRows; ++r) {
            for (int k = 0; k < kBlock; k += 2) {
                std::memcpy(to + kRows * k + 2 * r, rows[r] + 2 + k, 2);
            }
            std::memcpy(to + kRows * kBlock + 2 * r, rows[r], 2);
        }
    }

    template <int C>
    PLR_AVX2 static inline void dot(const uint8_t * from, int, const int8_t * const *,
                                    const int16_t * const * wide, const int16_t * const *,
                                    __m256i (*sums)[2]) {
#pragma GCC unroll 16
        for (int k = 0; k < kBlock; k += 2) {
            const auto *  pairs = reinterpret_cast<const __m128i *>(from + kRows * k);
            const __m256i upper = _mm256_cvtepi8_epi16(_mm_loadu_si128(pairs));
            const __m256i lower = _mm256_cvtepi8_epi16(_mm_loadu_si128(pairs + 1));
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) {
                int32_t pair;
                std::memcpy(&pair, wide[c] + k, sizeof(pair));
                const __m256i both = _mm256_set1_epi32(pair);
                const __m256i u = _mm256_madd_epi16(upper, both), l = _mm256_madd_epi16(lower, both);
                sums[c][0] = k == 0 ? u : _mm256_add_epi32(sums[c][0], u);
                sums[c][1] = k == 0 ? l : _mm256_add_epi32(sums[c][1], l);
            }
        }
    }

    PLR_AVX2 static inline Scales scales(const uint8_t * from, int, int half) {
        return {halves(from + kRows * kBlock + 16 * half), _mm256_setzero_ps()};
    }
};

// ---------------------------------------------------------------------------------------------

// out[c * stride + r] of the first n_rows of 16 woven rows and C columns from *first*. Sums of
// floats are in memory, because registers do not hold them beside those of integers, and the
// compiler would spill the latter, which are used eight times as often.
template <class W, int C>
PLR_AVX2 PLR_CALLED void tile(const uint8_t * rows, const Columns & columns, int first, float * out,
                              size_t stride, int n_rows) {
    alignas(32) float acc[C][kRows] = {};
    const float *     d[C];
    const float *     s[C];
    const int8_t *    q[C];
    const int16_t *   wide[C];
    const int16_t *   half_sums[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
        d[c] = columns.d(first + c), s[c] = columns.sums(first + c), q[c] = columns.q(first + c);
        wide[c] = columns.wide(first + c), half_sums[c] = columns.half_sums(first + c);
    }
    for (int i = 0; i < columns.n_blocks; ++i) {
        const uint8_t * from = rows + size_t(i / W::kBlocks) * W::kBytes;
        if (C == 1) {  // reads each weight once, so memory is the limit
            for (int at = 0; at < W::kBytes / W::kBlocks; at += 64) {
                _mm_prefetch(reinterpret_cast<const char *>(from) + 2048 + at, _MM_HINT_T0);
            }
        }
        __m256i sums[C][2];
        W::template dot<C>(from, i % W::kBlocks, q, wide, half_sums, sums);
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const Scales scales = W::scales(from, i % W::kBlocks, half);
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) {
                float *      sum = &acc[c][kHalf * half];
                const __m256 by  = _mm256_mul_ps(scales.d, _mm256_set1_ps(d[c][i]));
                __m256 value = _mm256_fmadd_ps(by, _mm256_cvtepi32_ps(sums[c][half]), _mm256_load_ps(sum));
                value = _mm256_fmadd_ps(scales.m, _mm256_set1_ps(s[c][i]), value);
                _mm256_store_ps(sum, value);
            }
        }
        asm volatile("" ::: "memory");
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
            q[c] += kBlock, wide[c] += kBlock, half_sums[c] += 2;
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
