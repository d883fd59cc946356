// Flash attention that reads only the cells that a token sees.
//
// If all slots share one pool of cells, the cells of a sequence lie among the cells of all other
// sequences, because streams that decode side by side take cells in turn. The kernel of libllama
// looks at every cell for every row. This one first lists the cells that a token sees, in the
// order of their positions.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention_units.h"
#include "custom_node.h"
#include "ggml.h"

class Attention {
  public:
    // For each token of a graph its cells by position; null if these ascend. Empty if the cells
    // of all tokens ascend.
    using Orders = std::vector<const std::vector<int32_t> *>;

    // The best unit that this CPU can run; null if it can run none.
    static const attention::Unit * unit() {
        static const attention::Unit * const best = has_avx512() ? &attention::avx512::kUnit
                                                    : has_avx2() ? &attention::avx2::kUnit
                                                                 : nullptr;
        return best;
    }

    static bool takes(const ggml_tensor * node) {
        if (node->op != GGML_OP_FLASH_ATTN_EXT) {
            return false;
        }
        const ggml_tensor *q = node->src[0], *k = node->src[1], *v = node->src[2];
        const ggml_tensor * mask     = node->src[3];
        const float         softcap  = parameter(node, 2);
        return mask != nullptr && node->src[4] == nullptr && softcap == 0 &&
               q->type == GGML_TYPE_F32 && is_half(k) && is_half(v) && is_half(mask) &&
               mask->ne[2] == 1 && q->nb[0] == sizeof(float) && fits(k->ne[0]) &&
               fits(v->ne[0]) && heads_per_key(node) <= attention::kMaxRows && q->ne[2] % k->ne[2] == 0 &&
               v->ne[2] == k->ne[2];
    }

    // What the node says, kept before it becomes ours.
    static NodeState state(const ggml_tensor * node) {
        NodeState state{};
        state.scale    = parameter(node, 0);
        state.max_bias = parameter(node, 1);
        return state;
    }

    // By what the mask counts for a head, as ggml has it.
    // (Press, Smith, Lewis: Train Short, Test Long: Attention with Linear Biases, 2022)
    static float slope(const ggml_tensor * node, int head) {
        const float max_bias = NodeState::of(node).max_bias;
        if (max_bias <= 0) {
            return 1;
        }
        const int n_heads = int(node->src[0]->ne[2]), n_even = 1 << (31 - __builtin_clz(n_heads));
        return head < n_even ? std::pow(2.0f, -max_bias / n_even * (head + 1))
                             : std::pow(2.0f, -max_bias / 2 / n_even * (2 * (head - n_even) + 1));
    }

    static constexpr uint16_t kHidden = 0xfc00;  // -infinity

    static char * at(const ggml_tensor * tensor, int64_t i1, int64_t i2, int64_t i3) {
        return static_cast<char *>(tensor->data) + i1 * tensor->nb[1] + i2 * tensor->nb[2] +
               i3 * tensor->nb[3];
    }

    static const uint16_t * masks_of(const ggml_tensor * node, int token, int stream) {
        const ggml_tensor * mask = node->src[3];
        return halves_at(mask, token, 0, stream % mask->ne[3]);
    }

    // Every thread of libllama calls this for every operation, and takes one part at a time.
    static void compute(ggml_tensor * node, int, int n_threads, void * data) {
        const Orders &      orders    = *static_cast<const Orders *>(data);
        const ggml_tensor * q         = node->src[0];
        const int           n_tokens  = int(q->ne[1]), n_keys = int(node->src[1]->ne[2]);
        const int           n_streams = int(q->ne[3]);
        const int           n_most    = attention::kMaxRows / heads_per_key(node);
        // The tokens of a block share the reading of cells, so blocks are large; there are
        // several for each thread, so that all threads have work until the end.
        const int n_wanted = 3 * n_threads;
        const int n_each =
            std::clamp(n_tokens * n_keys * n_streams / n_wanted, 1, std::min(n_most, n_tokens));
        const int n_blocks = (n_tokens + n_each - 1) / n_each;
        NodeState & state  = NodeState::of(node);
        for (;;) {
            const int part = state.take();
            if (part >= n_blocks * n_keys * n_streams) {
                return;
            }
            const int first = part % n_blocks * n_each;
            block(node, first, std::min(first + n_each, n_tokens), part / n_blocks % n_keys,
                  part / n_blocks / n_keys, state.scale, orders);
        }
    }

