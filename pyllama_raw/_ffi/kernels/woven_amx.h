// Products of woven weights by the tiles of AMX. A few columns are multiplied as by AVX-512.
//
// A register of AMX, too, is called a tile: 16 rows of 64 bytes. One has a block of 16 columns, one
// has a block of 16 woven rows, which stand as AMX wants them: four bytes of each row beside each
// other. One instruction makes the integers of 16 x 16 results. Floats are added as in
// woven_tile.h, so bits are the same.
//
// Numbers are unpacked once for up to 64 columns, with sign, because AMX multiplies bytes with
// sign. Where each half of a block has an integer scale, numbers are multiplied by it; what then
// takes more than a byte becomes two: number * scale = 128 * high + low.

constexpr int kAmxColumns = 16, kAmxBlocks = 8;

// The shapes of a thread's tiles are state of the CPU. Others may want them otherwise, as libllama
// does, which sets them once a thread. So they are put back.
struct alignas(64) AmxShapes {
    uint8_t  palette, start, zeros[14];
    uint16_t n_bytes[16];
    uint8_t  n_rows[16];
};

static_assert(sizeof(AmxShapes) <= sizeof(Registers::before));

PLR_AMX inline void amx_begin(Registers & registers) {
    // Columns, 16 and 8; weights, twice; sums of 16 columns and of 8, twice.
    static constexpr AmxShapes kOurs{1, 0, {},
        {kBlock, kBlock, kPlane, kPlane, kPlane, kPlane, kPlane, kPlane},
        {16, 8, kGroups, kGroups, 16, 8, 16, 8}};
    _tile_storeconfig(registers.before);
    _tile_loadconfig(&kOurs);
}

PLR_AMX inline void amx_end(Registers & registers) {
    if (registers.before[0] == 0) {  // no palette: nobody uses tiles
        _tile_release();
    } else {
        _tile_loadconfig(registers.before);
    }
}

// What is unpacked of some blocks of 16 rows.
template <class W>
struct AmxWeights {
    alignas(64) Group low[kAmxBlocks][kGroups];
    alignas(64) Group high[W::kIsWide ? kAmxBlocks : 1][kGroups];
    Scales scales[kAmxBlocks];

    // Block *i* of those at *from*, as number *b*.
    PLR_WOVEN inline void unpack(int b, const uint8_t * from, int i) {
        const uint8_t * block = from + i * W::kOne;
        scales[b]             = W::scales(from, i, 0);
        if constexpr (!W::kIsHalved) {
#pragma GCC unroll 8
            for (int g = 0; g < kGroups; ++g) {
                low[b][g] = W::Numbers::group(block, g, 0) - uint8_t(W::kZero);
            }
        } else {
            const Pairs pairs = W::half_scales(from, i, 0);
            // The scale of a half twice, because a row has two 16-bit integers.
            const Pairs by[2] = {Pairs((Ints(pairs) << 16) | (Ints(pairs) & 0xffff)),
                                 Pairs((Ints(pairs) >> 16 & 0xffff) | (Ints(pairs) & int(0xffff0000)))};
#pragma GCC unroll 8
            for (int g = 0; g < kGroups; ++g) {
                const auto  two  = Pairs(W::Numbers::group(block, g, 0));
                const Pairs even = ((two & 255) - int16_t(W::kZero)) * by[g / 4];
                const Pairs odd  = ((two >> 8 & 255) - int16_t(W::kZero)) * by[g / 4];
                low[b][g]        = bytes(even, odd);
                if constexpr (W::kIsWide) {
                    const Pairs upper[2] = {(even + 64) >> 7, (odd + 64) >> 7};
                    low[b][g]  = bytes(even - (upper[0] << 7), odd - (upper[1] << 7));
                    high[b][g] = bytes(upper[0], upper[1]);
                }
            }
        }
    }

  private:
    PLR_WOVEN static inline Group bytes(Pairs even, Pairs odd) { return Group((even & 255) | (odd << 8)); }
};

// Products of 16 or 8 columns with 16 rows of block *b*. q of a column is *apart* bytes behind that of the
// one before. A compiler does not know these registers; it keeps the order of volatile texts.
template <class W, int kColumns>
PLR_AMX inline void amx_multiply(const int8_t * q, size_t apart, const AmxWeights<W> & weights, int b,
                                 Ints * low, Ints * high) {
#define PLR_AMX_LOAD(columns) \
    asm volatile("tileloadd (%0,%1,1), %%" columns ::"r"(q), "r"(apart) : "memory")
#define PLR_AMX_MULTIPLY(columns, numbers, result, from, to)                               \
    asm volatile("tileloadd (%0,%1,1), %%" numbers                                         \
                 "\n tilezero %%" result                                                   \
                 "\n tdpbssd %%" numbers ", %%" columns ", %%" result                      \
                 "\n tilestored %%" result ", (%2,%1,1)" ::"r"(from), "r"(size_t(kPlane)), \
                 "r"(to)                                                                   \
                 : "memory")
    if constexpr (kColumns == 16) {
        PLR_AMX_LOAD("tmm0");
        PLR_AMX_MULTIPLY("tmm0", "tmm2", "tmm4", weights.low[b], low);
        if constexpr (W::kIsWide) {
            PLR_AMX_MULTIPLY("tmm0", "tmm3", "tmm6", weights.high[b], high);
        }
    } else {
        PLR_AMX_LOAD("tmm1");
        PLR_AMX_MULTIPLY("tmm1", "tmm2", "tmm5", weights.low[b], low);
        if constexpr (W::kIsWide) {
            PLR_AMX_MULTIPLY("tmm1", "tmm3", "tmm7", weights.high[b], high);
        }
    }
#undef PLR_AMX_LOAD
#undef PLR_AMX_MULTIPLY
}

