// Products with weights of one type (weight_blocks.h): which nodes are taken, and how threads
// share a product that product_tile.h computes.
#pragma once

#include <algorithm>
#include <cstring>

#include "custom_node.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "product_tile.h"
#include "scratch.h"

#pragma weak ggml_get_type_traits_cpu  // not there if the CPU backend is a plug-in

template <class W>
class Product {
  public:
    // Whether the CPU has the instructions, and our kernel gives the bits of libllama's. They
    // are compared once, because another build may add in another order.
    static bool is_usable() {
        static const bool value =
            has_avx512() && ggml_get_type_traits_cpu != nullptr && gives_same_bits();
        return value;
    }

    // Whether this kernel computes *node*; makes room for its columns.
    bool takes(const ggml_tensor * node) {
        if (node->op != GGML_OP_MUL_MAT || node->src[0]->type != W::kType) {
            return false;
        }
        const ggml_tensor * rows    = node->src[0];
        const ggml_tensor * columns = node->src[1];
        return is_plain(*rows) && node->op_params[1] == GGML_HINT_NONE && ggml_n_dims(rows) <= 2 &&
               ggml_n_dims(columns) <= 2 && columns->ne[1] > 1 &&  // libllama is as fast with one
               rows->ne[0] <= product::kMaxBlocks * product::kBlock &&
               columns->type == GGML_TYPE_F32 && columns->nb[0] == sizeof(float) &&
               packed_.reserve(columns->ne[1] *
                               Columns::bytes(int(rows->ne[0] / product::kBlock)));
    }

    // Every thread of libllama calls this for every product, as number *ith* of *n_threads*.
    static void compute(ggml_tensor * node, int ith, int n_threads, void * data) {
        const auto &        self     = *static_cast<const Product *>(data);
        const int           n_rows   = int(node->ne[0]);
        const int           n_blocks = int(node->src[0]->ne[0] / product::kBlock);
        const Columns       columns{self.packed_.data(), n_blocks};
        NodeState &         state = NodeState::of(node);
        pack(*node->src[1], columns, n_blocks * ith / n_threads,
             n_blocks * (ith + 1) / n_threads);
        state.wait_for_all(n_threads);
        for (;;) {
            const int first = state.take() * kChunk;
            if (first >= n_rows) {
                return;
            }
            multiply(node, columns, first, std::min(first + kChunk, n_rows));
        }
    }

  private:
    using Columns = product::Columns<W>;

    // Buffers of AMX and of repacked weights keep rows in another order.
    static bool is_plain(const ggml_tensor & rows) {
        return rows.buffer != nullptr && ggml_backend_buffer_is_host(rows.buffer);
    }

    static constexpr int kChunk       = 16;  // rows that a thread takes at a time
    static constexpr int kColumnsOnce = 96;  // columns that stay in the cache of a core

    // Quantise blocks first to last of each column, as libllama does.
    static void pack(const ggml_tensor & from, const Columns & to, int first, int last) {
        static const auto quantise = ggml_get_type_traits_cpu(W::kColumnType)->from_float;
        typename W::ColumnBlock blocks[product::kMaxBlocks];
        for (int column = 0; first < last && column < from.ne[1]; ++column) {
            const char * data = static_cast<const char *>(from.data) + column * from.nb[1];
            quantise(reinterpret_cast<const float *>(data) + first * product::kBlock, blocks,
                     int64_t(last - first) * product::kBlock);
            product::pack(to, column, first, last - first, blocks);
        }
    }

    static void multiply(ggml_tensor * node, const Columns & columns, int first, int last) {
        const ggml_tensor & weights   = *node->src[0];
        const int           n_columns = int(node->ne[1]);
        const size_t        stride    = node->nb[1] / sizeof(float);
        auto *              out       = static_cast<float *>(node->data);
        product::Rows       rows;
        for (int column = 0; column < n_columns; column += kColumnsOnce) {
            const int end = std::min(column + kColumnsOnce, n_columns);
            for (int row = first; row < last; row += product::kRows) {
                const int    n    = std::min(product::kRows, last - row);
                const char * data = static_cast<const char *>(weights.data) + row * weights.nb[1];
                product::unpack<W>(rows, data, weights.nb[1], n, columns.n_blocks, column == 0);
                product::tiles(rows, columns, column, end, out + row, stride, n);
            }
        }
    }

    static bool gives_same_bits() {
        constexpr int n_blocks = 5, n_values = n_blocks * product::kBlock;
        constexpr int n_rows = 3, n_columns = 8;  // an uneven panel, more than one tile
        const auto * traits   = ggml_get_type_traits_cpu(W::kType);
        const auto   quantise = ggml_get_type_traits_cpu(W::kColumnType)->from_float;
        if (traits->vec_dot == nullptr || traits->vec_dot_type != W::kColumnType) {
            return false;
        }
        float                   values[n_columns * n_values];
        typename W::Block       weights[n_rows * n_blocks];
        typename W::ColumnBlock quantised[n_columns][n_blocks];
        uint32_t                state = 1;
        for (float & value : values) {
            state = state * 1664525u + 1013904223u;
            value = float(state >> 8) / float(1 << 24) - 0.4f;
        }
        ggml_quantize_chunk(W::kType, values, weights, 0, n_rows, n_values, nullptr);
        alignas(64) char memory[n_columns * Columns::bytes(n_blocks)];
        const Columns    columns{memory, n_blocks};
        for (int c = 0; c < n_columns; ++c) {
            quantise(values + c * n_values, quantised[c], n_values);
            product::pack(columns, c, 0, n_blocks, quantised[c]);
        }
        const size_t  row_bytes = sizeof(typename W::Block) * n_blocks;
        product::Rows rows;
        float         ours[n_columns * n_rows], theirs[n_columns * n_rows];
        product::unpack<W>(rows, reinterpret_cast<const char *>(weights), row_bytes, n_rows,
                           n_blocks, false);
        product::tiles(rows, columns, 0, n_columns, ours, n_rows, n_rows);
        for (int i = 0; i < n_columns * n_rows; ++i) {
            traits->vec_dot(n_values, theirs + i, 0, weights + i % n_rows * n_blocks, 0,
                            quantised[i / n_rows], 0, 1);
        }
        return std::memcmp(ours, theirs, sizeof(ours)) == 0;
    }

    Scratch packed_;
};
