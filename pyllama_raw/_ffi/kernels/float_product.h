// Products of columns of floats with rows of 16 or 32 bits, by AVX2, and what is added to them.
//
// Sixteen rows become a panel of floats (float_tile.h), which stays in the nearest cache while
// many columns are multiplied with it. Nodes behind a product, which add a bias, take a GELU or
// add the input of a layer, join it: a part of the product does their work while its sums are
// in the cache, and nobody else.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "attention.h"
#include "custom_node.h"
#include "float_tile.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "joined.h"

class FloatProduct {
  public:
    // libllama uses the wider vectors of AVX-512 where there are some.
    static bool is_usable() { return has_avx2() && !has_avx512(); }

    static bool takes(const ggml_tensor * node) {
        if (node->op != GGML_OP_MUL_MAT || !is_usable()) {
            return false;
        }
        const ggml_tensor *rows = node->src[0], *columns = node->src[1];
        const bool is_here = rows->buffer != nullptr && ggml_backend_buffer_is_host(rows->buffer);
        return is_here && (rows->type == GGML_TYPE_F32 || rows->type == GGML_TYPE_F16) &&
               node->op_params[1] == GGML_HINT_NONE && columns->type == GGML_TYPE_F32 &&
               rows->nb[0] == ggml_type_size(rows->type) &&
               columns->nb[0] == sizeof(float) && node->nb[0] == sizeof(float);
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
    static void compute(ggml_tensor * node, int, int, void *) {
        const int   n_rows = int(node->ne[0]), n_columns = int(node->ne[1]);
        const int   n_chunks = (n_rows + kChunk - 1) / kChunk;
        const int   n_groups = (n_columns + kGroup - 1) / kGroup;
        const int   n_each   = n_chunks * n_groups;  // parts of a matrix
        const int   n_parts  = n_each * int(node->ne[2] * node->ne[3]);
        NodeState & state    = NodeState::of(node);
        for (int part = state.take(); part < n_parts; part = state.take()) {
            const int row = part % n_chunks * kChunk, column = part / n_chunks % n_groups * kGroup;
            const Matrices of(node, part / n_each % node->ne[2], part / n_each / node->ne[2]);
            multiply(of, row, std::min(row + kChunk, n_rows), column,
                     std::min(column + kGroup, n_columns));
        }
    }

  private:
    static constexpr int kBias = 2, kInput = 3;  // sources of a product that others have joined
    static constexpr int kPanel = float_tile::kPanel, kColumns = float_tile::kColumns;
    static constexpr int kDepth = 256;   // values of a row at a time: a panel is 16 KiB
    static constexpr int kChunk = 32;    // rows that a thread takes at a time
    static constexpr int kGroup = 768;   // and columns, for each of which it packs the rows anew
    static constexpr int kBlock = 96;    // columns that stay in the cache of a core

    // One product of a batch of them.
    struct Matrices {
        const ggml_tensor * node;
        const char *        rows;
        const char *        columns;
        float *             out;
        size_t              stride;  // of a column of *out*, in floats

        Matrices(const ggml_tensor * product, int64_t i2, int64_t i3)
            : node(product),
              rows(at(product->src[0], i2 * product->src[0]->ne[2] / product->ne[2],
                      i3 * product->src[0]->ne[3] / product->ne[3])),
              columns(at(product->src[1], i2, i3)),
              out(reinterpret_cast<float *>(at(product, i2, i3))),
              stride(product->nb[1] / sizeof(float)) {}

        static char * at(const ggml_tensor * tensor, int64_t i2, int64_t i3) {
            return static_cast<char *>(tensor->data) + i2 * tensor->nb[2] + i3 * tensor->nb[3];
        }
    };

    static void multiply(const Matrices & of, int row, int row_end, int column, int column_end) {
        const ggml_tensor & rows     = *of.node->src[0];
        const int           n_values = int(rows.ne[0]);
        const int           n_parts  = (n_values + kDepth - 1) / kDepth;
        alignas(64) float   panels[kChunk * kDepth];
        for (int part = 0; part < n_parts; ++part) {
            const int first = n_values * part / n_parts, n = n_values * (part + 1) / n_parts - first;
            for (int at = row; at < row_end; at += kPanel) {
                float_tile::pack(panels + (at - row) * n,
                                 of.rows + at * rows.nb[1] + first * rows.nb[0], rows.nb[1],
                                 std::min(kPanel, row_end - at), rows.type == GGML_TYPE_F16, n);
            }
            for (int block = column; block < column_end; block += kBlock) {
                const int end = std::min(block + kBlock, column_end);
                for (int at = row; at < row_end; at += kPanel) {
                    const int n_rows = std::min(kPanel, row_end - at);
                    for (int c = block; c < end; c += kColumns) {
                        tile(of, panels + (at - row) * n, at, n_rows, c,
                             std::min(kColumns, end - c), first, n);
                    }
                }
                for (int c = block; part + 1 == n_parts && c < end; ++c) {
                    finish(of, row, row_end - row, c);
                }
            }
        }
    }

    // Adds *n* values of a panel to the sums of some columns; the first ones begin them.
    static void tile(const Matrices & of, const float * panel, int row, int n_rows, int column,
                     int n_columns, int first, int n) {
        float *       out = of.out + column * of.stride + row;
        const float * columns[kColumns];
        for (int c = 0; c < kColumns; ++c) {
            const int at = column + std::min(c, n_columns - 1);  // a rest repeats its last one
            columns[c] =
                reinterpret_cast<const float *>(of.columns + at * of.node->src[1]->nb[1]) + first;
        }
        if (n_rows == kPanel && n_columns == kColumns) {
            float_tile::add(out, of.stride, panel, columns, n, first == 0);
            return;
        }
        alignas(32) float sums[kColumns][kPanel];
        for (int c = 0; first != 0 && c < n_columns; ++c) {
            std::copy_n(out + c * of.stride, n_rows, sums[c]);
        }
        float_tile::add(sums[0], kPanel, panel, columns, n, first == 0);
        for (int c = 0; c < n_columns; ++c) {
            std::copy_n(sums[c], n_rows, out + c * of.stride);
        }
    }

    // The work of the nodes that have joined, for *n* rows of a column.
    static void finish(const Matrices & of, int row, int n, int column) {
        const ggml_tensor *bias = of.node->src[kBias], *input = of.node->src[kInput];
        float *            out = of.out + column * of.stride + row;
        if (bias != nullptr) {
            joined::add(out, static_cast<const float *>(bias->data) + row, n);
        }
        if (NodeState::of(of.node).has_gelu) {
            Attention::unit()->gelu(out, out, n);
        }
        if (input != nullptr) {
            const char * data = static_cast<const char *>(input->data) + column * input->nb[1];
            joined::add(out, reinterpret_cast<const float *>(data) + row, n);
        }
    }
};
