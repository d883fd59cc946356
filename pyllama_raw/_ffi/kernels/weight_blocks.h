// The blocks of the types of weights that product.h multiplies, and how a block becomes 32
// bytes.
//
// Blocks are as in ggml-common.h; d, m and s are half floats.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"
#include "ggml.h"

namespace product {

constexpr int kBlock = 32;  // weights

struct Q4_1 {
    static constexpr ggml_type kType = GGML_TYPE_Q4_1, kColumnType = GGML_TYPE_Q8_1;
    static constexpr bool      kHasMinimum = true;
    static constexpr int       kZero       = 0;  // the byte that stands for the weight m

    struct Block {
        uint16_t d, m;
        uint8_t  q[kBlock / 2];
    };
    struct ColumnBlock {
        uint16_t d, s;  // s = d * sum(q)
        int8_t   q[kBlock];
    };

    // The low halves of the bytes, then the high ones.
    PLR_AVX512 static inline __m256i bytes(const Block & block) {
        const __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i *>(block.q));
        const __m256i both  = _mm256_inserti128_si256(_mm256_castsi128_si256(pairs),
                                                      _mm_srli_epi16(pairs, 4), 1);
        return _mm256_and_si256(both, _mm256_set1_epi8(15));
    }

    PLR_AVX512 static inline uint32_t d_and_m(const Block & block) {
        uint32_t both;
        std::memcpy(&both, &block, sizeof(both));
        return both;
    }

    PLR_AVX512 static inline float sum(const ColumnBlock & block) { return _cvtsh_ss(block.s); }
};

struct Q8_0 {
    static constexpr ggml_type kType = GGML_TYPE_Q8_0, kColumnType = GGML_TYPE_Q8_0;
    static constexpr bool      kHasMinimum = false;
    static constexpr int       kZero       = 128;

    struct Block {
        uint16_t d;
        int8_t   q[kBlock];
    };
    using ColumnBlock = Block;

    // Without sign, because one factor of the product has none.
    PLR_AVX512 static inline __m256i bytes(const Block & block) {
        const __m256i q = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(block.q));
        return _mm256_xor_si256(q, _mm256_set1_epi8(char(kZero)));
    }

    PLR_AVX512 static inline uint32_t d_and_m(const Block & block) { return block.d; }

    PLR_AVX512 static inline float sum(const ColumnBlock &) { return 0; }
};

}  // namespace product
