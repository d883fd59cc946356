// Types of woven weights: how their blocks are woven, unpacked and multiplied.
//
// Rows are lanes: four bytes of each of 16 rows stand beside each other, so one broadcast of four
// bytes of a column feeds 16 rows, and no sum runs across lanes. Weights are woven once, nearly in
// the size that they have in the file. A block of 32 weights of 16 rows is
//
//   planes   64 bytes each, four of each row: a byte has n bits of 8 / n groups of four weights
//   scales   as the type has them, row by row
//
// Numbers of a block are unpacked without sign. What their zero adds is taken away in integers, by
// the sum of the column, so nothing is rounded before a block is complete.
//
// woven_levels.h includes this file once for each set of instructions, *Set*, whose vectors have
// one of kParts parts of the rows.

using Group  = Set::Group;
using Pairs  = Set::Pairs;
using Ints   = Set::Ints;
using Floats = Set::Floats;
using Sum    = Set::Sum;

constexpr int kLanes = Set::kLanes, kParts = kRows / kLanes, kMaxColumns = Set::kMaxColumns;

// What a tile needs of a block of one part of the rows: weight = d * q + m. A type with a minimum
// of each 16 weights has both of a row as 16-bit integers; weight = d * q + m * minimum.
struct Scales {
    Floats d;
    Floats m{};
    Pairs  minima{};
};

PLR_WOVEN inline Group load(const uint8_t * plane, int part) {
    Group numbers;
    std::memcpy(&numbers, plane + 4 * kLanes * part, sizeof(numbers));
    return numbers;
}

using Signed = int8_t __attribute__((vector_size(2 * kLanes)));

// Two bytes with sign of each row.
PLR_WOVEN inline Pairs pairs_of(const uint8_t * from) {
    Signed bytes;
    std::memcpy(&bytes, from, sizeof(bytes));
    return __builtin_convertvector(bytes, Pairs);
}

PLR_WOVEN inline Floats floats(Ints values) { return __builtin_convertvector(values, Floats); }

// What else a set does with its sums is plain where a sum is an integer.
struct WholeSums {
    PLR_WOVEN static inline Ints total(Ints sum) { return sum; }
    PLR_WOVEN static inline Ints first(Pairs pairs) { return Ints(pairs) << 16 >> 16; }
    PLR_WOVEN static inline Ints second(Pairs pairs) { return Ints(pairs) >> 16; }
    PLR_WOVEN static inline Ints scaled(Ints sum, Ints by) { return sum * by; }
};

using Sums = std::conditional_t<std::is_same_v<Sum, Ints>, WholeSums, Set>;

// ---------------------------------------------------------------------------------------------
// Unpackers: four numbers of each row of one part of the rows, of one group.
//   kMost    the largest number
//   kBytes   of a block
//   kIsDear  unpacking takes longer than a product, so many columns share what is unpacked
//   group()  of the block
//   put()    the numbers of row *r* in their places

// Numbers of kLow + kHigh bits, in planes of the lower ones, then of the upper ones. With n bits
// of a group in a byte, group g is in plane g % n.
template <int kLow, int kHigh>
struct Bits {
    static constexpr int  kMost    = (1 << (kLow + kHigh)) - 1;
    static constexpr int  kLowSize = kLow * kPlane;
    static constexpr int  kBytes   = kLowSize + kHigh * kPlane;
    static constexpr bool kIsDear  = kHigh > 0;

    PLR_WOVEN static inline Group group(const uint8_t * block, int g, int part) {
        const Group low = bits<kLow, 0>(block, g, part);
        if constexpr (kHigh == 0) {
            return low;
        } else {
            return low | bits<kHigh, kLow>(block + kLowSize, g, part);
        }
    }

    static void put(uint8_t * block, int r, const uint8_t (&q)[kBlock]) {
        put_bits<kLow>(block, r, q, 0);
        if constexpr (kHigh > 0) {
            put_bits<kHigh>(block + kLowSize, r, q, kLow);
        }
    }

    // Numbers k and k + 16 are in one byte of *pairs*, as in files.
    static void put_pairs(uint8_t * block, int r, const uint8_t * pairs) {
        static_assert(kLow == 4 && kHigh == 0, "a byte has two groups");
        for (int j = 0; j < kGroups / 2; ++j) {
            std::memcpy(block + kPlane * j + 4 * r, pairs + 4 * j, 4);
        }
    }

