// Products of columns of floats with rows of floats or half floats, by AVX2, and what is added
// to them.
//
// Sixteen rows become a panel (float_tile.h), which stays in the nearest cache
// while many columns are multiplied with it. Nodes behind a product, which add a bias, take a
// GELU or add the input of a layer, join it: a part of the product does their work while its
// sums are in the cache, and nobody else.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "attention.h"
#include "custom_node.h"
#include "elementwise.h"
#include "float_tile.h"
#include "ggml-backend.h"
#include "ggml.h"

template <class Tile>
class FloatProduct {
  public:
    // Whether this kernel computes *node*; makes room for its columns.
    bool takes(const ggml_tensor * node) {
        if (node->op != GGML_OP_MUL_MAT || !Tile::is_usable()) {
            return false;
        }
        const ggml_tensor *rows = node->src[0], *columns = node->src[1];
        const bool is_here = rows->buffer != nullptr && ggml_backend_buffer_is_host(rows->buffer);
        return is_here && rows->type == Tile::kType && node->op_params[1] == GGML_HINT_NONE &&
               columns->type == GGML_TYPE_F32 && rows->nb[0] == ggml_type_size(rows->type) &&
               columns->nb[0] == sizeof(float) && node->nb[0] == sizeof(float) &&
               rows->ne[0] % Tile::kOnce == 0 &&
               (!Tile::kPacksColumns ||
                (ggml_n_dims(columns) <= 2 &&
                 packed_.reserve(columns->ne[1] * parts_of(rows) * sizeof(Column))));
    }

    // What *node*, which comes after *leader*, keeps: whether it finds the columns of that.
    static NodeState state(const ggml_tensor * node, const ggml_tensor * leader) {
        NodeState state{};
        state.has_columns = leader != nullptr && leader->src[1] == node->src[1];
        return state;
    }

    // Whether the product, with *tail* as the last node that has joined it, does the work of
    // *node* from now on.
    static bool joins(ggml_tensor * product, const ggml_tensor * tail, const ggml_tensor * node) {
        if (!joined::is_in_place(node, tail) || ggml_n_dims(node) > 2 ||
            product->src[kInput] != nullptr) {
            return false;
        }
        NodeState & state = NodeState::of(product);
        if (node->op == GGML_OP_UNARY && ggml_get_unary_op(node) == GGML_UNARY_OP_GELU) {
            return !std::exchange(state.has_gelu, 1);
        }
        if (node->op != GGML_OP_ADD || node->src[1]->type != GGML_TYPE_F32 ||
            node->src[1]->nb[0] != sizeof(float)) {
            return false;
        }
        const bool is_row = joined::is_row(node->src[1], node->ne[0]);
        if (is_row ? product->src[kBias] != nullptr || state.has_gelu
                   : !ggml_are_same_shape(node->src[1], node)) {
            return false;
        }
        product->src[is_row ? kBias : kInput] = node->src[1];
        return true;
    }

    // Every thread of libllama calls this for every product, and takes one part at a time.
    static void compute(ggml_tensor * node, int ith, int n_threads, void * data) {
        const int   n_rows = int(node->ne[0]), n_columns = int(node->ne[1]);
        const int   n_chunks = (n_rows + kChunk - 1) / kChunk;
        const int   n_groups = std::max(1, std::min(kEach * n_threads / n_chunks, n_columns));
        const int   n_each   = n_chunks * n_groups;  // parts of a matrix
        const int   n_parts  = n_each * int(node->ne[2] * node->ne[3]);
        NodeState & state    = NodeState::of(node);
        auto *      columns =
            reinterpret_cast<Column *>(static_cast<FloatProduct *>(data)->packed_.data());
        if constexpr (Tile::kPacksColumns) {
            if (!state.has_columns) {
                pack(*node->src[1], columns, n_columns * ith / n_threads,
                     n_columns * (ith + 1) / n_threads);
                state.wait_for_all(n_threads);
            }
        }
        for (int part = state.take(); part < n_parts; part = state.take()) {
            const int row = part % n_chunks * kChunk, group = part / n_chunks % n_groups;
            const Matrices of(node, columns, part / n_each % node->ne[2],
                              part / n_each / node->ne[2]);
            multiply(of, row, std::min(row + kChunk, n_rows), n_columns * group / n_groups,
                     n_columns * (group + 1) / n_groups);
        }
    }

  private:
    using Panel  = typename Tile::Panel;
    using Column = typename Tile::Column;  // a part of one

    static constexpr int kBias = 2, kInput = 3;  // sources of a product that others have joined
    static constexpr int kPanel = float_tile::kPanel, kColumns = float_tile::kColumns;
    static constexpr int kDepth = Tile::kDepth;
    static constexpr int kChunk = 32;  // rows that a thread takes at a time
    static constexpr int kEach  = 4;   // parts for each thread, so that all have work to the end
    static constexpr int kBlock = 48;  // columns that stay in the cache of a core; whole tiles