  private:
    static float parameter(const ggml_tensor * node, int index) {
        float value;
        std::memcpy(&value, node->op_params + index, sizeof(value));
        return value;
    }

    static bool is_half(const ggml_tensor * tensor) {
        return tensor->type == GGML_TYPE_F16 && tensor->nb[0] == sizeof(uint16_t);
    }

    static bool fits(int64_t n_head) {
        return n_head % unit()->vector == 0 && n_head <= attention::kMaxHead;
    }

    static int heads_per_key(const ggml_tensor * node) {
        return int(node->src[0]->ne[2] / node->src[1]->ne[2]);
    }

    static const uint16_t * halves_at(const ggml_tensor * tensor, int64_t i1, int64_t i2,
                                      int64_t i3) {
        return reinterpret_cast<const uint16_t *>(at(tensor, i1, i2, i3));
    }

    // Computes tokens *first* to *last* of one stream, for the heads that share one key head.
    static void block(ggml_tensor * node, int first, int last, int key, int stream, float scale,
                      const Orders & orders) {
        const ggml_tensor *q = node->src[0], *k = node->src[1];
        const int       n_heads = heads_per_key(node), n_tokens = last - first;
        const int       n_key = int(k->ne[0]), n_value = int(node->src[2]->ne[0]);
        attention::Rows rows;
        for (int row = 0; row < n_tokens * n_heads; ++row) {
            const int    head = key * n_heads + row % n_heads;
            const char * data = at(q, first + row / n_heads, head, stream);
            rows.slope[row]   = slope(node, head);
            unit()->begin(rows, row, reinterpret_cast<const float *>(data), scale, n_key, n_value);
        }
        const int64_t stride = k->ne[1] + attention::kCells;
        int32_t *     cells  = room(n_tokens * stride);
        Looking       looking{node, rows, first, key, stream, {}, {}};
        for (int i = 0; i < n_tokens; ++i) {
            const auto * order = orders.empty() ? nullptr : orders[first + i];
            looking.cells[i]   = cells + i * stride;
            looking.n_seen[i]  = list(cells + i * stride, node, first + i, stream, order);
        }
        look(looking, 0, n_tokens, 0);
        for (int row = 0; row < n_tokens * n_heads; ++row) {
            char * data = static_cast<char *>(node->data) +
                          (key * n_heads + row % n_heads) * node->nb[1] +
                          (first + row / n_heads) * node->nb[2] + stream * node->nb[3];
            unit()->finish(rows, row, reinterpret_cast<float *>(data), n_value);
        }
    }

    // Tokens of one stream from *token* on, the rows of their heads, and the cells that each sees.
    struct Looking {
        const ggml_tensor * node;
        attention::Rows &   rows;
        int                 token, key, stream;
        const int32_t *     cells[attention::kMaxRows];
        int                 n_seen[attention::kMaxRows];

        // Whether both see the same cells in the tile from *cell* on. A bias has their distances.
        bool are_alike(int i, int other, int cell) const {
            const int n = std::clamp(n_seen[i] - cell, 0, attention::kCells);
            return n == std::clamp(n_seen[other] - cell, 0, attention::kCells) &&
                   std::equal(cells[i] + cell, cells[i] + cell + n, cells[other] + cell) &&
                   NodeState::of(node).max_bias <= 0;
        }
    };

