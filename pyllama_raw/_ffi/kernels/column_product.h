// Products whose columns have the bits of each one alone.
//
// libllama multiplies several columns by other kernels than one, which add in another order. This
// kernel multiplies each by the one that libllama takes for one. It does so where outputs must
// not depend on what is computed beside them.
#pragma once

#include <algorithm>

#include "boundary/cpu_backend.h"
#include "custom_node.h"
#include "ggml-backend.h"
#include "ggml.h"

class ColumnProduct {
  public:
    static bool is_usable() { return CpuBackend::get().type_traits != nullptr; }

    // Whether this kernel computes *node*, with a column of each of several streams, or with the
    // columns of a prompt; makes room for them. Two columns of a prompt or more make no difference
    // to libllama but for blocks of 256 weights, of which it multiplies eight columns or more, of
    // an expert, too, by another kernel.
    bool takes(const ggml_tensor * node, bool are_streams) {
        const bool has_experts = node->op == GGML_OP_MUL_MAT_ID;
        if (!has_experts && node->op != GGML_OP_MUL_MAT) {
            return false;
        }
        const ggml_tensor *rows = node->src[0], *columns = node->src[1];
        const bool depends = ggml_blck_size(rows->type) == 256
                                 ? ggml_nrows(columns) > 1
                                 : are_streams && !has_experts && columns->ne[1] > 1;
        return depends && can_take(node);
    }

    // Whether it can compute *node*, wherever its columns are from; makes room for them.
    bool can_take(const ggml_tensor * node) {
        const bool has_experts = node->op == GGML_OP_MUL_MAT_ID;
        if (!has_experts && node->op != GGML_OP_MUL_MAT) {
            return false;
        }
        const ggml_tensor *rows = node->src[0], *columns = node->src[1];
        if (!has_experts && (node->op_params[1] != GGML_HINT_NONE || ggml_n_dims(rows) > 2)) {
            return false;
        }
        return rows->buffer != nullptr && ggml_backend_buffer_is_host(rows->buffer) &&
               columns->ne[3] == 1 && columns->type == GGML_TYPE_F32 &&
               columns->nb[0] == sizeof(float) && traits_of(*rows)->vec_dot != nullptr &&
               packed_.reserve(ggml_nrows(columns) * packed_bytes(*node));
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
        const int64_t n_rows   = node->ne[0];
        for (int64_t first = state.take() * kChunk; first < n_rows; first = state.take() * kChunk) {
            const int64_t end = std::min(first + kChunk, n_rows);
            for (int64_t i = 0; i < node->ne[1] * node->ne[2]; ++i) {
                const int64_t i1 = i % node->ne[1], i2 = i / node->ne[1];
                const char *  weights = at(rows, 0, expert(node->src[2], i1, i2));
                const int64_t column  = i1 % columns.ne[1];  // experts may share one
                const char *  from    = n_packed > 0 ? self.packed(i2 * columns.ne[1] + column, n_packed)
                                                     : at(columns, column, i2);
                auto * out = reinterpret_cast<float *>(at(*node, i1, i2));
                for (int64_t row = first; row < end; ++row) {
                    multiply(int(rows.ne[0]), out + row, 0, weights + row * rows.nb[1], 0, from, 0,
                             1);
                }
            }
        }
    }

  private:
    static constexpr int64_t kChunk = 16;  // rows that a thread takes at a time

    static char * at(const ggml_tensor & tensor, int64_t i1, int64_t i2) {
        return static_cast<char *>(tensor.data) + i1 * tensor.nb[1] + i2 * tensor.nb[2];
    }

    static int64_t expert(const ggml_tensor * ids, int64_t i1, int64_t i2) {
        if (ids == nullptr) {
            return 0;
        }
        const char * data = static_cast<const char *>(ids->data) + i1 * ids->nb[0] + i2 * ids->nb[1];
        return *reinterpret_cast<const int32_t *>(data);
    }

    char * packed(int64_t column, size_t n_bytes) const { return packed_.data() + column * n_bytes; }

    static const ggml_type_traits_cpu * traits_of(const ggml_tensor & rows) {
        return CpuBackend::get().type_traits(rows.type);
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
        for (int64_t column = 0; first < end && column < ggml_nrows(&columns); ++column) {
            const auto * from = reinterpret_cast<const float *>(
                at(columns, column % columns.ne[1], column / columns.ne[1]));
            CpuBackend::get().type_traits(type)->from_float(
                from + first * n_values,
                packed(column, packed_bytes(node)) + first * ggml_type_size(type),
                (end - first) * n_values);
        }
    }

    Scratch packed_;
};
