// Products of woven weights with many columns, by the tiles of AMX.
//
// A register of AMX, too, is called a tile: 16 rows of 64 bytes. One has 32 values of 16 columns as
// bfloat16, one has a block of 16 woven rows: pairs of values of each row beside each other. One
// instruction adds the products of both to 16 x 16 sums of floats.
//
// Weights become bfloat16 with their scales and minima, so sums stay in registers from block to block.
// Integers would have to leave them each 32 values for a step of floats, which takes three times as long
// as the product. Rounding weights and columns to bfloat16 loses less than quantising columns to 8 bits,
// but sums have other bits than those of woven_tile.h.

// Blocks of which columns and unpacked weights are in the cache at once, and bytes of these columns.
constexpr int    kAmxBlocks = 64;
constexpr size_t kAmxBytes  = size_t(1) << 20;

// The shapes of a thread's tiles are state of the CPU. Others may want them otherwise, as libllama
// does, which sets them once a thread. So they are put back.
struct alignas(64) AmxShapes {
    uint8_t  palette, start, zeros[14];
    uint16_t n_bytes[16];
    uint8_t  n_rows[16];
};

class AmxScope {
  public:
    PLR_AMX AmxScope() {
        static constexpr AmxShapes kOurs{
            1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
        _tile_storeconfig(before_);
        _tile_loadconfig(&kOurs);
    }
    PLR_AMX ~AmxScope() {
        if (before_[0] == 0) {  // no palette: nobody uses tiles
            _tile_release();
        } else {
            _tile_loadconfig(before_);
        }
    }

  private:
    alignas(64) uint8_t before_[sizeof(AmxShapes)];
};

// Round a column to bfloat16.
PLR_AMX PLR_CALLED inline void amx_pack(const Bf16Columns & to, int column, const float * from) {
    for (int i = 0; i < to.n_blocks; ++i, from += kBlock) {
        const auto both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + kBlock / 2), _mm512_loadu_ps(from));
        std::memcpy(to.at(i, column), &both, sizeof(both));
    }
}

// A block of 16 rows as a tile, from number *i* of those at *from*.
template <class W>
PLR_AMX inline void amx_unpack(const uint8_t * from, int i, char * tile) {
    using Words = uint32_t __attribute__((vector_size(64)));
    const Scales scales = W::scales(from, i, 0);
    // weight = by * number + more, in each half of the block.
    Floats by[2] = {scales.d, scales.d}, more[2];
    if constexpr (W::kIsHalved) {
        const Ints pairs = Ints(W::half_scales(from, i, 0));
        by[0] *= floats(pairs << 16 >> 16), by[1] *= floats(pairs >> 16);
    }
    for (int half = 0; half < 2; ++half) {
        more[half] = by[half] * -float(W::kZero);
        if constexpr (W::kMinimum == Minimum::OF_BLOCK) {
            more[half] += scales.m;
        } else if constexpr (W::kMinimum == Minimum::OF_HALVES) {
            const Ints minima = Ints(scales.minima);
            more[half] += scales.m * floats((half == 0 ? minima << 16 : minima) >> 16);
        }
    }
#pragma GCC unroll 8
    for (int g = 0; g < kGroups; ++g) {
        const auto four = Words(W::Numbers::group(from + i * W::kOne, g, 0));
#pragma GCC unroll 2
        for (int two = 0; two < 2; ++two) {
            const Words pair   = two == 0 ? four : four >> 16;
            const auto  first  = Words(Set::fma(floats(Ints(pair & 255)), by[g / 4], more[g / 4]));
            const auto  second = Words(Set::fma(floats(Ints(pair >> 8 & 255)), by[g / 4], more[g / 4]));
            // A bfloat16 is the upper half of a float; 0x8000 rounds it.
            const Words both = (first + 0x8000) >> 16 | ((second + 0x8000) & 0xffff0000);
            std::memcpy(tile + (2 * g + two) * kPlane, &both, sizeof(both));
        }
    }
}

constexpr int kAmxTile = 16 * kPlane;  // bytes

using AmxWeights = char[kAmxBlocks * kAmxTile];  // some blocks of 16 rows

