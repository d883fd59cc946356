// Attention of rows to tiles with a running softmax, for vectors of any width, four rows at once. A
// few rows use keys and values as they are read; many rows have them as panels of floats. Both add in
// the same order, so the bits of a row do not depend on how many there are.
//
// (Milakov, Gimelshein: Online normalizer calculation for softmax, 2018)
//
// Included once in the namespace of each width, because a function that is a template cannot
// name the instructions that it may use. That namespace has Vector, kVector floats long,
// PartialSums and the functions on vectors that are called here; PLR_TARGET names its
// instructions.

constexpr int kParts = kCells / kVector;  // vectors for the cells of a tile

PLR_TARGET PLR_CALLED inline void begin(Rows & rows, int row, const float * q, float scale,
                                        int n_key, int n_value) {
    for (int d = 0; d < n_key; d += kVector) {
        store(rows.q[row] + d, load_unaligned(q + d) * all(scale));
    }
    for (int d = 0; d < n_value; d += kVector) {
        store(rows.out[row] + d, all(0.0f));
    }
    for (int cell = 0; cell < kCells; cell += kVector) {
        store(rows.sum[row] + cell, all(0.0f));
    }
    rows.max[row] = -INFINITY;
}

// e to the power of x, within 2e-7 of it; x is 80 at most.
PLR_TARGET inline Vector exponential(Vector x) {
    x              = bounded(x);
    const Vector n = rounded(x * all(1.44269504f));
    Vector       r = minus_product(x, n, all(0.693359375f));
    r              = minus_product(r, n, all(-2.12194440e-4f));
    Vector p       = all(1.0f / 720);
    for (const float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
        p = plus_product(all(c), p, r);
    }
    return times_two_to(p, n);
}

// What the cells of a tile weigh for a row, and by what earlier cells count less from now on.
struct Weights {
    Vector cells[kParts], earlier;
};

PLR_TARGET inline Weights weigh(Rows & rows, int row, const Vector (&scores)[kParts],
                                const Tile & tile) {
    Vector score[kParts];
    for (int part = 0; part < kParts; ++part) {
        score[part] = plus_product(scores[part], floats(tile.mask + part * kVector),
                                   all(rows.slope[row]));
    }
    Weights     weights{{}, all(1.0f)};
    const float best = largest(score, tile.used);
    if (best > rows.max[row]) {  // the first time everything is zero
        weights.earlier = exponential(all(std::fmax(rows.max[row] - best, -100.0f)));
        rows.max[row]   = best;
    }
    for (int part = 0; part < kParts; ++part) {
        float * const sum   = rows.sum[row] + part * kVector;
        weights.cells[part] = only(tile.used >> part * kVector,
                                   exponential(score[part] - all(rows.max[row])));
        store(sum, plus_product(weights.cells[part], load(sum), weights.earlier));
    }
    return weights;
}

PLR_TARGET PLR_CALLED inline void finish(const Rows & rows, int row, float * out, int n_value) {
    const float  sum   = total(rows.sum[row]);
    const Vector share = all(sum > 0 ? 1 / sum : 0.0f);  // a row may see nothing
    for (int d = 0; d < n_value; d += kVector) {
        store_unaligned(out + d, load(rows.out[row] + d) * share);
    }
}

// Keys and values of a tile as floats: keys value by value, so that cells are lanes.
struct Panels : Tile {
    alignas(64) float keys[kMaxHead * kCells];
    alignas(64) float values[kCells][kMaxHead];

    PLR_TARGET PLR_CALLED Panels(const Tile & tile, int n_key, int n_value) : Tile(tile) {
        float_tile::pack(keys, tile.k, n_key);
        for (int cell = 0; cell < kCells; ++cell) {
            for (int d = 0; d < n_value; d += kVector) {
                store(values[cell] + d, floats(tile.v[cell] + d));
            }
        }
    }
};

// Of the values of *cell*, those from *d* on.
PLR_TARGET inline Vector value_of(const Tile & tile, int cell, int d) {
    return floats(tile.v[cell] + d);
}
PLR_TARGET inline Vector value_of(const Panels & panels, int cell, int d) {
    return load(panels.values[cell] + d);
}

// H rows of products with the keys of kVector cells, of every kVector-th value from kOrder[kLane]
// on; then of kLanes such lanes. PartialSums adds the lanes of a vector in this order.
template <int H, int kLane, int kLanes>
PLR_TARGET PLR_WHOLE void add_lanes(Vector (&to)[H], const float (*q)[kMaxHead], const float * keys,
                                    int n_key) {
    if constexpr (kLanes == 1) {
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h) {
            to[h] = all(0.0f);
        }
        for (int d = kOrder[kLane]; d < n_key; d += kVector) {
            const Vector key = load(keys + d * kCells);
#pragma GCC unroll 4
            for (int h = 0; h < H; ++h) {
                to[h] = plus_product(to[h], all(q[h][d]), key);
            }
        }
    } else {
        Vector others[H];
        add_lanes<H, kLane, kLanes / 2>(to, q, keys, n_key);
        add_lanes<H, kLane + kLanes / 2, kLanes / 2>(others, q, keys, n_key);
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h) {
            to[h] = to[h] + others[h];
        }
    }
}

template <int H>
PLR_TARGET inline void scores(Vector (&to)[H][kParts], const Rows & rows, int first,
                              const Panels & panels, int n_key) {
    for (int part = 0; part < kParts; ++part) {
        Vector sums[H];
        add_lanes<H, 0, kVector>(sums, rows.q + first, panels.keys + part * kVector, n_key);
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h) {
            to[h][part] = sums[h];
        }
    }
}

