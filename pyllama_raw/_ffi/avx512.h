// Functions that may use AVX-512, in a library that has to run without it.
#pragma once

#include <immintrin.h>

#define PLR_AVX512 \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")))

// To be called by others. GCC 12 drops calls of such functions: it takes what they store
// through vectors for unused.
#ifdef __clang__
#define PLR_KERNEL PLR_AVX512
#else
#define PLR_KERNEL PLR_AVX512 __attribute__((noipa))
#endif

inline bool has_avx512() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