  private:
    // n bits of group *g*, moved to bit kTo. A shift moves bits between two bytes; they are masked.
    template <int n, int kTo>
    PLR_WOVEN static inline Group bits(const uint8_t * planes, int g, int part) {
        const auto plane = Pairs(load(planes + kPlane * (g % n), part));
        const int  bit   = n * (g / n);
        const auto moved = Group(bit < kTo ? plane << (kTo - bit) : plane >> (bit - kTo));
        return moved & uint8_t(((1 << n) - 1) << kTo);
    }

    template <int n>
    static void put_bits(uint8_t * planes, int r, const uint8_t (&q)[kBlock], int from) {
        uint8_t all[n][4] = {};
        for (int k = 0; k < kBlock; ++k) {
            const int g = k / 4;
            all[g % n][k % 4] |= uint8_t((q[k] >> from & ((1 << n) - 1)) << (n * (g / n)));
        }
        for (int plane = 0; plane < n; ++plane) {
            std::memcpy(planes + kPlane * plane + 4 * r, all[plane], 4);
        }
    }
};

using Nibbles = Bits<4, 0>;

struct Bytes {
    static constexpr int  kMost = 255, kBytes = kGroups * kPlane;
    static constexpr bool kIsDear = false;

    PLR_WOVEN static inline Group group(const uint8_t * block, int g, int part) {
        return load(block + kPlane * g, part);
    }

    static void put(uint8_t * block, int r, const uint8_t (&q)[kBlock]) {
        for (int g = 0; g < kGroups; ++g) {
            std::memcpy(block + kPlane * g + 4 * r, q + 4 * g, 4);
        }
    }
};

// Nibbles that are places in a table.
template <class Table>
struct Places {
    static constexpr int  kMost = Table::kMost, kBytes = Nibbles::kBytes;
    static constexpr bool kIsDear = true;

    PLR_WOVEN static inline Group group(const uint8_t * block, int g, int part) {
        return Set::look_up(Table::kNumbers, Nibbles::group(block, g, part));
    }
};

// Each has its zero added.
struct E2M1 {  // floats of four bits, doubled
    static constexpr int     kZero = 12, kMost = 24;
    static constexpr uint8_t kNumbers[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                             12, 11, 10, 9,  8,  6,  4,  0};
};

struct Nonlinear {
    static constexpr int     kZero = 127, kMost = 240;
    static constexpr uint8_t kNumbers[16] = {0,   23,  44,  62,  78,  92,  105, 117,
                                             128, 140, 152, 165, 180, 196, 216, 240};
};

// ---------------------------------------------------------------------------------------------

// Adds in this order. The compiler would otherwise have all products at once, and put them into
// memory.
template <class T>
PLR_WOVEN inline void keep(T & sum) {
#ifdef __x86_64__
    asm("" : "+v"(sum));
#endif
}

PLR_WOVEN inline void add_products(Sum & sum, Group numbers, const int8_t * column, bool is_first) {
    sum = Set::add(is_first ? Sum{} : sum, numbers, column);
    keep(sum);
}

PLR_WOVEN inline void add(Ints & sum, Ints others, bool is_first) {
    sum = is_first ? others : sum + others;
    keep(sum);
}

// Of how many groups a Sum holds the products: a pair of them is 2 * 127 * *most* at most.
constexpr int groups_at_once(int most) {
    const int n = Set::kMaxSum / (2 * 127 * most);
    return n >= 8 ? 8 : n >= 4 ? 4 : n >= 2 ? 2 : 0;
}

// Whether a Sum holds not even a pair of products.
template <class Unpacker>
constexpr bool is_signed = groups_at_once(Unpacker::kMost) == 0;

// Sums of products of each row with C columns, of a block with one scale. They begin with what
// the zero adds to them, negative.
template <class Unpacker, int kZero, int C>
PLR_WOVEN inline void multiply_whole(const uint8_t * block, const Column * columns,
                                     Ints (*sums)[kParts]) {
    constexpr int kOnce = groups_at_once(Unpacker::kMost);
    if constexpr (kZero != 0) {
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
#pragma GCC unroll 4
            for (int part = 0; part < kParts; ++part) {
                sums[c][part] = Set::dot(Pairs{} - int16_t(kZero), columns[c].half_sums);
            }
        }
    }
