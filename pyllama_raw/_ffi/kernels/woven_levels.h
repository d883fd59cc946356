// The instruction sets that multiply woven weights, and what a tile of them (woven_types.h,
// woven_tile.h) asks of each.
//
// A vector has four bytes, two 16-bit integers, one integer or one float of each of kLanes rows.
// What is the same for all sets is written with the vectors of the compiler, the rest stands here.
// Integers are exact, and all sets add floats in one order by fused operations. So all give the
// same bits.
//
// GCC takes no target from a template argument. So a tile is included once for each set, in a
// namespace of its own, and PLR_WOVEN is the target.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "ggml.h"
#include "simd.h"

namespace woven {

constexpr int kBlock = 32, kRows = 16, kGroups = 8, kPlane = 4 * kRows;
constexpr int kMostColumns = 64;  // of a call of tiles, which stay in the cache of a core
constexpr int kAhead  = 2048;  // bytes that a tile loads before it needs them
constexpr int kBehind = 15;  // columns of memory that a tile may read behind the last one

// Columns, quantised to 8 bits by blocks: value = d * q.
struct Columns {
    char *          data;
    int             n_blocks;
    const int32_t * order = nullptr;  // where each is; else they stand as they are counted

    // Of a column: d and the sum of values of each block, integer sums of its halves, and q.
    static size_t bytes(int n_blocks) {
        return (size_t(n_blocks) * (2 * sizeof(float) + 2 * sizeof(int16_t) + kBlock) + 63) /
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
};

// A block of a column: 32 numbers q from -127 to 127, and the sums of their halves.
struct Column {
    const int8_t *  q;
    const int16_t * half_sums;
};

enum class Minimum { NONE, OF_BLOCK, OF_HALVES };

template <class...>
struct Types {};

// out[c * stride + r] of some of 16 woven rows and columns first to last, kMostColumns at most.
using Tiles = void (*)(const uint8_t * rows, const Columns &, int first, int last, float * out,
                       size_t stride, int n_rows);

// Columns as bfloat16. All have values of a block beside each other, so 16 that follow one another are a
// tile of AMX, wherever they begin.
struct Bf16Columns {
    char * data;
    int    n_blocks, n_columns;

    // More than a tile reads behind the last one; and no power of two, which a cache keeps badly.
    size_t        apart() const { return size_t(n_columns + kRows) * 2 * kBlock; }
    static size_t bytes(int n_blocks, int64_t n_columns) {
        return n_blocks * Bf16Columns{nullptr, n_blocks, int(n_columns)}.apart();
    }
    char * at(int block, int column) const { return data + block * apart() + column * 2 * kBlock; }
};

// Of *n* columns from *first*: out[places[c] * stride + r] of n_rows woven rows, which begin with a group of
// 16. A group has group_bytes; places rise.
using ManyTiles = void (*)(const uint8_t * rows, size_t group_bytes, int n_rows, const Bf16Columns &,
                           int first, const int32_t * places, int n, float * out, size_t stride);

// Products with many columns, whose sums have other bits than those of Tiles.
struct Many {
    int    from;      // as many columns of a matrix
    size_t bytes;     // of columns that stay in the cache, while rows are multiplied ...
    int    n_blocks;  // ... with as many blocks of them
    void (*pack)(const Bf16Columns &, int column, const float * from);
    const ManyTiles * tiles;  // in the order of kKinds

    // How many of *n* columns to multiply at once.
    int at_once(int n, int n_blocks_of_all) const {
        const size_t n_bytes = size_t(n) * std::min(n_blocks, n_blocks_of_all) * 2 * kBlock;
        const int    n_parts = int((n_bytes + bytes - 1) / bytes), pair = 2 * kRows;
        return n == 0 ? 0 : ((n + n_parts - 1) / n_parts + pair - 1) / pair * pair;
    }
};

template <int kNumber>
struct Lanes {
    static constexpr int kLanes = kNumber;
    typedef uint8_t Group __attribute__((vector_size(4 * kNumber)));
    typedef int16_t Pairs __attribute__((vector_size(4 * kNumber)));
    typedef int32_t Ints __attribute__((vector_size(4 * kNumber)));
    typedef float   Floats __attribute__((vector_size(4 * kNumber)));
};

template <class T>
inline int32_t four_bytes(const T * from) {
    int32_t four;
    std::memcpy(&four, from, sizeof(four));
    return four;
}

// ---------------------------------------------------------------------------------------------
// Sets of instructions
//   kMaxColumns   of a tile
//   kKeepsFloats  registers hold sums of floats beside those of integers
//   kMaxSum       what a Sum holds, as a sum of pairs of products; it may be an integer of each row
//   add()         products of four numbers without sign and four of a column, added to a Sum
//   first(), second()  of two integers of each row, as scales, if a Sum is no integer
//   total()       such a Sum as integers; scaled(): times a scale of each row
//   dot()         pairs of integers of a row times two of a column
//   look_up()     numbers of a table of 16, by their places
//   integers(), halves()  from bytes without sign, from half floats
//   fma()         a * b + c, rounded once
//   quantise()    a block of numbers to the nearest of 127 steps up to their largest size, which it
//                 returns, and the sums of the halves of what it makes of them

// Any CPU. It is slow and small; others are compared with it.
struct Plain : Lanes<4> {
    static constexpr int  kMaxColumns  = 1;
    static constexpr bool kKeepsFloats = false;
    static constexpr int  kMaxSum      = INT32_MAX;
    using Sum                          = Ints;

