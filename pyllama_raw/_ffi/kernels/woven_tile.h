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

// out[c * stride + r] of the first n_rows of 16 woven rows and C columns from *first*. Sums of
// floats are in memory where registers do not hold them beside those of integers, because the
// compiler would spill the latter, which are used eight times as often.
template <class W, int C>
PLR_WOVEN PLR_CALLED void tile(const uint8_t * rows, const Columns & columns, int first, float * out,
                               size_t stride, int n_rows) {
    Floats        acc[C][kParts] = {};
    const float * d[C];
    const float * s[C];
    Column        column[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
        d[c] = columns.d(first + c), s[c] = columns.sums(first + c);
        column[c] = {columns.q(first + c), columns.half_sums(first + c)};
    }
    for (int i = 0; i < columns.n_blocks; ++i) {
        const uint8_t * from = rows + size_t(i / W::kBlocks) * W::kBytes;
        if (first == 0) {  // later columns have the weights in the cache
            constexpr int kOne = W::kBytes / W::kBlocks;
            for (int at = 0; at < kOne; at += 64) {
                __builtin_prefetch(from + i % W::kBlocks * kOne + kAhead + at);
            }
        }
        Ints sums[C][kParts];
        W::template dot<C>(from, i % W::kBlocks, column, sums);
#pragma GCC unroll 4
        for (int part = 0; part < kParts; ++part) {
            const Scales scales = W::scales(from, i % W::kBlocks, part);
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

// Columns first to last, in tiles of the most columns, then in one of a few, or two nearly equal
// ones. Other widths gain nothing, and each is compiled for each type.
template <class W>
inline void tiles(const uint8_t * rows, const Columns & columns, int first, int last, float * out,
                  size_t stride, int n_rows) {
    constexpr int kFew = std::min(4, kMaxColumns);
    constexpr void (*kTiles[])(const uint8_t *, const Columns &, int, float *, size_t, int) = {
        tile<W, 1>, tile<W, std::min(2, kFew)>, tile<W, std::min(3, kFew)>, tile<W, kFew>,
        tile<W, kMaxColumns>};
    for (int width; first < last; first += width) {
        const int n = last - first;
        width       = n >= kMaxColumns ? kMaxColumns : n <= kFew ? n : (n + 1) / 2;
        kTiles[width <= kFew ? width - 1 : 4](rows, columns, first, out + first * stride, stride,
                                              n_rows);
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