#pragma GCC unroll 2
    for (int from = 0; from < kGroups; from += kOnce) {
        Sum once[C][kParts];
#pragma GCC unroll 8
        for (int i = 0; i < kOnce; ++i) {
            // A low group, then the high one of the same bytes, if both are in one sum.
            const int g = kOnce == 8 ? i / 2 + 4 * (i % 2) : from + i;
            Group     numbers[kParts];
#pragma GCC unroll 4
            for (int part = 0; part < kParts; ++part) {
                numbers[part] = Unpacker::group(block, g, part);
            }
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) {
#pragma GCC unroll 4
                for (int part = 0; part < kParts; ++part) {
                    add_products(once[c][part], numbers[part], columns[c].q + 4 * g, i == 0);
                }
            }
        }
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
#pragma GCC unroll 4
            for (int part = 0; part < kParts; ++part) {
                add(sums[c][part], Sums::total(once[c][part]), kZero == 0 && from == 0);
            }
        }
    }
}

// The same for numbers of eight bits where a Sum has 16. It does not hold a pair of products, which
// is up to 2 * 255 * 127. So the zero is taken away from the numbers, and each pair is added alone.
// Unpacked blocks have no zero any more, and sizes of numbers behind them.
template <class Unpacker, int kZero, int C, class AnySet = Set>
PLR_WOVEN inline void multiply_signed(const uint8_t * block, const Column * columns,
                                      Ints (*sums)[kParts]) {
#pragma GCC unroll 8
    for (int g = 0; g < kGroups; ++g) {
        Group numbers[kParts], sizes[kParts];
#pragma GCC unroll 4
        for (int part = 0; part < kParts; ++part) {
            numbers[part] = Unpacker::group(block, g, part) - uint8_t(kZero);
            sizes[part]   = kZero == 0 ? load(block + kPlane * (kGroups + g), part) : AnySet::sizes(numbers[part]);
        }
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
#pragma GCC unroll 4
            for (int part = 0; part < kParts; ++part) {
                const Ints sum = g == 0 ? Ints{} : sums[c][part];
                sums[c][part]  = AnySet::add_signed(sum, sizes[part], numbers[part], columns[c].q + 4 * g);
                keep(sums[c][part]);
            }
        }
    }
}

template <class Unpacker, int kZero, int C>
PLR_WOVEN inline void multiply(const uint8_t * block, const Column * columns, Ints (*sums)[kParts]) {
    if constexpr (is_signed<Unpacker>) {
        multiply_signed<Unpacker, kZero, C>(block, columns, sums);
    } else {
        multiply_whole<Unpacker, kZero, C>(block, columns, sums);
    }
}

// The same for a block with a scale of each half, *pairs* of 16-bit integers of a row.
template <class Unpacker, int kZero, int C>
PLR_WOVEN inline void multiply_halves(const uint8_t * block, const Pairs (&pairs)[kParts],
                                      const Column * columns, Ints (*sums)[kParts]) {
    constexpr int kMany = groups_at_once(Unpacker::kMost), kOnce = kMany < 4 ? kMany : 4;
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
        asm volatile("" ::: "memory");
        const auto first = Sums::first(pairs[part]), second = Sums::second(pairs[part]);
        if constexpr (kZero != 0) {
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) {
                sums[c][part] = Set::dot(pairs[part] * int16_t(-kZero), columns[c].half_sums);
            }
        }
