// Products with weights that are woven once (woven_tile.h): which nodes are taken, who owns woven
// weights, and how threads share a product.
//
// The weights of a model are woven by the first product that needs them, by all threads. Contexts
// of one model share them. The pages of the file that they were read from are given back, so a
// model takes as much memory as before. Only weights that are mapped from their file are taken,
// because others would be there twice.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "custom_node.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "scratch.h"
#include "woven_levels.h"

class WovenWeights {
  public:
    Scratch           memory;
    std::atomic<bool> is_ready{false};

    // Those of *rows*, which contexts of one model share; nullptr: there is no memory.
    static std::shared_ptr<WovenWeights> of(const ggml_tensor & rows, size_t n_bytes) {
        static std::mutex mutex;
        static std::unordered_map<const void *, std::weak_ptr<WovenWeights>> all;
        const std::lock_guard<std::mutex> lock(mutex);
        if (auto there = all[rows.data].lock()) {
            return there;
        }
        auto made = std::make_shared<WovenWeights>();
        if (!made->memory.reserve(n_bytes)) {
            return nullptr;
        }
        all[rows.data] = made;
        return made;
    }
};

class WovenProduct {
  public:
    static bool is_usable() { return woven::level() != nullptr; }

    // Whether weights of *type* can be woven, and the row of the table from that of the first.
    static int kind_of(ggml_type type) {
        for (int i = 0; i < kKinds; ++i) {
            if (woven::kKinds[i].type == type) {
                return i;
            }
        }
        return -1;
    }

    // Whether this kernel computes *node*; makes room for its columns and its weights.
    bool takes(const ggml_tensor * node) {
        if (node->op != GGML_OP_MUL_MAT || node->op_params[1] != GGML_HINT_NONE) {
            return false;
        }
        const ggml_tensor *rows = node->src[0], *columns = node->src[1];
        const int          kind = kind_of(rows->type);
        if (kind < 0 || !is_mapped(*rows) || ggml_n_dims(rows) > 2 || ggml_n_dims(columns) > 2 ||
            !ggml_is_contiguous(rows) || columns->type != GGML_TYPE_F32 ||
            columns->nb[0] != sizeof(float) || rows->ne[0] > kMaxValues) {
            return false;
        }
        const int n_blocks = int(rows->ne[0] / woven::kBlock);
        if (!packed_.reserve(columns->ne[1] * woven::Columns::bytes(n_blocks))) {
            return false;
        }
        auto & weights = weights_[rows->data];
        if (!weights) {
            weights = WovenWeights::of(*rows, n_groups(*rows) * group_bytes(*rows) + kAhead);
        }
        return weights != nullptr;
    }

