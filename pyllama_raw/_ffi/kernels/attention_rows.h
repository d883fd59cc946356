// The rows of attention, and tiles of 16 cells that a row looks at.
//
// A tile holds only cells that its row sees, so the result of a row does not depend on other
// rows.
#pragma once

#include <cstddef>
#include <cstdint>

namespace attention {

constexpr int kCells = 16, kMaxRows = 48, kMaxHead = 128;
constexpr int kHeadsOnce = 4;  // heads that share what is read of a tile
constexpr int kMany = 8;  // rows that gain by panels

// Rows of one key head; a row is a head of a token.
struct Rows {
    alignas(64) float q[kMaxRows][kMaxHead];  // scaled
    alignas(64) float out[kMaxRows][kMaxHead];
    alignas(64) float sum[kMaxRows][kCells];  // of weights, by cell of a tile
    float max[kMaxRows];
    float slope[kMaxRows];  // by what a mask counts
};

// Keys and values of up to 16 cells as half floats, wherever they are.
struct Tile {
    const uint16_t *k[kCells], *v[kCells];
    uint16_t    mask[kCells];  // half floats, added to the scores by the slope of a row
    uint32_t    used;          // a bit a cell; the others repeat a cell
};

// The functions for one kind of CPU.
struct Unit {
    int vector;  // floats; heads are multiples of it
    // Writes the cells that *mask* does not hide, in order, and returns how many these are.
    // n_cells is a multiple of 16; *to* has room for 16 more cells, which repeat the last.
    int (*visible)(int32_t * to, const uint16_t * mask, int n_cells);
    void (*begin)(Rows & rows, int row, const float * q, float scale, int n_key, int n_value);
    // The n_heads rows of a token, from *first* on, look at the cells of *tile*.
    void (*attend)(Rows & rows, int first, int n_heads, const Tile & tile, int n_key,
                   int n_value);
    void (*finish)(const Rows & rows, int row, float * out, int n_value);
    void (*gelu)(float * to, const float * from, int64_t n);
};

}  // namespace attention
