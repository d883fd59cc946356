// Attention of whole texts that stand side by side, as an encoder computes them, by AVX2.
//
// The tokens of a text see each other and nobody else, so keys and values of a text become
// panels of floats once for many of its tokens (float_tile.h). A text has the same bits in
// every company.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "attention.h"
#include "float_tile.h"

class TextAttention {
  public:
    // Every thread of libllama calls this for every attention, and takes one part at a time.
    // Where tokens see something else, Attention computes.
    static void compute(ggml_tensor * node, int ith, int n_threads, void * orders) {
        thread_local std::vector<Part> parts;
        if (!find(parts, node)) {
            return Attention::compute(node, ith, n_threads, orders);
        }
        const int   n_keys = int(node->src[1]->ne[2]);
        const int   n_all  = int(parts.size()) * n_keys;
        NodeState & state  = NodeState::of(node);
        for (int at = state.take(); at < n_all; at = state.take()) {
            attend(node, parts[at / n_keys], at % n_keys);
        }
    }

  private:
    static constexpr int kPanel = float_tile::kPanel, kRows = float_tile::kColumns;
    static constexpr int kQueries = 128;  // tokens of a part

    // Some tokens of the text [first, last).
    struct Part {
        int first, last, begin, end;
    };

    // False unless all tokens are of texts.
    static bool find(std::vector<Part> & parts, const ggml_tensor * node) {
        const int n = int(node->src[0]->ne[1]);
        parts.clear();
        if (node->src[1]->ne[1] != n || node->src[0]->ne[3] != 1) {
            return false;
        }
        for (int first = 0, last; first < n; first = last) {
            const uint16_t * masks = Attention::masks_of(node, first, 0);
            for (last = first; last < n && masks[last] != Attention::kHidden; ++last) {}
            for (int token = first; token < std::max(last, first + 1); ++token) {
                const uint16_t * others = Attention::masks_of(node, token, 0);
                const bool       is_like =
                    token > first && std::memcmp(masks, others, n * sizeof(uint16_t)) == 0;
                if (!is_like && !sees(others, first, last, n)) {
                    return false;
                }
            }
            for (int begin = first; begin < last; begin += kQueries) {
                parts.push_back({first, last, begin, std::min(begin + kQueries, last)});
            }
        }
        return true;
    }

    // Whether *masks* shows the cells [first, last) of *n*, and no others.
    PLR_AVX2 PLR_CALLED static bool sees(const uint16_t * masks, int first, int last, int n) {
        int n_seen = 0, n_own = 0;
        for (int cell = 0; cell < n; ++cell) {
            n_seen += masks[cell] != Attention::kHidden;
        }
        for (int cell = first; cell < last; ++cell) {
            n_own += masks[cell] != Attention::kHidden;
        }
        return n_own == last - first && n_own > 0 && n_seen == n_own;
    }

    // Floats of this thread, for a text: panels of keys and values, and the scores of a tile.
    struct Room {
        float *keys, *values, *scores;
        size_t n_padded;  // cells of the text, and those that fill the last panel

        Room(int n, int n_key, int n_value) : n_padded((n + kPanel - 1) / kPanel * kPanel) {
            const size_t n_values = (n_value + kPanel - 1) / kPanel * kPanel;
            const size_t n_floats = n_padded * (n_key + n_values + kRows);
            thread_local std::vector<float> memory;
            memory.resize(std::max(memory.size(), n_floats + kPanel));
            const auto start = reinterpret_cast<uintptr_t>(memory.data());
            keys   = reinterpret_cast<float *>((start + 63) / 64 * 64);
            values = keys + n_padded * n_key;
            scores = values + n_padded * n_values;
        }
    };

