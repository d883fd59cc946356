// Products with a column for each of several streams, which have the bits of each one alone.
//
// libllama multiplies several columns by other kernels than one, which add in another order.
// This kernel multiplies each by the one that libllama takes for one. It does so where outputs
// must not depend on the streams beside them.
#pragma once

#include <algorithm>

#include "custom_node.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "scratch.h"

#pragma weak ggml_get_type_traits_cpu  // not there if the CPU backend is a plug-in

class ColumnProduct {
  public:
    static bool is_usable() { return ggml_get_type_traits_cpu != nullptr; }

    // Whether this kernel computes *node*; makes room for its columns.
    bool takes(const ggml_tensor * node) {
        if (node->op != GGML_OP_MUL_MAT || node->op_params[1] != GGML_HINT_NONE) {
            return false;
        }
        const ggml_tensor *rows = node->src[0], *columns = node->src[1];
        const bool is_here = rows->buffer != nullptr && ggml_backend_buffer_is_host(rows->buffer);
        return is_here && ggml_n_dims(rows) <= 2 && ggml_n_dims(columns) <= 2 &&
               columns->ne[1] > 1 && columns->type == GGML_TYPE_F32 &&
               columns->nb[0] == sizeof(float) &&
               traits_of(*rows)->vec_dot != nullptr &&
               packed_.reserve(columns->ne[1] * packed_bytes(*node));
    }

    // Every thread of libllama calls this for every product, as number *ith* of *n_threads*.
    static void compute(ggml_tensor * node, int ith, int n_threads, void * data) {
        const auto &        self     = *static_cast<const ColumnProduct *>(data);
        const ggml_tensor & rows     = *node->src[0];
        const ggml_tensor & columns  = *node->src[1];
        const size_t        n_packed = packed_bytes(*node);
        NodeState &         state    = NodeState::of(node);
        if (n_packed > 0) {
            self.pack(*node, ith, n_threads);
            state.wait_for_all(n_threads);
        }
        const auto    multiply = traits_of(rows)->vec_dot;
        const char *  from     = n_packed > 0 ? self.packed_.data() : bytes_of(columns);
        const size_t  stride   = n_packed > 0 ? n_packed : columns.nb[1];
        const int64_t n_rows   = node->ne[0];
        for (int64_t first = state.take() * kChunk; first < n_rows; first = state.take() * kChunk) {
            const int64_t end = std::min(first + kChunk, n_rows);
            for (int64_t column = 0; column < node->ne[1]; ++column) {
                auto * out = reinterpret_cast<float *>(bytes_of(*node) + column * node->nb[1]);
                for (int64_t row = first; row < end; ++row) {
                    multiply(int(rows.ne[0]), out + row, 0, bytes_of(rows) + row * rows.nb[1], 0,
                             from + column * stride, 0, 1);
                }
            }
        }
    }

  private:
    static constexpr int64_t kChunk = 16;  // rows that a thread takes at a time

    static char * bytes_of(const ggml_tensor & tensor) { return static_cast<char *>(tensor.data); }

    static const ggml_type_traits_cpu * traits_of(const ggml_tensor & rows) {
        return ggml_get_type_traits_cpu(rows.type);
    }

    // Bytes of a column in the type that the weights are multiplied with; 0: it is a float.
    static size_t packed_bytes(const ggml_tensor & node) {
        const ggml_type type = traits_of(*node.src[0])->vec_dot_type;
        return type == GGML_TYPE_F32 ? 0 : ggml_row_size(type, node.src[1]->ne[0]);
    }

    // Part *ith* of each column, as libllama divides it.
    void pack(const ggml_tensor & node, int ith, int n_threads) const {
        const ggml_tensor & columns  = *node.src[1];
        const ggml_type     type     = traits_of(*node.src[0])->vec_dot_type;
        const int64_t       n_values = ggml_blck_size(type), n_blocks = columns.ne[0] / n_values;
        const int64_t first = n_blocks * ith / n_threads, end = n_blocks * (ith + 1) / n_threads;
        for (int64_t column = 0; first < end && column < columns.ne[1]; ++column) {
            const auto * from =
                reinterpret_cast<const float *>(bytes_of(columns) + column * columns.nb[1]);
            char * to = packed_.data() + column * packed_bytes(node);
            ggml_get_type_traits_cpu(type)->from_float(from + first * n_values,
                                                       to + first * ggml_type_size(type),
                                                       (end - first) * n_values);
        }
    }

    Scratch packed_;
};
