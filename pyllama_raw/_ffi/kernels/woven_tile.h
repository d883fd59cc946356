// Products of woven weights (woven_types.h) with quantised columns: 16 rows by some columns at once.
//
// Integers are exact. Floats are added once a block, in the order of the blocks, by each row for
// itself. So a result depends neither on the columns that are computed beside it, nor on threads.

// Quantise blocks first to last of *from*.
PLR_WOVEN PLR_CALLED inline void pack(const Columns & to, int column, int first, int last,
                                      const float * from) {
    float *   ds = to.d(column), *sums = to.sums(column);
    int16_t * half_sums = to.half_sums(column);
    int8_t *  q         = to.q(column);
    for (int i = first; i < last; ++i) {
        int16_t *   halves = half_sums + 2 * i;
        const float d = Set::quantise(from + i * kBlock, q + i * kBlock, halves) / 127.0f;
        ds[i]   = d;
        sums[i] = d * float(halves[0] + halves[1]);
    }
}

// A block of 16 rows where it stands.
template <class W>
struct WovenBlock {
    using Numbers = typename W::Numbers;

    static constexpr int kZero = W::kZero;

    const uint8_t * from;
    int             i;  // of those at *from*

    PLR_WOVEN inline const uint8_t * numbers() const { return from + i * W::kOne; }
    PLR_WOVEN inline Scales scales(int part) const { return W::scales(from, i, part); }
    PLR_WOVEN inline Pairs  half_scales(int part) const { return W::half_scales(from, i, part); }
};

// A block that is unpacked once for many columns. Numbers that are multiplied with sign have it, and
// their sizes are behind them.
template <class W>
struct UnpackedBlock {
    struct Numbers : Bytes {
        static constexpr int kMost = W::Numbers::kMost;
    };

    static constexpr bool kIsSigned = is_signed<typename W::Numbers>;
    static constexpr int  kZero     = kIsSigned ? 0 : W::kZero;

    template <class AnySet = Set>
    PLR_WOVEN inline void unpack(const WovenBlock<W> & block) {
#pragma GCC unroll 4
        for (int part = 0; part < kParts; ++part) {
#pragma GCC unroll 8
            for (int g = 0; g < kGroups; ++g) {
                groups_[g][part] = W::Numbers::group(block.numbers(), g, part) - uint8_t(W::kZero - kZero);
                if constexpr (kIsSigned) {
                    groups_[kGroups + g][part] = AnySet::sizes(groups_[g][part]);
                }
            }
            scales_[part] = block.scales(part);
            if constexpr (W::kIsHalved) {
                half_scales_[part] = block.half_scales(part);
            }
        }
    }

    PLR_WOVEN inline const uint8_t * numbers() const {
        return reinterpret_cast<const uint8_t *>(groups_);
    }
    PLR_WOVEN inline const Scales & scales(int part) const { return scales_[part]; }
    PLR_WOVEN inline const Pairs &  half_scales(int part) const { return half_scales_[part]; }

  private:
    alignas(64) Group groups_[kIsSigned ? 2 * kGroups : kGroups][kParts];
    Scales scales_[kParts];
    Pairs  half_scales_[W::kIsHalved ? kParts : 1];
};

// C columns from *first*, at block *i*.
template <int C>
struct TileColumns {
    const float * d[C];
    const float * s[C];
    Column        column[C];

    PLR_WOVEN inline TileColumns(const Columns & columns, int first, int i) {
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            d[c] = columns.d(first + c), s[c] = columns.sums(first + c);
            column[c] = {columns.q(first + c) + i * kBlock, columns.half_sums(first + c) + 2 * i};
        }
    }
};

// Adds *block*, number *i* of the rows, to the sums *acc* of C columns, and goes to their next one.
template <class W, int C, class Block>
PLR_WOVEN inline void add_block(const Block & block, int i, TileColumns<C> & columns, Floats (*acc)[kParts]) {
    using Numbers = typename Block::Numbers;
    auto & [d, s, column] = columns;
    Ints sums[C][kParts];
    if constexpr (W::kIsHalved) {
        Pairs pairs[kParts];
#pragma GCC unroll 4
        for (int part = 0; part < kParts; ++part) {
            pairs[part] = block.half_scales(part);
        }
        multiply_halves<Numbers, Block::kZero, C>(block.numbers(), pairs, column, sums);
    } else {
        multiply<Numbers, Block::kZero, C>(block.numbers(), column, sums);
    }
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
        // By reference, because GCC copies a vector in halves, and the CPU then waits to load the whole.
        const Scales & scales = block.scales(part);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            Floats value = Set::fma(scales.d * d[c][i], floats(sums[c][part]), acc[c][part]);
            if constexpr (W::kMinimum == Minimum::OF_BLOCK) {
                // In all lanes; nothing is left of the difference, as there would be of a sum.
                value = Set::fma(scales.m, s[c][i] - Floats{}, value);
            } else if constexpr (W::kMinimum == Minimum::OF_HALVES) {
                const Ints minima = Set::dot(scales.minima, column[c].half_sums);
                value = Set::fma(scales.m * d[c][i], floats(minima), value);
            }
            acc[c][part] = value;
        }
    }
    asm volatile("" ::: "memory");
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
        column[c].q += kBlock, column[c].half_sums += 2;
    }
}

// Loads what a tile multiplies soon.
template <class W>
PLR_WOVEN inline void look_ahead(const uint8_t * rows, int i) {
    constexpr int kOne = W::kBytes / W::kBlocks;
    for (int at = 0; at < kOne; at += 64) {
        __builtin_prefetch(rows + size_t(i / W::kBlocks) * W::kBytes + i % W::kBlocks * kOne + kAhead + at);
    }
}

