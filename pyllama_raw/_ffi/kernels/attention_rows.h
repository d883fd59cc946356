// Rows of attention and the tiles of 16 cells that they look at.
//
// A tile holds cells that its row sees, so what comes of a row does not depend on others.
#pragma once

#include <cstddef>
#include <cstdint>

namespace attention {

constexpr int kCells = 16, kMaxRows = 48, kMaxHead = 128;
constexpr int kHeadsOnce = 4;  // that share what is read of a tile

// Rows of one key head; a row is a head of a token.
struct Rows {
    alignas(64) float q[kMaxRows][kMaxHead];  // scaled
    alignas(64) float out[kMaxRows][kMaxHead];
    alignas(64) float sum[kMaxRows][kCells];  // of weights, a lane for each cell of a tile
    float max[kMaxRows];
};

// Keys and values of up to 16 cells as half floats, wherever they are.
struct Tile {
    const uint16_t *k[kCells], *v[kCells];
    uint16_t    mask[kCells];  // half floats, added to the scores
    uint32_t    used;          // a bit a cell; the others repeat a cell
};

// What a kind of CPU computes; *visible*: which of the cells, a multiple of 16, *mask* does
// not hide, in order, and how many. *to* has room for 16 more, which repeat the last.
struct Unit {
    int vector;  // floats; heads are multiples of it
    int (*visible)(int32_t * to, const uint16_t * mask, int n_cells);
    void (*begin)(Rows & rows, int row, const float * q, float scale, int n_key);
    // Rows first to first + n_heads, those of a token, look at the cells of *tile*.
    void (*attend)(Rows & rows, int first, int n_heads, const Tile & tile, int n_key,
                   int n_value);
    void (*finish)(const Rows & rows, int row, float * out, int n_value);
};

}  // namespace attention