    // Computes the tokens of *part*, for the heads that share one key head.
    static void attend(ggml_tensor * node, const Part & part, int key) {
        const ggml_tensor &q = *node->src[0], &k = *node->src[1], &v = *node->src[2];
        const int  n = part.last - part.first, n_key = int(k.ne[0]), n_value = int(v.ne[0]);
        const int  n_heads = int(q.ne[2] / k.ne[2]), n_rows = (part.end - part.begin) * n_heads;
        const Room room(n, n_key, n_value);
        for (int cell = 0; cell < n; cell += kPanel) {
            const uint16_t * rows[kPanel];
            float_tile::rows_of(rows, Attention::at(&k, part.first + cell, key, 0), k.nb[1], n - cell);
            float_tile::pack(room.keys + cell * n_key, rows, n_key);
        }
        for (int d = 0; d < n_value; d += kPanel) {
            unpack(room.values + d * room.n_padded, Attention::at(&v, part.first, key, 0) + 2 * d,
                   v.nb[1], std::min(kPanel, n_value - d), n);
        }
        for (int row = 0; row < n_rows; row += kRows) {
            const float * columns[kRows];
            for (int r = 0; r < kRows; ++r) {
                const int at = std::min(row + r, n_rows - 1);  // a rest repeats its last one
                columns[r]   = reinterpret_cast<const float *>(Attention::at(
                    &q, part.begin + at / n_heads, key * n_heads + at % n_heads, 0));
            }
            for (int cell = 0; cell < n; cell += kPanel) {
                float_tile::add(room.scores + cell, room.n_padded, room.keys + cell * n_key,
                                columns, n_key, true);
            }
            const int n_here = std::min(kRows, n_rows - row);
            float     shares[kRows];
            for (int r = 0; r < kRows; ++r) {
                columns[r] = room.scores + r * room.n_padded;
                if (r < n_here) {
                    const int token = part.begin + (row + r) / n_heads;
                    const int head = key * n_heads + (row + r) % n_heads;
                    shares[r] = weigh(room.scores + r * room.n_padded, n,
                                      Attention::masks_of(node, token, 0) + part.first,
                                      NodeState::of(node).scale, Attention::slope(node, head));
                }
            }
            for (int d = 0; d < n_value; d += kPanel) {
                alignas(32) float sums[kRows][kPanel];
                float_tile::add(sums[0], kPanel, room.values + d * room.n_padded, columns, n, true);
                for (int r = 0; r < n_here; ++r) {
                    float * out = reinterpret_cast<float *>(
                        static_cast<char *>(node->data) +
                        (key * n_heads + (row + r) % n_heads) * node->nb[1] +
                        (part.begin + (row + r) / n_heads) * node->nb[2]);
                    for (int i = 0; i < std::min(kPanel, n_value - d); ++i) {
                        out[d + i] = sums[r][i] * shares[r];
                    }
                }
            }
        }
    }

    // *n* cells of *n_values* halves each, 16 or 8, as 16 floats each.
    PLR_AVX2 PLR_CALLED static void unpack(float * to, const char * from, size_t stride,
                                           int n_values, int n) {
        for (int cell = 0; cell < n; ++cell, from += stride, to += kPanel) {
            const auto * halves = reinterpret_cast<const uint16_t *>(from);
            _mm256_store_ps(to, attention::avx2::floats(halves));
            _mm256_store_ps(to + 8, n_values > 8 ? attention::avx2::floats(halves + 8)
                                                 : _mm256_setzero_ps());
        }
    }

    // Makes weights of the scores of *n* cells; returns what makes shares of them.
    PLR_AVX2 PLR_CALLED static float weigh(float * scores, int n, const uint16_t * masks,
                                           float scale, float slope) {
        using namespace attention::avx2;
        Vector   most = all(-INFINITY), sum = all(0.0f);
        uint16_t rest[kVector];
        for (int i = 0; i < n; i += kVector) {
            const uint16_t * at = masks + i;
            if (n - i < kVector) {
                std::fill_n(std::copy(at, masks + n, rest), kVector - (n - i), Attention::kHidden);
                at = rest;
            }
            const Vector score =
                plus_product(load_unaligned(scores + i) * all(scale), floats(at), all(slope));
            most = _mm256_max_ps(most, score);
            store_unaligned(scores + i, score);
        }
        alignas(32) float lanes[kVector];
        store(lanes, most);
        most = all(*std::max_element(lanes, lanes + kVector));
        for (int i = 0; i < n; i += kVector) {
            const Vector weight = exponential(load_unaligned(scores + i) - most);
            sum                 = sum + weight;
            store_unaligned(scores + i, weight);
        }
        store(lanes, sum);
        return 1 / std::accumulate(lanes, lanes + kVector, 0.0f);
    }
};