// Adds n blocks of 32 columns, or of 16, times two groups of 16 rows, to what is at *to*, or to 0. Columns of
// a block are *apart* bytes behind those of the one before, results of a column *stride* floats. The
// compiler does not know that tiles read and write memory.
template <bool kAreMore>
PLR_AMX inline void amx_multiply(const char * columns, size_t apart, const AmxWeights * weights, int n,
                                 float * to, size_t stride, bool adds) {
    float * const more    = to + kRows * stride;
    const size_t  n_bytes = stride * sizeof(float);
    asm volatile("" ::: "memory");
    if (adds) {
        _tile_loadd(0, to, n_bytes);
        _tile_loadd(1, to + kRows, n_bytes);
        if constexpr (kAreMore) {
            _tile_loadd(2, more, n_bytes);
            _tile_loadd(3, more + kRows, n_bytes);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int i = 0; i < n; ++i, columns += apart) {
        _tile_loadd(4, columns, kPlane);
        _tile_loadd(6, weights[0] + i * kAmxTile, kPlane);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, weights[1] + i * kAmxTile, kPlane);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (kAreMore) {
            _tile_loadd(5, columns + kAmxTile, kPlane);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, to, n_bytes);
    _tile_stored(1, to + kRows, n_bytes);
    if constexpr (kAreMore) {
        _tile_stored(2, more, n_bytes);
        _tile_stored(3, more + kRows, n_bytes);
    }
    asm volatile("" ::: "memory");
}

// As Many::tiles says.
template <class W>
PLR_AMX PLR_CALLED void amx_tiles(const uint8_t * rows, size_t group_bytes, int n_rows,
                                  const Bf16Columns & columns, int first, const int32_t * places, int n,
                                  float * out, size_t stride) {
    constexpr int          kPair = 2 * kRows;
    alignas(64) AmxWeights weights[2];
    alignas(64) float      sums[kPair][kPair];
    const AmxScope         scope;
    for (int block = 0; block < columns.n_blocks; block += kAmxBlocks) {
        const int n_blocks = std::min(kAmxBlocks, columns.n_blocks - block);
        for (int row = 0; row < n_rows; row += kPair) {
            const int here = std::min(kPair, n_rows - row);
            for (int group = 0; group * kRows < here; ++group) {
                const uint8_t * from = rows + (row / kRows + group) * group_bytes;
                for (int b = 0; b < n_blocks; ++b) {
                    const int i = block + b;
                    look_ahead<W>(from, i);
                    amx_unpack<W>(from + size_t(i / W::kBlocks) * W::kBytes, i % W::kBlocks,
                                  weights[group] + b * kAmxTile);
                }
            }
            for (int c = 0; c < n; c += kPair) {
                const int    n_columns = std::min(kPair, n - c);
                const auto   multiply  = n_columns > kRows ? amx_multiply<true> : amx_multiply<false>;
                const char * from      = columns.at(block, first + c);
                const auto   to        = [&](int k) { return out + places[c + k] * stride + row; };
                for (int k = 0; k < n_columns; ++k) {  // loads memory of results, while tiles are multiplied
                    __builtin_prefetch(to(k), 1);
                    __builtin_prefetch(to(k) + kRows, 1);
                }
                // Results of experts are anywhere, and those at the ends are no whole tiles.
                if (n_columns == kPair && here == kPair && places[c + kPair - 1] - places[c] == kPair - 1) {
                    multiply(from, columns.apart(), weights, n_blocks, to(0), stride, block > 0);
                    continue;
                }
                for (int k = 0; block > 0 && k < n_columns; ++k) {
                    std::copy_n(to(k), here, sums[k]);
                }
                multiply(from, columns.apart(), weights, n_blocks, sums[0], kPair, block > 0);
                for (int k = 0; k < n_columns; ++k) {
                    std::copy_n(sums[k], here, to(k));
                }
            }
        }
    }
}

template <class... W>
constexpr std::array<ManyTiles, sizeof...(W)> amx_tiles_of(Types<W...>) {
    return {{amx_tiles<W>...}};
}

constexpr auto kAmxTiles = amx_tiles_of(All());
