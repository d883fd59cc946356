// Products with Q4_1 weights by a kernel of our own (q4_1_tile.h) instead of libllama's.
//
// libllama shows every node of a graph to its evaluation callback before it computes the
// graph. There we make custom operations of the products that we take, so the threads of
// libllama run them in their turn. Only where all devices are CPUs: no other knows such an
// operation.
#pragma once

#include <memory>
#include <new>

#include "ggml-backend.h"
#include "ggml.h"
#include "llama.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "ggml-cpu.h"
#include "q4_1_tile.h"

#pragma weak ggml_get_type_traits_cpu  // not there if the CPU backend is a plug-in

class FastMatmul {
  public:
    // Whether this machine can run the kernel, and gets the bits of libllama's from it.
    static bool usable() {
        static const bool is_usable = has_instructions() && has_only_cpus() &&
                                      ggml_get_type_traits_cpu != nullptr && gives_same_bits();
        return is_usable;
    }

    FastMatmul() {
        const ggml_init_params params = {ggml_tensor_overhead() * 2, nullptr, true};
        ggml_context *         ctx    = ggml_init(params);
        if (ctx == nullptr) {
            throw std::bad_alloc();
        }
        ggml_tensor * source = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, 1);
        custom_ = *ggml_custom_4d(ctx, GGML_TYPE_F32, 1, 1, 1, 1, &source, 1, compute,
                                  GGML_N_TASKS_MAX, this);
        ggml_free(ctx);
    }

    void attach(llama_context_params * params) {
        params->cb_eval           = on_node;
        params->cb_eval_user_data = this;
    }

  private:
    // How far a product is. At the end of its op_params, which ggml leaves alone.
    struct Progress {
        int32_t n_packed;    // threads that have packed their part of the columns
        int32_t next_chunk;  // of rows
    };

    static constexpr int kChunk       = 16;  // rows that a thread takes at a time
    static constexpr int kColumnsOnce = 96;  // columns that stay in the cache of a core

    struct Free {
        void operator()(char * data) const { std::free(data); }
    };

    static bool on_node(ggml_tensor * node, bool, void * data) {
        auto &     self    = *static_cast<FastMatmul *>(data);
        const auto n_bytes = sizeof(self.custom_.op_params) - sizeof(Progress);
        const bool is_ours = node->op == self.custom_.op &&
                             std::memcmp(node->op_params, self.custom_.op_params, n_bytes) == 0;
        if (is_ours || (takes(node) && self.reserve(node))) {
            node->op = self.custom_.op;
            std::memcpy(node->op_params, self.custom_.op_params, sizeof(node->op_params));
        }
        return false;  // we do not want to see its result
    }

    static bool takes(const ggml_tensor * node) {
        if (node->op != GGML_OP_MUL_MAT || node->src[0]->type != GGML_TYPE_Q4_1) {
            return false;
        }
        const ggml_tensor * rows    = node->src[0];
        const ggml_tensor * columns = node->src[1];
        return node->op_params[1] == GGML_HINT_NONE && ggml_n_dims(rows) <= 2 &&
               ggml_n_dims(columns) <= 2 && columns->ne[1] > 1 &&  // one is as fast there
               rows->ne[0] <= q4_1::kMaxBlocks * q4_1::kBlock &&
               columns->type == GGML_TYPE_F32 && columns->nb[0] == sizeof(float);
    }

    // Room for the columns; false if there is none, then libllama computes.
    bool reserve(const ggml_tensor * node) {
        const int    n_blocks = int(node->src[0]->ne[0] / q4_1::kBlock);
        const size_t n_bytes  = node->ne[1] * q4_1::Columns::bytes(n_blocks);
        if (n_bytes > n_bytes_) {
            const size_t padded = (n_bytes + 63) / 64 * 64;
            packed_.reset(static_cast<char *>(std::aligned_alloc(64, padded)));
            n_bytes_ = packed_ ? n_bytes : 0;
        }
        return n_bytes <= n_bytes_;
    }

    // Every thread of libllama calls this for every product, *ith* of *n_threads*.
    static void compute(ggml_tensor * node, int ith, int n_threads, void * data) {
        const auto & self     = *static_cast<const FastMatmul *>(data);
        auto *       progress = reinterpret_cast<Progress *>(
            reinterpret_cast<char *>(node->op_params + GGML_MAX_OP_PARAMS / sizeof(int32_t)) -
            sizeof(Progress));
        const int           n_blocks = int(node->src[0]->ne[0] / q4_1::kBlock);
        const q4_1::Columns columns{self.packed_.get(), n_blocks};
        pack(*node->src[1], columns, n_blocks * ith / n_threads,
             n_blocks * (ith + 1) / n_threads);
        __atomic_add_fetch(&progress->n_packed, 1, __ATOMIC_ACQ_REL);
        for (int i = 0; __atomic_load_n(&progress->n_packed, __ATOMIC_ACQUIRE) < n_threads; ++i) {
            i < 1000 ? _mm_pause() : static_cast<void>(sched_yield());
        }
        const int n_rows = int(node->ne[0]);
        for (;;) {
            const int first =
                __atomic_fetch_add(&progress->next_chunk, 1, __ATOMIC_RELAXED) * kChunk;
            if (first >= n_rows) {
                return;
            }
            multiply(node, columns, first, std::min(first + kChunk, n_rows));
        }
    }

    // Quantise blocks first to last of each column, as libllama does.
    static void pack(const ggml_tensor & from, const q4_1::Columns & to, int first, int last) {
        static const auto quantise = ggml_get_type_traits_cpu(GGML_TYPE_Q8_1)->from_float;
        q4_1::ColumnBlock blocks[q4_1::kMaxBlocks];
        for (int column = 0; first < last && column < from.ne[1]; ++column) {
            const char * data = static_cast<const char *>(from.data) + column * from.nb[1];
            quantise(reinterpret_cast<const float *>(data) + first * q4_1::kBlock, blocks,
                     int64_t(last - first) * q4_1::kBlock);
            q4_1::pack(to, column, first, last - first, blocks);
        }
    }

    static void multiply(ggml_tensor * node, const q4_1::Columns & columns, int first, int last) {
        const ggml_tensor & weights   = *node->src[0];
        const int           n_columns = int(node->ne[1]);
        const size_t        stride    = node->nb[1] / sizeof(float);
        auto *              out       = static_cast<float *>(node->data);
        q4_1::Rows          rows;
        for (int column = 0; column < n_columns; column += kColumnsOnce) {
            const int end = std::min(column + kColumnsOnce, n_columns);
            for (int row = first; row < last; row += q4_1::kRows) {
                const int    n    = std::min(q4_1::kRows, last - row);
                const char * data = static_cast<const char *>(weights.data) + row * weights.nb[1];
                q4_1::unpack(rows, data, weights.nb[1], n, columns.n_blocks);
                q4_1::tiles(rows, columns, column, end, out + row, stride, n);
            }
        }
    }

    static bool has_instructions() {
        __builtin_cpu_init();
        return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    }

    static bool has_only_cpus() {
        for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
            if (ggml_backend_dev_type(ggml_backend_dev_get(i)) != GGML_BACKEND_DEVICE_TYPE_CPU) {
                return false;
            }
        }
        return true;
    }

    // Other builds of libllama may add in another order; then theirs is used.
    static bool gives_same_bits() {
        constexpr int n_blocks = 5, n_values = n_blocks * q4_1::kBlock;
        constexpr int n_rows = 3, n_columns = 8;  // an uneven panel, more than one tile
        const auto * traits   = ggml_get_type_traits_cpu(GGML_TYPE_Q4_1);
        const auto   quantise = ggml_get_type_traits_cpu(GGML_TYPE_Q8_1)->from_float;
        if (traits->vec_dot == nullptr || traits->vec_dot_type != GGML_TYPE_Q8_1) {
            return false;
        }
        float             values[n_columns * n_values];
        q4_1::WeightBlock weights[n_rows * n_blocks];
        q4_1::ColumnBlock quantised[n_columns][n_blocks];
        uint32_t          state = 1;
        for (float & value : values) {
            state = state * 1664525u + 1013904223u;
            value = float(state >> 8) / float(1 << 24) - 0.4f;
        }
        ggml_quantize_chunk(GGML_TYPE_Q4_1, values, weights, 0, n_rows, n_values, nullptr);
        alignas(64) char memory[n_columns * 2 * sizeof(quantised[0])];
        const q4_1::Columns columns{memory, n_blocks};
        for (int c = 0; c < n_columns; ++c) {
            quantise(values + c * n_values, quantised[c], n_values);
            q4_1::pack(columns, c, 0, n_blocks, quantised[c]);
        }
        const size_t row_bytes = sizeof(q4_1::WeightBlock) * n_blocks;
        q4_1::Rows   rows;
        float        ours[n_columns * n_rows], theirs[n_columns * n_rows];
        q4_1::unpack(rows, reinterpret_cast<const char *>(weights), row_bytes, n_rows, n_blocks);
        q4_1::tiles(rows, columns, 0, n_columns, ours, n_rows, n_rows);
        for (int i = 0; i < n_columns * n_rows; ++i) {
            traits->vec_dot(n_values, theirs + i, 0, weights + i % n_rows * n_blocks, 0,
                            quantised[i / n_rows], 0, 1);
        }
        return std::memcmp(ours, theirs, sizeof(ours)) == 0;
    }

    ggml_tensor                 custom_;  // as ggml writes a custom operation
    std::unique_ptr<char, Free> packed_;  // columns of the product that runs
    size_t                      n_bytes_ = 0;
};

#else

class FastMatmul {
  public:
    static bool usable() { return false; }
    void        attach(llama_context_params *) {}
};

#endif
