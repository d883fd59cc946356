// Instructions of AVX-VNNI and AVX-512 on a CPU with AVX2: those that woven_levels.h uses, by
// SIMDe (package libsimde-dev) where it has them.
#pragma once

#include <simde/x86/avx512.h>
#include <simde/x86/avx512/dpbusd.h>

#include "kernels/simd.h"

#undef PLR_AVX512
#undef PLR_AVXVNNI
#define PLR_AVX512 PLR_AVX2
#define PLR_AVXVNNI PLR_AVX2
#define has_avx512 has_avx2
#define has_avxvnni has_avx2

// A register of 512 bits cannot be named.
#define asm(...)

namespace emulated {

template <class To, class From>
inline To as(const From & from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    __builtin_memcpy(&to, &from, sizeof(to));
    return to;
}

struct Ints {
    __m256i low, high;
};

struct Floats {
    __m256 low, high;
};

}  // namespace emulated

#define PLR_BY_SIMDE(To, name, ...) emulated::as<To>(simde_mm512_##name(__VA_ARGS__))
#define PLR_512(value) emulated::as<simde__m512i>(value)

#define _mm256_dpbusd_avx_epi32(sum, a, b) \
    emulated::as<__m256i>(simde_mm256_dpbusd_epi32(emulated::as<simde__m256i>(sum), \
                                                   emulated::as<simde__m256i>(a),   \
                                                   emulated::as<simde__m256i>(b)))
#define _mm512_dpbusd_epi32(sum, a, b) PLR_BY_SIMDE(__m512i, dpbusd_epi32, PLR_512(sum), PLR_512(a), PLR_512(b))
#define _mm512_madd_epi16(a, b) PLR_BY_SIMDE(__m512i, madd_epi16, PLR_512(a), PLR_512(b))
#define _mm512_shuffle_epi8(a, b) PLR_BY_SIMDE(__m512i, shuffle_epi8, PLR_512(a), PLR_512(b))
#define _mm512_broadcast_i32x4(a) PLR_BY_SIMDE(__m512i, broadcast_i32x4, emulated::as<simde__m128i>(a))
#define _mm512_set1_epi32(a) PLR_BY_SIMDE(__m512i, set1_epi32, a)
#define _mm512_fmadd_ps(a, b, c) \
    PLR_BY_SIMDE(__m512, fmadd_ps, emulated::as<simde__m512>(a), emulated::as<simde__m512>(b), \
                 emulated::as<simde__m512>(c))

// SIMDe lacks these.
#define _mm512_cvtepu8_epi32(a)                                                      \
    emulated::as<__m512i>(emulated::Ints{_mm256_cvtepu8_epi32(a),                    \
                                         _mm256_cvtepu8_epi32(_mm_srli_si128(a, 8))})
#define _mm512_cvtph_ps(a)                                                           \
    emulated::as<__m512>(emulated::Floats{                                      \
        _mm256_cvtph_ps(_mm256_castsi256_si128(a)),                                  \
        _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1))})