template <int H>
PLR_TARGET inline void scores(Vector (&to)[H][kParts], const Rows & rows, int first,
                              const Tile & tile, int n_key) {
    constexpr int kOnce = vectors_once(H);
    for (int part = 0; part < kParts; ++part) {
        PartialSums partial[H];
#pragma GCC unroll 4
        for (int group = 0; group < kVector / kOnce; ++group) {
            Vector sums[H][kOnce];
#pragma GCC unroll 4
            for (int h = 0; h < H; ++h) {
#pragma GCC unroll 4
                for (int i = 0; i < kOnce; ++i) {
                    sums[h][i] = all(0.0f);
                }
            }
            for (int d = 0; d < n_key; d += kVector) {
                Vector key[kOnce];
#pragma GCC unroll 4
                for (int i = 0; i < kOnce; ++i) {
                    key[i] = floats(tile.k[part * kVector + group * kOnce + i] + d);
                }
#pragma GCC unroll 4
                for (int h = 0; h < H; ++h) {
                    const Vector q = load(rows.q[first + h] + d);
#pragma GCC unroll 4
                    for (int i = 0; i < kOnce; ++i) {
                        sums[h][i] = plus_product(sums[h][i], q, key[i]);
                    }
                }
            }
#pragma GCC unroll 4
            for (int h = 0; h < H; ++h) {
                partial[h].take(group, sums[h]);
            }
        }
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h) {
            to[h][part] = partial[h].sums();
        }
    }
}

// V vectors of the values, from dimension d.
template <int H, int V, class AnyTile>
PLR_TARGET inline void add_values(Rows & rows, int first, const AnyTile & tile, int d,
                                  const float (&weight)[H][kCells],
                                  const Vector (&earlier)[H]) {
    Vector out[H][V];
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
#pragma GCC unroll 4
        for (int i = 0; i < V; ++i) {
            out[h][i] = load(rows.out[first + h] + d + i * kVector) * earlier[h];
        }
    }
    for (int cell = 0; cell < kCells; ++cell) {
        Vector value[V];
#pragma GCC unroll 4
        for (int i = 0; i < V; ++i) {
            value[i] = value_of(tile, cell, d + i * kVector);
        }
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h) {
            const Vector share = all(weight[h][cell]);
#pragma GCC unroll 4
            for (int i = 0; i < V; ++i) {
                out[h][i] = plus_product(out[h][i], share, value[i]);
            }
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
#pragma GCC unroll 4
        for (int i = 0; i < V; ++i) {
            store(rows.out[first + h] + d + i * kVector, out[h][i]);
        }
    }
}

// Rows first to first + H.
template <int H, class AnyTile>
PLR_TARGET PLR_CALLED inline void attend_heads(Rows & rows, int first, const AnyTile & tile,
                                               int n_key, int n_value) {
    Vector score[H][kParts], earlier[H];
    scores<H>(score, rows, first, tile, n_key);
    alignas(64) float weight[H][kCells];
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
        const Weights weights = weigh(rows, first + h, score[h], tile);
        for (int part = 0; part < kParts; ++part) {
            store(weight[h] + part * kVector, weights.cells[part]);
        }
        earlier[h] = weights.earlier;
    }
    constexpr int kOnce = vectors_once(H);
    int           d     = 0;
    for (; d + kOnce * kVector <= n_value; d += kOnce * kVector) {
        add_values<H, kOnce>(rows, first, tile, d, weight, earlier);
    }
    for (; d < n_value; d += kVector) {
        add_values<H, 1>(rows, first, tile, d, weight, earlier);
    }
}

inline void attend(Rows & rows, int first, int n_heads, const Tile & tile, int n_key,
                   int n_value) {
    using Heads = void (*)(Rows &, int, const Tile &, int, int);
    constexpr Heads kHeads[kHeadsOnce] = {attend_heads<1, Tile>, attend_heads<2, Tile>,
                                          attend_heads<3, Tile>, attend_heads<4, Tile>};
    int h = 0;
    if constexpr (kMany <= kMaxRows) {
        if (n_heads >= kMany) {
            const Panels panels(tile, n_key, n_value);
            for (; h + kHeadsOnce <= n_heads; h += kHeadsOnce) {
                attend_heads<kHeadsOnce>(rows, first + h, panels, n_key, n_value);
            }
        }
    }
    for (; h < n_heads; h += kHeadsOnce) {
        const int n = n_heads - h < kHeadsOnce ? n_heads - h : kHeadsOnce;
        kHeads[n - 1](rows, first + h, tile, n_key, n_value);
    }
}

// x times 0.5 (1 + tanh(u)), which is x / (1 + e to the power of -2u).
PLR_TARGET inline Vector gelu_of(Vector x) {
    const Vector u = all(0.79788456f) * plus_product(x, all(0.044715f) * x * x, x);
    return x / (all(1.0f) + exponential(smaller(all(-2.0f) * u, all(80.0f))));
}

PLR_TARGET PLR_CALLED inline void gelu(float * to, const float * from, int64_t n) {
    int64_t i = 0;
    for (; i + kVector <= n; i += kVector) {
        store_unaligned(to + i, gelu_of(load_unaligned(from + i)));
    }
    if (i < n) {
        alignas(64) float rest[kVector] = {};
        std::memcpy(rest, from + i, (n - i) * sizeof(float));
        store(rest, gelu_of(load(rest)));
        std::memcpy(to + i, rest, (n - i) * sizeof(float));
    }
}

inline const Unit kUnit = {kVector, visible, begin, attend, finish, gelu};

#undef PLR_TARGET
