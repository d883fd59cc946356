// What this CPU can do at most: products of bytes from registers, and reading of memory.
//
// Built for the machine that runs it, or for some of its instructions. Arguments: threads. Output: one line of JSON; without a
// vector instruction that multiplies bytes int8_gops is 0.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__AMX_INT8__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int    kTries      = 5;         // the best one counts: others may use the machine
constexpr int    kSums       = 10;  // independent, so that no product waits for another
constexpr long   kLoops      = 20000000;
constexpr size_t kReadBytes  = 256u << 20;  // of a thread, beyond any cache
constexpr int    kReadPasses = 8;

// Products of bytes, of which each is a multiplication and an addition; returns their number.
#if defined(__AMX_INT8__) && defined(__linux__)
constexpr const char * kInstructions = "AMX";

double products() {
    struct alignas(64) {
        uint8_t  palette = 1, start = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64};
        uint8_t  rows[16]      = {16, 16, 16, 16, 16, 16};
    } layout;
    syscall(SYS_arch_prctl, 0x1023, 18);  // ARCH_REQ_XCOMP_PERM, tiles
    asm volatile("ldtilecfg %0" ::"m"(layout));
    asm volatile("tilezero %%tmm0\n tilezero %%tmm1\n tilezero %%tmm2\n tilezero %%tmm3\n"
                 "tilezero %%tmm4\n tilezero %%tmm5" ::: "memory");
    const long n_loops = kLoops / 20;
    for (long i = 0; i < n_loops; ++i) {
        asm volatile("tdpbusd %%tmm5, %%tmm4, %%tmm0\n tdpbusd %%tmm5, %%tmm4, %%tmm1\n"
                     "tdpbusd %%tmm5, %%tmm4, %%tmm2\n tdpbusd %%tmm5, %%tmm4, %%tmm3" ::: "memory");
    }
    asm volatile("tilerelease");
    return n_loops * 4.0 * 16 * 16 * 64;
}
#else
#if defined(__AVX512VNNI__)
constexpr const char * kInstructions = "AVX-512 VNNI";
using Vector                         = __m512i;

Vector next(Vector sum, Vector a, Vector b) { return _mm512_dpbusd_epi32(sum, a, b); }
#elif defined(__AVXVNNI__)
constexpr const char * kInstructions = "AVX-VNNI";
using Vector                         = __m256i;

Vector next(Vector sum, Vector a, Vector b) { return _mm256_dpbusd_avx_epi32(sum, a, b); }
#elif defined(__AVX2__)
constexpr const char * kInstructions = "AVX2";
using Vector                         = __m256i;

// Sums of 16 bits overflow sooner or later, but nothing computes faster.
Vector next(Vector sum, Vector a, Vector b) {
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16(a, b));
}
#else
#define HAS_NO_VECTORS
constexpr const char * kInstructions = "";
#endif

#ifdef HAS_NO_VECTORS
double products() { return 0; }
#else
double products() {
    Vector sums[kSums] = {}, a = {}, b = {};
    asm volatile("" : "+x"(b));
    for (auto & sum : sums) {
        asm volatile("" : "+x"(sum));  // else one sum would do for all
    }
    for (long i = 0; i < kLoops; ++i) {
#pragma GCC unroll 16
        for (auto & sum : sums) {
            asm volatile("" : "+x"(a));  // else one product would do for all
            sum = next(sum, a, b);
        }
    }
    for (auto & sum : sums) {
        asm volatile("" ::"x"(sum));
    }
    return double(kLoops) * kSums * sizeof(Vector);
}
#endif
#endif

// Sum numbers in order, in lanes of their own, as fast as they come; returns bytes.
double reads(const uint64_t * from) {
    constexpr int kLanes       = 32;
    uint64_t      sums[kLanes] = {};
    for (int pass = 0; pass < kReadPasses; ++pass) {
        for (size_t i = 0; i < kReadBytes / sizeof(uint64_t); i += kLanes) {
            for (int lane = 0; lane < kLanes; ++lane) {
                sums[lane] += from[i + lane];
            }
        }
        asm volatile("" ::"r"(sums) : "memory");
    }
    return double(kReadPasses) * kReadBytes;
}

// CPU time of this thread, which other programs do not lengthen.
double seconds() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

// Work a second of all threads, which begin together.
template <class Work>
double rate(int n_threads, Work work) {
    double best = 0;
    for (int i = 0; i < kTries; ++i) {
        std::atomic<int>         n_ready{0};
        std::vector<double>      done(n_threads);
        std::vector<std::thread> threads;
        for (int t = 0; t < n_threads; ++t) {
            threads.emplace_back([&, t] {
                ++n_ready;
                while (n_ready <= n_threads) {
                    std::this_thread::yield();
                }
                const double started = seconds();
                done[t]              = work(t) / (seconds() - started);
            });
        }
        while (n_ready < n_threads) {
            std::this_thread::yield();
        }
        ++n_ready;
        double sum = 0;
        for (int t = 0; t < n_threads; ++t) {
            threads[t].join();
            sum += done[t];
        }
        best = std::max(best, sum);
    }
    return best;
}

}  // namespace

int main(int argc, char ** argv) {
    const int                          n_threads = argc > 1 ? std::max(std::atoi(argv[1]), 1) : 1;
    std::vector<std::vector<uint64_t>> memory(n_threads);
    for (auto & part : memory) {
        part.assign(kReadBytes / sizeof(uint64_t), 1);
    }
    const double int8 = 2 * rate(n_threads, [](int) { return products(); });
    const double read = rate(n_threads, [&](int t) { return reads(memory[t].data()); });
    std::printf("{\"instructions\": \"%s\", \"int8_gops\": %.1f, \"read_gb_per_s\": %.2f}\n",
                kInstructions, int8 / 1e9, read / 1e9);
}