    // One product of a batch of them.
    struct Matrices {
        const ggml_tensor * node;
        int                 n_values, n_parts;  // of a row
        const char *        rows;
        const char *        columns;
        size_t              column_stride;  // in bytes
        float *             out;
        size_t              stride;  // of a column of *out*, in floats

        Matrices(const ggml_tensor * product, const Column * packed, int64_t i2, int64_t i3)
            : node(product),
              n_values(int(product->src[0]->ne[0])),
              n_parts(parts_of(product->src[0])),
              rows(at(product->src[0], i2 * product->src[0]->ne[2] / product->ne[2],
                      i3 * product->src[0]->ne[3] / product->ne[3])),
              columns(Tile::kPacksColumns ? reinterpret_cast<const char *>(packed)
                                          : at(product->src[1], i2, i3)),
              column_stride(Tile::kPacksColumns ? n_parts * sizeof(Column)
                                                : product->src[1]->nb[1]),
              out(reinterpret_cast<float *>(at(product, i2, i3))),
              stride(product->nb[1] / sizeof(float)) {}

        const Column * column(int index) const {
            return reinterpret_cast<const Column *>(columns + index * column_stride);
        }

        static char * at(const ggml_tensor * tensor, int64_t i2, int64_t i3) {
            return static_cast<char *>(tensor->data) + i2 * tensor->nb[2] + i3 * tensor->nb[3];
        }
    };

    static int parts_of(const ggml_tensor * rows) {
        return (int(rows->ne[0]) + kDepth - 1) / kDepth;
    }

    // All sums of a block stand together until they are complete, because the columns of the
    // result can be so far apart that the cache holds few of them.
    static void multiply(const Matrices & of, int row, int row_end, int column, int column_end) {
        constexpr int       n_panels = kChunk / kPanel;  // of a part
        const ggml_tensor & rows     = *of.node->src[0];
        Panel *             panels   = room(of.n_parts * n_panels);
        alignas(64) float   sums[kBlock][kChunk] = {};
        for (int part = 0; part < of.n_parts; ++part) {
            for (int at = row; at < row_end; at += kPanel) {
                Tile::pack(panels[part * n_panels + (at - row) / kPanel],
                           of.rows + at * rows.nb[1] + part * kDepth * rows.nb[0], rows.nb[1],
                           std::min(kPanel, row_end - at),
                           std::min(kDepth, of.n_values - part * kDepth));
            }
        }
        for (int block = column; block < column_end; block += kBlock) {
            const int end = std::min(block + kBlock, column_end);
            for (int part = 0; part < of.n_parts; ++part) {
                const int n = std::min(kDepth, of.n_values - part * kDepth);
                for (int at = 0; at < row_end - row; at += kPanel) {
                    for (int c = block; c < end; c += kColumns) {
                        const Column * columns[kColumns];
                        for (int i = 0; i < kColumns; ++i) {  // a rest repeats its last one
                            columns[i] = of.column(std::min(c + i, end - 1)) + part;
                        }
                        Tile::add(sums[c - block] + at, kChunk,
                                  panels[part * n_panels + at / kPanel], columns, n, part == 0);
                    }
                }
            }
            finish(of, sums[0], row, row_end - row, block, end - block);
        }
    }

    // Does with *n* sums of each column what the nodes that have joined do, and puts them in
    // place.
    static void finish(const Matrices & of, float * sums, int row, int n, int column,
                       int n_columns) {
        const ggml_tensor *bias = of.node->src[kBias], *input = of.node->src[kInput];
        if (bias != nullptr) {
            joined::add(sums, kChunk, n_columns, static_cast<const float *>(bias->data) + row, 0, n);
        }
        if (NodeState::of(of.node).has_gelu) {
            Attention::unit()->gelu(sums, sums, n_columns * kChunk);
        }
        const size_t  stride = input == nullptr ? 0 : input->nb[1] / sizeof(float);
        const float * more =
            input == nullptr ? nullptr
                             : static_cast<const float *>(input->data) + column * stride + row;
        joined::place(of.out + column * of.stride + row, of.stride, sums, kChunk, more, stride,
                      n_columns, n);
    }

    static void pack(const ggml_tensor & from, Column * to, int first, int last) {
        const int n_parts = parts_of(&from), n_values = int(from.ne[0]);
        for (int at = first * n_parts; at < last * n_parts; ++at) {
            const int    part = at % n_parts;
            const char * data = static_cast<const char *>(from.data) + at / n_parts * from.nb[1];
            Tile::pack(to[at], reinterpret_cast<const float *>(data) + part * kDepth,
                       std::min(kDepth, n_values - part * kDepth));
        }
    }

    // Memory of this thread for *n* panels.
    static Panel * room(size_t n) {
        thread_local std::vector<Panel> memory;
        memory.resize(std::max(memory.size(), n));
        return memory.data();
    }

    Scratch packed_;
};