// Adds blocks *block* and later of up to kColumns columns to their sums *acc*. Columns are at *at*,
// and their q at *q*.
template <class W, int kColumns>
PLR_AMX inline void amx_add(const AmxWeights<W> & weights, int n_blocks, const char * const * at, int n,
                            int n_all, int block, const int8_t * q, size_t apart, Floats * acc) {
    alignas(64) Ints low[2][kColumns], high[2][kColumns];
    const auto multiply = [&](int b) PLR_AMX {
        amx_multiply<W, kColumns>(q + b * kBlock, apart, weights, b, low[b % 2], high[b % 2]);
    };
    multiply(0);
    for (int b = 0; b < n_blocks; ++b) {
        if (b + 1 < n_blocks) {  // meanwhile floats of this one are added
            multiply(b + 1);
        }
        const Scales scales  = weights.scales[b];
        const size_t d_at    = sizeof(float) * (block + b), sum_at = sizeof(float) * n_all + d_at;
        const size_t half_at = sizeof(float) * n_all + sum_at;  // as wide as a float
        const Ints * sums = low[b % 2], * upper = high[b % 2];
#pragma GCC unroll 8
        for (int c = 0; c < n; ++c) {
            Ints sum = sums[c];
            if constexpr (W::kIsWide) {
                sum += upper[c] << 7;
            }
            const float d     = *reinterpret_cast<const float *>(at[c] + d_at);
            Floats      value = Set::fma(scales.d * d, floats(sum), acc[c]);
            if constexpr (W::kMinimum == Minimum::OF_BLOCK) {
                const float all = *reinterpret_cast<const float *>(at[c] + sum_at);
                value           = Set::fma(scales.m, all - Floats{}, value);
            } else if constexpr (W::kMinimum == Minimum::OF_HALVES) {
                const auto * halves = reinterpret_cast<const int16_t *>(at[c] + half_at);
                value = Set::fma(scales.m * d, floats(Set::dot(scales.minima, halves)), value);
            }
            acc[c] = value;
        }
    }
}

// As tiles().
template <class W>
PLR_AMX PLR_CALLED void amx_tiles(const uint8_t * rows, const Columns & columns, int first, int last,
                                  float * out, size_t stride, int n_rows) {
    const int n = last - first, n_all = columns.n_blocks;
    if (n < (W::kIsWide ? 24 : 12)) {  // as measured
        tiles<W>(rows, columns, first, last, out, stride, n_rows);
        return;
    }
    AmxWeights<W> weights;
    Floats        acc[kMostColumns];
    const char *  at[kMostColumns];
    size_t        apart = Columns::bytes(n_all);
    for (int c = 0; c < n; ++c) {
        acc[c] = Floats{}, at[c] = columns.at(first + c);
        // Columns of an expert are anywhere, and are copied.
        apart = c > 0 && size_t(at[c] - at[c - 1]) != Columns::bytes(n_all) ? 0 : apart;
    }
    alignas(64) int8_t copies[kMostColumns][kAmxBlocks * kBlock];
    const size_t       q_at = 3 * sizeof(float) * n_all;
    for (int block = 0; block < n_all; block += kAmxBlocks) {
        const int n_blocks = std::min(kAmxBlocks, n_all - block);
        for (int b = 0; b < n_blocks; ++b) {
            const int i = block + b;
            look_ahead<W>(rows, i);
            weights.unpack(b, rows + size_t(i / W::kBlocks) * W::kBytes, i % W::kBlocks);
        }
        for (int c = 0; c < n; c += kAmxColumns) {
            const int      here = std::min(kAmxColumns, n - c);
            const int8_t * q    = reinterpret_cast<const int8_t *>(at[c] + q_at + block * kBlock);
            if (apart == 0) {
                for (int k = c; k < c + here; ++k) {
                    std::memcpy(copies[k], at[k] + q_at + block * kBlock, n_blocks * kBlock);
                }
                q = copies[c];
            }
            const auto add = here > kAmxColumns / 2 ? amx_add<W, kAmxColumns> : amx_add<W, kAmxColumns / 2>;
            add(weights, n_blocks, at + c, here, n_all, block, q, apart ? apart : sizeof(copies[0]), acc + c);
        }
    }
    for (int c = 0; c < n; ++c) {
        std::memcpy(out + (first + c) * stride, &acc[c], n_rows * sizeof(float));
    }
}

template <class... W>
constexpr std::array<Tiles, sizeof...(W)> amx_tiles_of(Types<W...>) {
    return {{amx_tiles<W>...}};
}

constexpr auto kAmxTiles = amx_tiles_of(All());