    PLR_CALLED static Sum add(Sum sum, Group numbers, const int8_t * column) {
        for (int i = 0; i < 4 * kLanes; ++i) {
            sum[i / 4] += numbers[i] * column[i % 4];
        }
        return sum;
    }
    PLR_CALLED static Ints dot(Pairs pairs, const int16_t * two) {
        Ints sums{};
        for (int i = 0; i < 2 * kLanes; ++i) {
            sums[i / 2] += pairs[i] * two[i % 2];
        }
        return sums;
    }
    PLR_CALLED static Group look_up(const uint8_t * table, Group places) {
        for (int i = 0; i < 4 * kLanes; ++i) {
            places[i] = table[places[i]];
        }
        return places;
    }
    static Ints   integers(const uint8_t * from) { return Ints{from[0], from[1], from[2], from[3]}; }
    static Floats halves(const uint8_t * from) {
        ggml_fp16_t half[kLanes];
        std::memcpy(half, from, sizeof(half));
        return Floats{ggml_fp16_to_fp32(half[0]), ggml_fp16_to_fp32(half[1]),
                      ggml_fp16_to_fp32(half[2]), ggml_fp16_to_fp32(half[3])};
    }
    PLR_CALLED static Floats fma(Floats a, Floats b, Floats c) {
        for (int i = 0; i < kLanes; ++i) {
            c[i] = std::fma(a[i], b[i], c[i]);
        }
        return c;
    }
    static float quantise(const float * from, int8_t * q, int16_t * half_sums) {
        float tops[8] = {};
        for (int k = 0; k < kBlock; ++k) {
            const float size = std::fabs(from[k]);
            tops[k % 8]      = tops[k % 8] > size ? tops[k % 8] : size;
        }
        for (int n = 4; n > 0; n /= 2) {  // in this order, because of what is no number
            for (int i = 0; i < n; ++i) {
                tops[i] = tops[i] > tops[i + n] ? tops[i] : tops[i + n];
            }
        }
        const float top = tops[0], by = top > 0 ? 127.0f / top : 0.0f;
        half_sums[0] = half_sums[1] = 0;
        for (int k = 0; k < kBlock; ++k) {  // as the others round what is no number: to the least
            const float value = from[k] * by;
            q[k] = value > -127 && value < 129 ? int8_t(std::lrint(value)) : int8_t(-127);
            half_sums[k / 16] = int16_t(half_sums[k / 16] + q[k]);
        }
        return top;
    }
};

#ifdef PLR_AVX2
struct Avx2 : Lanes<8> {
    static constexpr int  kMaxColumns  = 4;
    static constexpr bool kKeepsFloats = false;
    static constexpr int  kMaxSum      = INT16_MAX;
    using Sum                          = Pairs;

