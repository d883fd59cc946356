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
        if (C == 1) {  // reads each weight once, so memory is the limit
            constexpr int kOne = W::kBytes / W::kBlocks;
            for (int at = 0; at < kOne; at += 64) {
                __builtin_prefetch(from + i % W::kBlocks * kOne + 2048 + at);
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

using Tile = void (*)(const uint8_t *, const Columns &, int, float *, size_t, int);

template <class W, int... n>
constexpr std::array<Tile, kMaxColumns> widths_of(std::integer_sequence<int, n...>) {
    return {{tile<W, n + 1>...}};
}

// Columns first to last, in tiles of nearly equal width.
template <class W>
inline void tiles(const uint8_t * rows, const Columns & columns, int first, int last, float * out,
                  size_t stride, int n_rows) {
    static constexpr auto kWidths = widths_of<W>(std::make_integer_sequence<int, kMaxColumns>());
    for (int n_tiles = (last - first + kMaxColumns - 1) / kMaxColumns; n_tiles > 0; --n_tiles) {
        const int width = (last - first + n_tiles - 1) / n_tiles;
        kWidths[width - 1](rows, columns, first, out + first * stride, stride, n_rows);
        first += width;
    }
}

template <class... W>
constexpr std::array<Tiles, sizeof...(W)> tiles_of(Types<W...>) {
    return {{tiles<W>...}};
}

constexpr auto kTiles = tiles_of(All());