    // Tokens begin to end, which go together as long as they see the same, as tokens of a prompt do,
    // or streams whose prompts begin alike. So a tile is read once for all of them. Each token has
    // the tiles that it has alone, in their order, so what it computes does not depend on others.
    static void look(const Looking & at, int begin, int end, int cell) {
        const auto end_of_alike = [&](int i) {
            int other = i + 1;
            while (other < end && at.are_alike(i, other, cell)) {
                ++other;
            }
            return other;
        };
        for (; end_of_alike(begin) == end; cell += attention::kCells) {
            if (cell >= at.n_seen[begin]) {
                return;
            }
            attend(at, begin, end, cell);
        }
        for (int i = begin, next; i < end; i = next) {
            next = end_of_alike(i);
            look(at, i, next, cell);
        }
    }

    static void prefetch(const uint16_t * halves, int64_t n) {
        constexpr int kLine = 64 / sizeof(uint16_t);
        for (int64_t i = 0; i < n; i += kLine) {
            __builtin_prefetch(halves + i);
        }
    }

    // The tile from *cell* on.
    static void attend(const Looking & at, int begin, int end, int cell) {
        const ggml_tensor *k = at.node->src[1], *v = at.node->src[2];
        const int          n_heads = heads_per_key(at.node);
        const uint16_t *   masks   = masks_of(at.node, at.token + begin, at.stream);
        const int32_t *    cells   = at.cells[begin] + cell;
        attention::Tile    tile;
        for (int c = 0; c < attention::kCells; ++c) {
            tile.k[c]    = halves_at(k, cells[c], at.key, at.stream);
            tile.v[c]    = halves_at(v, cells[c], at.key, at.stream);
            tile.mask[c] = masks[cells[c]];
        }
        // The next tile comes meanwhile: its cells may be anywhere, so the CPU does not foresee them.
        const int n_next = std::min(at.n_seen[begin] - cell - attention::kCells, attention::kCells);
        for (int c = attention::kCells; c < attention::kCells + n_next; ++c) {
            prefetch(halves_at(k, cells[c], at.key, at.stream), k->ne[0]);
            prefetch(halves_at(v, cells[c], at.key, at.stream), v->ne[0]);
        }
        tile.used = (1u << std::min(at.n_seen[begin] - cell, attention::kCells)) - 1;
        unit()->attend(at.rows, begin * n_heads, (end - begin) * n_heads, tile, int(k->ne[0]),
                       int(v->ne[0]));
    }

    // Memory of this thread for lists of cells.
    static int32_t * room(int64_t n) {
        thread_local std::vector<int32_t> cells;
        cells.resize(std::max(cells.size(), size_t(n)));
        return cells.data();
    }

    // Writes the cells that a token sees, and 16 more that may be read; returns how many it
    // sees. They are in *order*, unless the mask shows other cells than *order* has.
    static int list(int32_t * to, const ggml_tensor * node, int token, int stream,
                    const std::vector<int32_t> * order) {
        const auto *       masks   = masks_of(node, token, stream);
        const int          n_cells = int(node->src[1]->ne[1]);
        const int          n_seen  = visible(to, masks, n_cells);
        if (order == nullptr || n_seen == 0) {
            return n_seen;
        }
        int n = 0;
        for (const int32_t cell : *order) {
            if (cell >= 0 && cell < n_cells && masks[cell] != kHidden && n < n_seen) {
                to[n++] = cell;
            }
        }
        if (n < n_seen) {
            return visible(to, masks, n_cells);
        }
        std::fill(to + n, to + n + attention::kCells, to[n - 1]);
        return n;
    }

    // Like that of the unit, for any number of cells: texts of an encoder have as many cells as
    // tokens.
    static int visible(int32_t * to, const uint16_t * masks, int n_cells) {
        const int n_rest = n_cells % attention::kCells, n_whole = n_cells - n_rest;
        int       n_seen = unit()->visible(to, masks, n_whole);
        if (n_rest == 0) {
            return n_seen;
        }
        for (int cell = n_whole; cell < n_cells; ++cell) {
            if (masks[cell] != kHidden) {
                to[n_seen++] = cell;
            }
        }
        std::fill(to + n_seen, to + n_seen + attention::kCells, n_seen ? to[n_seen - 1] : 0);
        return n_seen;
    }
};