// out[c * stride + r] of the first n_rows of 16 woven rows and C columns from *first*. Sums of
// floats are in memory where registers do not hold them beside those of integers, because the
// compiler would spill the latter, which are used eight times as often.
template <class W, int C>
PLR_WOVEN PLR_CALLED void tile(const uint8_t * rows, const Columns & columns, int first, float * out,
                               size_t stride, int n_rows) {
    Floats         acc[C][kParts] = {};
    TileColumns<C> here(columns, first, 0);
    for (int i = 0; i < columns.n_blocks; ++i) {
        if (first == 0) {  // later columns have the weights in the cache
            look_ahead<W>(rows, i);
        }
        const WovenBlock<W> block{rows + size_t(i / W::kBlocks) * W::kBytes, i % W::kBlocks};
        add_block<W>(block, i, here, acc);
    }
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
        if constexpr (Set::kKeepsFloats) {  // sums whose address is taken are in memory
            const Floats copy = acc[c][0];
            std::memcpy(out + c * stride, &copy, n_rows * sizeof(float));
        } else {
            std::memcpy(out + c * stride, acc[c], n_rows * sizeof(float));
        }
    }
}

constexpr int kUnpacked = 8;  // blocks that are unpacked at once, which stay in the nearest cache

// Adds *n* unpacked blocks, number *block* and later of the rows, to the sums of kMaxColumns columns.
template <class W>
PLR_WOVEN PLR_CALLED void add_unpacked(const UnpackedBlock<W> * blocks, int block, int n,
                                       const Columns & columns, int first, Floats (*sums)[kParts]) {
    TileColumns<kMaxColumns> here(columns, first, block);
    for (int i = 0; i < n; ++i) {
        add_block<W>(blocks[i], block + i, here, sums);
    }
}

// Columns first to last, as many as full tiles have: all of a few blocks, which are unpacked once.
template <class W>
PLR_WOVEN inline void unpacked_tiles(const uint8_t * rows, const Columns & columns, int first, int last,
                                     float * out, size_t stride, int n_rows) {
    UnpackedBlock<W> blocks[kUnpacked];
    Floats           acc[kMostColumns][kParts];
    std::fill_n(acc[0], (last - first) * kParts, Floats{});
    for (int block = 0; block < columns.n_blocks; block += kUnpacked) {
        const int n = std::min(kUnpacked, columns.n_blocks - block);
        for (int i = 0; i < n; ++i) {
            const int at = block + i;
            look_ahead<W>(rows, at);
            blocks[i].unpack({rows + size_t(at / W::kBlocks) * W::kBytes, at % W::kBlocks});
        }
        for (int c = first; c < last; c += kMaxColumns) {
            add_unpacked<W>(blocks, block, n, columns, c, acc + c - first);
        }
    }
    for (int c = first; c < last; ++c) {
        std::memcpy(out + c * stride, acc[c - first], n_rows * sizeof(float));
    }
}

// Columns first to last, in tiles of the most columns, then in one of a few, or two nearly equal
// ones. Other widths gain nothing, and each is compiled for each type. Four full tiles earn what it takes
// to put dear numbers into memory. Cheap ones, and vectors of 512 bits, are faster unpacked for each tile.
template <class W>
PLR_WOVEN inline void tiles(const uint8_t * rows, const Columns & columns, int first, int last, float * out,
                            size_t stride, int n_rows) {
    constexpr int kFew = std::min(4, kMaxColumns);
    constexpr void (*kTiles[])(const uint8_t *, const Columns &, int, float *, size_t, int) = {
        tile<W, 1>, tile<W, std::min(2, kFew)>, tile<W, std::min(3, kFew)>, tile<W, kFew>,
        tile<W, kMaxColumns>};
    if constexpr (W::Numbers::kIsDear && kMaxColumns > 1 && !Set::kKeepsFloats) {
        if (const int n = (last - first) / kMaxColumns; n >= 4) {
            unpacked_tiles<W>(rows, columns, first, first + n * kMaxColumns, out, stride, n_rows);
            first += n * kMaxColumns;
        }
    }
    for (int width; first < last; first += width) {
        const int n = last - first;
        width       = n >= kMaxColumns ? kMaxColumns : n <= kFew ? n : (n + 1) / 2;
        kTiles[width <= kFew ? width - 1 : 4](rows, columns, first, out + first * stride, stride, n_rows);
    }
}

// One of 16 woven rows, as floats with the bits that libllama has of the file's form. Of a type with
// a minimum they would be others, because compilers round its product and sum once or twice.
template <class W>
PLR_WOVEN void unpack(const uint8_t * rows, int row, int n_blocks, float * to) {
    const int part = row / kLanes, lane = row % kLanes;
    for (int i = 0; i < n_blocks; ++i) {
        const uint8_t * from  = rows + size_t(i / W::kBlocks) * W::kBytes;
        const int       block = i % W::kBlocks;
        const float     d     = W::scales(from, block, part).d[lane];
        float           by[2] = {d, d};
        if constexpr (W::kIsHalved) {
            const Pairs pairs = W::half_scales(from, block, part);
            by[0] *= float(pairs[2 * lane]), by[1] *= float(pairs[2 * lane + 1]);
        }
        for (int g = 0; g < kGroups; ++g) {
            const Group numbers = W::Numbers::group(from + block * W::kOne, g, part);
            for (int k = 0; k < 4; ++k) {
                *to++ = by[g / 4] * float(int(numbers[4 * lane + k]) - W::kZero);
            }
        }
    }
}

template <class... W>
constexpr std::array<Tiles, sizeof...(W)> tiles_of(Types<W...>) {
    return {{tiles<W>...}};
}

constexpr auto kTiles = tiles_of(All());