#pragma GCC unroll 4
        for (int from = 0; from < kGroups; from += kOnce) {
            Sum once[C];
#pragma GCC unroll 4
            for (int i = 0; i < kOnce; ++i) {
                const Group numbers = Unpacker::group(block, from + i, part);
#pragma GCC unroll 8
                for (int c = 0; c < C; ++c) {
                    add_products(once[c], numbers, columns[c].q + 4 * (from + i), i == 0);
                }
            }
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) {
                add(sums[c][part], Sums::scaled(once[c], from < kGroups / 2 ? first : second),
                    kZero == 0 && from == 0);
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------
// Types. Each says how its blocks are woven, and what a tile multiplies and adds.
//   kBlocks   blocks of 32 that share what the type has once, 8 of the types with 256 weights
//   kBytes    woven bytes of these, of 16 rows
//   kMinimum  what a tile adds besides
//   weave()   *rows* are the same blocks of 16 rows
//   kOne      bytes from a block to the next of these
//   Numbers   their unpacker, whose numbers have kZero added; kIsHalved: each half has a scale
//   scales()  of block *i* of these, for a part of the rows; half_scales() if each half has one

// Of each 32 weights a scale, perhaps a minimum, perhaps four bytes with the fifth bits, then
// pairs of nibbles, or bytes.
template <ggml_type kGgmlType, class Unpacker, int kZeroOf, bool kHasMinimum = false, int kScale = 2>
struct Plain {
    using Numbers                       = Unpacker;
    static constexpr int       kZero    = kZeroOf;
    static constexpr bool      kIsHalved = false;
    static constexpr ggml_type kType    = kGgmlType;
    static constexpr Minimum   kMinimum = kHasMinimum ? Minimum::OF_BLOCK : Minimum::NONE;
    static constexpr bool      kHasBits = Unpacker::kMost == 31, kIsByte = Unpacker::kMost == 255;
    static constexpr int       kBlocks  = 1;
    static constexpr int       kScales  = Unpacker::kBytes;
    static constexpr int       kBytes   = kScales + (kHasMinimum ? 2 : 1) * kScale * kRows;
    static constexpr int       kOne     = kBytes;
    static constexpr int       kBits    = (kHasMinimum ? 2 : 1) * kScale, kQ = kBits + 4 * kHasBits;

    static void weave(const char * const * rows, uint8_t * to) {
        for (int r = 0; r < kRows; ++r) {
            const auto * from = reinterpret_cast<const uint8_t *>(rows[r]);
            uint8_t      q[kBlock];
            if constexpr (kIsByte) {
                for (int k = 0; k < kBlock; ++k) {
                    q[k] = uint8_t(from[kQ + k] + kZero);  // bytes of the file have a sign
                }
                Unpacker::put(to, r, q);
            } else if constexpr (kHasBits) {
                uint32_t bits;
                std::memcpy(&bits, from + kBits, sizeof(bits));
                for (int k = 0; k < 16; ++k) {
                    q[k]      = uint8_t((from[kQ + k] & 15) | (bits >> k & 1) << 4);
                    q[k + 16] = uint8_t(from[kQ + k] >> 4 | (bits >> (k + 16) & 1) << 4);
                }
                Unpacker::put(to, r, q);
            } else {
                Nibbles::put_pairs(to, r, from + kQ);
            }
            std::memcpy(to + kScales + kScale * r, from, kScale);
            if constexpr (kHasMinimum) {
                std::memcpy(to + kScales + kScale * (kRows + r), from + kScale, kScale);
            }
        }
    }

    PLR_WOVEN static inline Scales scales(const uint8_t * from, int, int part) {
        const uint8_t * d = from + kScales + kScale * kLanes * part;
        if constexpr (kHasMinimum) {
            return {Set::halves(d), Set::halves(d + kScale * kRows)};
        } else if constexpr (kScale == 1) {
            return {half_powers(Set::integers(d))};
        } else {
            return {Set::halves(d)};
        }
    }

  private:
    // 2 ** (byte - 128), half of the scale because numbers are doubled. The two smallest have no
    // exponent that a float can have.
    PLR_WOVEN static inline Floats half_powers(Ints e) {
        const Ints small = (Ints{} + (1 << 21)) << (e < 2 ? e : Ints{} + 2), normal = (e - 1) << 23;
        return Floats(e < 2 ? small : normal);
    }
};

using Q4_0   = Plain<GGML_TYPE_Q4_0, Nibbles, 8>;
using Q4_1   = Plain<GGML_TYPE_Q4_1, Nibbles, 0, true>;
using Q5_0   = Plain<GGML_TYPE_Q5_0, Bits<4, 1>, 16>;
using Q5_1   = Plain<GGML_TYPE_Q5_1, Bits<4, 1>, 0, true>;
using Q8_0   = Plain<GGML_TYPE_Q8_0, Bytes, 128>;
using IQ4_NL = Plain<GGML_TYPE_IQ4_NL, Places<Nonlinear>, Nonlinear::kZero>;
using MXFP4  = Plain<GGML_TYPE_MXFP4, Places<E2M1>, E2M1::kZero, false, 1>;

template <ggml_type kGgmlType, class Unpacker>
struct Super {  // Q4_K, Q5_K: d and dmin of 256 weights, 6-bit scales and minima of each 32
    using Numbers                       = Unpacker;
    static constexpr int       kZero    = 0;
    static constexpr bool      kIsHalved = false;
    static constexpr ggml_type kType    = kGgmlType;
    static constexpr Minimum   kMinimum = Minimum::OF_BLOCK;
    static constexpr bool      kHasBits = Unpacker::kMost == 31;
    static constexpr int       kBlocks  = 8;
    static constexpr int       kOne     = Unpacker::kBytes + 2 * kRows;  // of a block
    static constexpr int       kBytes   = kBlocks * kOne + 4 * kRows;
    static constexpr int       kQ       = 4 + 12 + (kHasBits ? 32 : 0);

    static void weave(const char * const * rows, uint8_t * to) {
        for (int r = 0; r < kRows; ++r) {
            const auto * from = reinterpret_cast<const uint8_t *>(rows[r]);
            for (int i = 0; i < kBlocks; ++i) {
                uint8_t * block = to + i * kOne;
                uint8_t   q[kBlock];
                for (int k = 0; k < kBlock; ++k) {
                    const uint8_t both = from[kQ + 32 * (i / 2) + k];
                    const int     low  = i % 2 == 0 ? both & 15 : both >> 4;
                    const int     bit  = kHasBits ? from[16 + k] >> i & 1 : 0;
                    q[k]               = uint8_t(low | bit << 4);
                }
                Unpacker::put(block, r, q);
                // Six bits each; those of blocks 4 to 7 have their upper two in the first eight bytes.
                const uint8_t * s      = from + 4;
                uint8_t *       scales = block + Unpacker::kBytes;
                scales[r]         = i < 4 ? s[i] & 63 : uint8_t((s[i + 4] & 15) | (s[i - 4] >> 6) << 4);
                scales[kRows + r] = i < 4 ? s[i + 4] & 63 : uint8_t((s[i + 4] >> 4) | (s[i] >> 6) << 4);
            }
            std::memcpy(to + kBlocks * kOne + 2 * r, from, 2);
            std::memcpy(to + kBlocks * kOne + 2 * (kRows + r), from + 2, 2);
        }
    }

    PLR_WOVEN static inline Scales scales(const uint8_t * from, int i, int part) {
        const uint8_t * of_block = from + i * kOne + Unpacker::kBytes + kLanes * part;
        const uint8_t * of_all   = from + kBlocks * kOne + 2 * kLanes * part;
        return {Set::halves(of_all) * floats(Set::integers(of_block)),
                -Set::halves(of_all + 2 * kRows) * floats(Set::integers(of_block + kRows))};
    }
};

using Q4_K = Super<GGML_TYPE_Q4_K, Nibbles>;
using Q5_K = Super<GGML_TYPE_Q5_K, Bits<4, 1>>;

struct IQ4_XS {  // d of 256 weights, a 6-bit scale of each 32 with a zero of 32, pairs of nibbles
    using Numbers                       = Places<Nonlinear>;
    static constexpr int       kZero    = Nonlinear::kZero;
    static constexpr bool      kIsHalved = false;
    static constexpr ggml_type kType    = GGML_TYPE_IQ4_XS;
    static constexpr Minimum   kMinimum = Minimum::NONE;
    static constexpr int       kBlocks  = 8;
    static constexpr int       kOne     = Nibbles::kBytes + kRows;
    static constexpr int       kBytes   = kBlocks * kOne + 2 * kRows;

    static void weave(const char * const * rows, uint8_t * to) {
        for (int r = 0; r < kRows; ++r) {
            const auto * from = reinterpret_cast<const uint8_t *>(rows[r]);
            uint16_t     high;
            std::memcpy(&high, from + 2, sizeof(high));
            for (int i = 0; i < kBlocks; ++i) {
                const int low = from[4 + i / 2] >> (4 * (i % 2)) & 15;
                Nibbles::put_pairs(to + i * kOne, r, from + 8 + 16 * i);
                to[i * kOne + Nibbles::kBytes + r] = uint8_t((low | (high >> (2 * i) & 3) << 4) - 32);
            }
            std::memcpy(to + kBlocks * kOne + 2 * r, from, 2);
        }
    }

    PLR_WOVEN static inline Scales scales(const uint8_t * from, int i, int part) {
        const Ints scale = Set::integers(from + i * kOne + Nibbles::kBytes + kLanes * part);
        return {Set::halves(from + kBlocks * kOne + 2 * kLanes * part) * floats(scale << 24 >> 24)};
    }
};

// Of 256 weights d, perhaps dmin; of each 16 an integer scale, or a scale of four bits below a
// minimum. A half of a block has 16 weights.
template <ggml_type kGgmlType, class Unpacker, int kZeroOf, bool kHasMinima = false>
struct Halved {
    using Numbers                       = Unpacker;
    static constexpr int       kZero    = kZeroOf;
    static constexpr bool      kIsHalved = true;
    static constexpr ggml_type kType    = kGgmlType;
    static constexpr Minimum   kMinimum = kHasMinima ? Minimum::OF_HALVES : Minimum::NONE;
    static constexpr int       kBlocks  = 8;
    static constexpr int       kOne     = Unpacker::kBytes + 2 * kRows;
    static constexpr int       kBytes   = kBlocks * kOne + (kHasMinima ? 4 : 2) * kRows;

    // Of both halves of block *i*, a pair of each row.
    PLR_WOVEN static inline Pairs half_scales(const uint8_t * from, int i, int part) {
        return kHasMinima ? of_halves(from, i, part) & 15 : of_halves(from, i, part);
    }

    PLR_WOVEN static inline Scales scales(const uint8_t * from, int i, int part) {
        const uint8_t * of_all = from + kBlocks * kOne + 2 * kLanes * part;
        if constexpr (kHasMinima) {
            return {Set::halves(of_all), -Set::halves(of_all + 2 * kRows), of_halves(from, i, part) >> 4 & 15};
        } else {
            return {Set::halves(of_all)};
        }
    }

  private:
    PLR_WOVEN static inline Pairs of_halves(const uint8_t * from, int i, int part) {
        return pairs_of(from + i * kOne + Unpacker::kBytes + 2 * kLanes * part);
    }
};

struct Q6_K : Halved<GGML_TYPE_Q6_K, Bits<4, 2>, 32> {
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
                Bits<4, 2>::put(to + i * kOne, r, q);
                std::memcpy(to + i * kOne + Bits<4, 2>::kBytes + 2 * r, from + 192 + 2 * i, 2);
            }
            std::memcpy(to + kBlocks * kOne + 2 * r, from + 208, 2);
        }
    }
};