    PLR_AVX2 static Sum add(Sum sum, Group numbers, const int8_t * column) {
        const __m256i four = _mm256_set1_epi32(four_bytes(column));
        return sum + Sum(_mm256_maddubs_epi16(__m256i(numbers), four));
    }
    // Of numbers with sign. Their sizes are multiplied with q or -q of the column: two products are
    // 2 * 128 * 127 at most, which 16 bits hold.
    PLR_AVX2 static Ints add_signed(Ints sum, Group sizes, Group numbers, const int8_t * column) {
        const __m256i four   = _mm256_set1_epi32(four_bytes(column));
        const __m256i turned = _mm256_sign_epi8(four, __m256i(numbers));
        return sum + total(Sum(_mm256_maddubs_epi16(__m256i(sizes), turned)));
    }
    PLR_AVX2 static Group sizes(Group numbers) { return Group(_mm256_abs_epi8(__m256i(numbers))); }
    PLR_AVX2 static Ints  total(Sum sum) { return scaled(sum, Pairs{} + int16_t(1)); }
    // Each twice, because a Sum has two sums of a row.
    PLR_AVX2 static Pairs first(Pairs pairs) {
        return Pairs((Ints(pairs) << 16) | (Ints(pairs) & 0xffff));
    }
    PLR_AVX2 static Pairs second(Pairs pairs) {
        return Pairs(_mm256_srli_epi32(__m256i(pairs), 16)) | Pairs(Ints(pairs) & int(0xffff0000));
    }
    PLR_AVX2 static Ints  scaled(Sum sum, Pairs by) {
        return Ints(_mm256_madd_epi16(__m256i(sum), __m256i(by)));
    }
    PLR_AVX2 static Ints dot(Pairs pairs, const int16_t * two) {
        return Ints(_mm256_madd_epi16(__m256i(pairs), _mm256_set1_epi32(four_bytes(two))));
    }
    PLR_AVX2 static Group look_up(const uint8_t * table, Group places) {
        const __m128i numbers = _mm_loadu_si128(reinterpret_cast<const __m128i *>(table));
        return Group(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(numbers), __m256i(places)));
    }
    PLR_AVX2 static Ints integers(const uint8_t * from) {
        return Ints(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(from))));
    }
    PLR_AVX2 static Floats halves(const uint8_t * from) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
    }
    PLR_AVX2 static Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
    PLR_AVX2 static float  quantise(const float * from, int8_t * to, int16_t * half_sums) {
        const __m256 sign = _mm256_set1_ps(-0.0f);
        __m256       values[4], tops = _mm256_setzero_ps();
        for (int k = 0; k < 4; ++k) {
            values[k] = _mm256_loadu_ps(from + 8 * k);
            tops      = _mm256_max_ps(tops, _mm256_andnot_ps(sign, values[k]));
        }
        __m128 four = _mm_max_ps(_mm256_castps256_ps128(tops), _mm256_extractf128_ps(tops, 1));
        four = _mm_max_ps(four, _mm_movehl_ps(four, four));
        const float  top = _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
        const __m256 by  = _mm256_set1_ps(top > 0 ? 127.0f / top : 0.0f);
        __m256i      q[4];
        for (int k = 0; k < 4; ++k) {
            q[k] = _mm256_cvtps_epi32(_mm256_mul_ps(values[k], by));
        }
        __m256i bytes = _mm256_permutevar8x32_epi32(
            _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3])),
            _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        bytes = _mm256_max_epi8(bytes, _mm256_set1_epi8(-127));
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), bytes);
        // Without sign, 128 more each, instructions add eight of them.
        const __m256i eights = _mm256_sad_epu8(_mm256_xor_si256(bytes, _mm256_set1_epi8(-128)),
                                               _mm256_setzero_si256());
        const __m256i halves = _mm256_add_epi32(eights, _mm256_shuffle_epi32(eights, 0x4e));
        half_sums[0] = int16_t(_mm_cvtsi128_si32(_mm256_castsi256_si128(halves)) - 16 * 128);
        half_sums[1] = int16_t(_mm_cvtsi128_si32(_mm256_extracti128_si256(halves, 1)) - 16 * 128);
        return top;
    }
};

#ifdef PLR_AVXVNNI
// One instruction adds four products of a row in 32 bits.
struct AvxVnni : Avx2 {
    static constexpr int kMaxSum = INT32_MAX;
    using Sum                    = Ints;

    PLR_AVXVNNI static Sum add(Sum sum, Group numbers, const int8_t * column) {
        const __m256i four = _mm256_set1_epi32(four_bytes(column));
        return Sum(_mm256_dpbusd_avx_epi32(__m256i(sum), __m256i(numbers), four));
    }
};

#endif

struct Avx512Vnni : Lanes<16> {
    static constexpr int  kMaxColumns  = 8;
    static constexpr bool kKeepsFloats = true;
    static constexpr int  kMaxSum      = INT32_MAX;
    using Sum                          = Ints;

    PLR_AVX512 static Sum add(Sum sum, Group numbers, const int8_t * column) {
        const __m512i four = _mm512_set1_epi32(four_bytes(column));
        return Sum(_mm512_dpbusd_epi32(__m512i(sum), __m512i(numbers), four));
    }
    PLR_AVX512 static Ints dot(Pairs pairs, const int16_t * two) {
        return Ints(_mm512_madd_epi16(__m512i(pairs), _mm512_set1_epi32(four_bytes(two))));
    }
    PLR_AVX512 static Group look_up(const uint8_t * table, Group places) {
        const __m128i numbers = _mm_loadu_si128(reinterpret_cast<const __m128i *>(table));
        return Group(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(numbers), __m512i(places)));
    }
    PLR_AVX512 static Ints integers(const uint8_t * from) {
        return Ints(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from))));
    }
    PLR_AVX512 static Floats halves(const uint8_t * from) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
    }
    PLR_AVX512 static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
    PLR_AVX512 static float  quantise(const float * from, int8_t * to, int16_t * half_sums) {
        return Avx2::quantise(from, to, half_sums);
    }
};
#endif

