// Marks functions that use AVX-512, or AVX2 with FMA and F16C, in a library that also runs on
// CPUs without.
//
// Other CPUs have none of these, so there only plain C++ is left.
#pragma once

// For functions that unmarked functions call: GCC 12 drops such calls, because it believes that
// nobody uses what is stored through vectors.
#ifdef __clang__
#define PLR_CALLED
#else
#define PLR_CALLED __attribute__((noipa))
#endif

#ifdef __x86_64__

#include <cpuid.h>
#include <immintrin.h>

#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define PLR_AVX512 \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")))
#define PLR_AVX2 __attribute__((target("avx2,fma,f16c")))
#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11  // older compilers do not know them
#define PLR_AVXVNNI __attribute__((target("avx2,fma,f16c,avxvnni")))
#define PLR_AMX                                                                              \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,"          \
                          "avx512bf16,amx-tile,amx-bf16")))
#endif

// A part of its caller, which the compiler may believe too large.
#define PLR_WHOLE __attribute__((always_inline)) inline

// What kernels may use where the CPU has it: less than all if somebody chose a variant of libllama
// that has less (plr_cpu_only).
struct CpuMay {
    bool avx2 = true, avxvnni = true, avx512vnni = true, amx = true;
};
inline CpuMay cpu_may;

// False, too, in a build for a lesser CPU (_ffi/cpu_level.py): then libllama has no more either.
inline bool has_avx2() {
#ifdef PLR_WITHOUT_AVX2
    return false;
#endif
    __builtin_cpu_init();
    return cpu_may.avx2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
}

inline bool has_avx512() {
#ifdef PLR_WITHOUT_AVX512
    return false;
#endif
    return has_avx2() && cpu_may.avx512vnni && __builtin_cpu_supports("avx512vnni") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
}

// Tiles of AMX. Linux gives a process their registers when it asks, once for all threads, and may
// refuse.
inline bool has_amx() {
#if defined(PLR_WITHOUT_AMX) || !defined(PLR_AMX) || !defined(__linux__)
    return false;
#else
    constexpr int kRequest = 0x1023, kTiles = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    unsigned a, b, c, d;
    static const bool is_there = __builtin_cpu_supports("avx512bf16") &&
                                 __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 &&
                                 (d >> 24 & 1) != 0 && (d >> 22 & 1) != 0 &&  // tiles, and of bfloat16
                                 syscall(SYS_arch_prctl, kRequest, kTiles) == 0;
    return cpu_may.amx && has_avx512() && is_there;
#endif
}

// VNNI in vectors of 256 bits, which CPUs without AVX-512 have, too.
inline bool has_avxvnni() {
#if defined(PLR_WITHOUT_AVX512) || !defined(PLR_AVXVNNI)
    return false;
#else
    return has_avx2() && cpu_may.avxvnni && __builtin_cpu_supports("avxvnni");
#endif
}

#endif