struct Q3_K : Halved<GGML_TYPE_Q3_K, Bits<2, 1>, 4> {
    static void weave(const char * const * rows, uint8_t * to) {
        for (int r = 0; r < kRows; ++r) {
            const auto * from = reinterpret_cast<const uint8_t *>(rows[r]);
            for (int i = 0; i < kBlocks; ++i) {
                uint8_t q[kBlock];
                for (int k = 0; k < kBlock; ++k) {
                    const int low = from[32 + 32 * (i / 4) + k] >> (2 * (i % 4)) & 3;
                    q[k]          = uint8_t(low | (from[k] >> i & 1) << 2);
                }
                Bits<2, 1>::put(to + i * kOne, r, q);
                for (int s = 2 * i; s < 2 * i + 2; ++s) {
                    // Six bits with a zero of 32: eight bytes have four of two scales each, four
                    // bytes have two of four scales.
                    const int low  = from[96 + s % 8] >> (s < 8 ? 0 : 4) & 15;
                    const int high = from[104 + s % 4] >> (2 * (s / 4)) & 3;
                    to[i * kOne + Bits<2, 1>::kBytes + 2 * r + s % 2] = uint8_t((low | high << 4) - 32);
                }
            }
            std::memcpy(to + kBlocks * kOne + 2 * r, from + 108, 2);
        }
    }
};

struct Q2_K : Halved<GGML_TYPE_Q2_K, Bits<2, 0>, 0, true> {
    static void weave(const char * const * rows, uint8_t * to) {
        for (int r = 0; r < kRows; ++r) {
            const auto * from = reinterpret_cast<const uint8_t *>(rows[r]);
            for (int i = 0; i < kBlocks; ++i) {
                uint8_t q[kBlock];
                for (int k = 0; k < kBlock; ++k) {
                    q[k] = from[16 + 32 * (i / 4) + k] >> (2 * (i % 4)) & 3;
                }
                Bits<2, 0>::put(to + i * kOne, r, q);
                std::memcpy(to + i * kOne + Bits<2, 0>::kBytes + 2 * r, from + 2 * i, 2);
            }
            std::memcpy(to + kBlocks * kOne + 2 * r, from + 80, 2);
            std::memcpy(to + kBlocks * kOne + 2 * (kRows + r), from + 82, 2);
        }
    }
};

using All = Types<Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, Q2_K, Q3_K, IQ4_NL, IQ4_XS, MXFP4>;