// ---------------------------------------------------------------------------------------------

#define PLR_WOVEN
namespace plain {
using Set = Plain;
#include "woven_types.h"

#include "woven_tile.h"
}  // namespace plain
#undef PLR_WOVEN

#ifdef PLR_AVX2
#define PLR_WOVEN PLR_AVX2
namespace avx2 {
using Set = Avx2;
#include "woven_types.h"

#include "woven_tile.h"
}  // namespace avx2
#undef PLR_WOVEN

#ifdef PLR_AVXVNNI
#define PLR_WOVEN PLR_AVXVNNI
namespace avxvnni {
using Set = AvxVnni;
#include "woven_types.h"

#include "woven_tile.h"
}  // namespace avxvnni
#undef PLR_WOVEN
#endif

#define PLR_WOVEN PLR_AVX512
namespace avx512vnni {
using Set = Avx512Vnni;
#include "woven_types.h"

#include "woven_tile.h"
#ifdef PLR_AMX
#include "woven_amx.h"
#endif
}  // namespace avx512vnni
#undef PLR_WOVEN
#endif

// A type of weights. All sets read the same woven bytes.
struct Kind {
    ggml_type type;
    int       n_blocks;  // of 32 weights, that are woven together
    int       n_bytes;   // of these, of 16 rows
    void (*weave)(const char * const *, uint8_t *);
    void (*unpack)(const uint8_t * rows, int row, int n_blocks, float * to);  // perhaps nullptr
};

template <class... W>
constexpr std::array<Kind, sizeof...(W)> kinds_of(Types<W...>) {
    return {{{W::kType, W::kBlocks, W::kBytes, W::weave,
              W::kMinimum == Minimum::NONE ? plain::unpack<W> : nullptr}...}};
}

constexpr auto kKinds = kinds_of(plain::All());

// A set of instructions with its tiles, which are in the order of kKinds.
struct Level {
    const char * name;
    const char * needs;  // of the CPU
    bool (*is_usable)();
    void (*pack)(const Columns &, int column, int first, int last, const float * from);
    const Tiles * tiles;
    const Many *  many = nullptr;
};

#ifdef PLR_AMX
constexpr Many kAmx{20, avx512vnni::kAmxBytes, avx512vnni::kAmxBlocks, avx512vnni::amx_pack,
                    avx512vnni::kAmxTiles.data()};
#endif

constexpr Level kLevels[] = {
    {"plain", "no more than C++", [] { return true; }, plain::pack, plain::kTiles.data()},
#ifdef PLR_AVX2
    {"avx2", "AVX2, FMA and F16C", has_avx2, avx2::pack, avx2::kTiles.data()},
#ifdef PLR_AVXVNNI
    {"avxvnni", "AVX2, FMA, F16C and AVX-VNNI", has_avxvnni, avxvnni::pack, avxvnni::kTiles.data()},
#endif
    {"avx512vnni", "AVX-512 with VNNI", has_avx512, avx512vnni::pack, avx512vnni::kTiles.data()},
#ifdef PLR_AMX
    {"amx", "AVX-512 with VNNI and BF16, and AMX of BF16", has_amx, avx512vnni::pack, avx512vnni::kTiles.data(),
     &kAmx},
#endif
#endif
};

// The last one that this CPU has. Plain C++ is slower than libllama.
inline const Level * best_level() {
    const Level * best = nullptr;
    for (const Level & one : kLevels) {
        best = &one != kLevels && one.is_usable() ? &one : best;
    }
    return best;
}

// The one that contexts take that are made now; nullptr: none.
inline std::atomic<const Level *> & level() {
    static std::atomic<const Level *> value{best_level()};
    return value;
}

// Choose one by its name, or "auto". False: there is none here.
inline bool choose_level(const char * name) {
    if (std::strcmp(name, "auto") == 0) {
        level() = best_level();
        return true;
    }
    for (const Level & one : kLevels) {
        if (std::strcmp(name, one.name) == 0 && one.is_usable()) {
            level() = &one;
            return true;
        }
    }
    return false;
}

}  // namespace woven