    // Every thread of libllama calls this for every product, as number *ith* of *n_threads*.
    static void compute(ggml_tensor * node, int ith, int n_threads, void * data) {
        const auto &         self     = *static_cast<const WovenProduct *>(data);
        const ggml_tensor &  rows     = *node->src[0];
        const ggml_tensor &  from     = *node->src[1];
        const int            index    = kind_of(rows.type);
        const woven::Kind &  kind     = woven::kKinds[index];
        const int            n_blocks = int(rows.ne[0] / woven::kBlock);
        const int            n_columns = int(node->ne[1]), n_rows = int(node->ne[0]);
        const woven::Columns columns{self.packed_.data(), n_blocks};
        NodeState &          state   = NodeState::of(node);
        WovenWeights &       weights = *self.weights_.at(rows.data);
        auto *               memory  = reinterpret_cast<uint8_t *>(weights.memory.data());
        const size_t         n_bytes = group_bytes(rows);
        // A thread packs a part of each column, or some of the columns if there are many.
        const bool by_column = n_columns >= n_threads;
        const int  n_parts   = by_column ? n_columns : n_blocks;
        const int  first = n_parts * ith / n_threads, last = n_parts * (ith + 1) / n_threads;
        for (int c = by_column ? first : 0; c < (by_column ? last : n_columns); ++c) {
            const auto * values = reinterpret_cast<const float *>(
                static_cast<const char *>(from.data) + c * from.nb[1]);
            self.level_->pack(columns, c, by_column ? 0 : first, by_column ? n_blocks : last, values);
        }
        // Nobody sets this before all threads have looked at it, which is behind the wait.
        const bool was_ready = weights.is_ready.load(std::memory_order_acquire);
        if (!was_ready) {
            const auto n = n_groups(rows);
            for (int64_t group = n * ith / n_threads; group < n * (ith + 1) / n_threads; ++group) {
                weave(rows, kind, group, memory + group * n_bytes);
            }
        }
        state.wait_for_all(n_threads);
        if (!was_ready && !weights.is_ready.exchange(true, std::memory_order_acq_rel)) {
            give_back(rows);
        }
        const size_t stride = node->nb[1] / sizeof(float);
        auto *       out    = static_cast<float *>(node->data);
        const int    chunk  = n_rows >= kManyRows ? 4 * woven::kRows : woven::kRows;
        for (int row = state.take() * chunk; row < n_rows; row = state.take() * chunk) {
            for (int column = 0; column < n_columns; column += kColumnsOnce) {
                const int end = std::min(column + kColumnsOnce, n_columns);
                for (int r = row; r < std::min(row + chunk, n_rows); r += woven::kRows) {
                    self.level_->tiles[index](memory + r / woven::kRows * n_bytes, columns, column, end, out + r,
                               stride, std::min(woven::kRows, n_rows - r));
                }
            }
        }
    }

    static constexpr int kKinds = int(woven::kKinds.size());

  private:
    static constexpr int     kColumnsOnce = 64;       // columns that stay in the cache of a core
    static constexpr int     kManyRows    = 1024;     // from which a thread takes more of them
    static constexpr size_t  kAhead       = 4096;     // that a tile may look at behind the end
    static constexpr int64_t kMaxValues   = 1 << 18;  // of a row

    // The file is read again where somebody looks at the pages that are given back.
    static bool is_mapped(const ggml_tensor & rows) {
        return rows.buffer != nullptr && ggml_backend_buffer_is_host(rows.buffer) &&
               std::strcmp(ggml_backend_buffer_name(rows.buffer), "CPU_Mapped") == 0;
    }

    static int64_t n_groups(const ggml_tensor & rows) {
        return (rows.ne[1] + woven::kRows - 1) / woven::kRows;
    }

    static size_t group_bytes(const ggml_tensor & rows) {
        const woven::Kind & kind = woven::kKinds[kind_of(rows.type)];
        return size_t(rows.ne[0] / (woven::kBlock * kind.n_blocks)) * kind.n_bytes;
    }

    // Rows that do not exist repeat the last one.
    static void weave(const ggml_tensor & rows, const woven::Kind & kind, int64_t group, uint8_t * to) {
        const size_t  n_bytes  = ggml_type_size(rows.type);
        const int64_t n_blocks = rows.ne[0] / ggml_blck_size(rows.type);
        const char *  from[woven::kRows];
        for (int r = 0; r < woven::kRows; ++r) {
            const int64_t row = std::min(group * woven::kRows + r, rows.ne[1] - 1);
            from[r]           = static_cast<const char *>(rows.data) + row * rows.nb[1];
        }
        for (int64_t i = 0; i < n_blocks; ++i, to += kind.n_bytes) {
            kind.weave(from, to);
            for (const char *& row : from) {
                row += n_bytes;
            }
        }
    }

    static void give_back(const ggml_tensor & rows) {
        const auto page  = uintptr_t(sysconf(_SC_PAGESIZE));
        const auto begin = (uintptr_t(rows.data) + page - 1) / page * page;
        const auto end   = (uintptr_t(rows.data) + ggml_nbytes(&rows)) / page * page;
        if (begin < end) {
            madvise(reinterpret_cast<void *>(begin), end - begin, MADV_DONTNEED);
        }
    }

    const woven::Level * const level_ = woven::level();
    Scratch packed_;
    std::unordered_map<const void *, std::shared_ptr<WovenWeights>> weights_;
};
