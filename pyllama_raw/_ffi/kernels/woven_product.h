// Products with weights that are woven once (woven_tile.h): which nodes are taken, who owns woven
// weights, and how threads share a product.
//
// A tensor is one matrix, or several: one for each expert, or for each part of the columns. A
// matrix is woven by the first product that needs it, by all threads. So the first tokens of a
// large mixture of experts wait for the experts that they are sent to, and not for all of them, and
// an expert that is never used is never read. Contexts of one model share what is woven. The pages
// of the file that it was read from are given back a step at a time, so a model takes as much memory
// as before, while it is woven, too. Rows of embeddings that are weights of the output, too, are unpacked
// again, if that gives the same bits. Whoever else reads the file's form has it from the cache of the
// system. Only weights that are mapped from their file are taken, because others would be there twice.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bitset>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <unordered_map>
#include <utility>
#include <vector>

#include "custom_node.h"
#include "elementwise.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "woven_levels.h"

// Memory of huge pages, of which tensors of one model take parts. A stream reads all weights for each
// token, and small pages slow that by a fifth. A tensor alone would fill its last one in vain.
class WovenPages {
  public:
    // A part for a tensor in *buffer*, which holds its pages; nullptr: there is no memory. To be
    // called by one thread at a time.
    static std::shared_ptr<uint8_t> part(const void * buffer, size_t n_bytes) {
        static std::unordered_map<const void *, std::weak_ptr<WovenPages>> latest;  // by buffer
        n_bytes    = (n_bytes + kAhead + 63) / 64 * 64;
        auto pages = latest[buffer].lock();
        if (pages == nullptr || pages->n_left_ < n_bytes) {
            pages          = std::make_shared<WovenPages>();
            pages->n_left_ = (std::max(n_bytes, kMany) + kHuge - 1) / kHuge * kHuge;
            pages->next_   = static_cast<uint8_t *>(std::aligned_alloc(kHuge, pages->n_left_));
            pages->data_.reset(pages->next_);
            if (pages->next_ == nullptr) {
                return nullptr;
            }
#ifdef MADV_HUGEPAGE
            madvise(pages->next_, pages->n_left_, MADV_HUGEPAGE);  // a wish: it may go unheard
#endif
            latest[buffer] = pages;
        }
        pages->n_left_ -= n_bytes;
        return {pages, std::exchange(pages->next_, pages->next_ + n_bytes)};
    }

  private:
    static constexpr size_t kHuge  = size_t(2) << 20;
    static constexpr size_t kMany  = size_t(64) << 20;  // what nobody writes to takes no memory
    static constexpr size_t kAhead = 4096;  // that a tile may look at behind the end

    struct Free {
        void operator()(uint8_t * data) const { std::free(data); }
    };

    std::unique_ptr<uint8_t, Free> data_;
    uint8_t *                      next_   = nullptr;
    size_t                         n_left_ = 0;
};

class WovenWeights {
  public:
    using Flags = std::unique_ptr<std::atomic<bool>[]>;

    std::shared_ptr<uint8_t> memory;
    Flags                    is_ready;  // of each matrix

    // Those of *rows*, which contexts of one model share; nullptr: there is no memory.
    static std::shared_ptr<WovenWeights> of(const ggml_tensor & rows, size_t n_bytes) {
        static std::mutex mutex;
        static std::unordered_map<const void *, std::weak_ptr<WovenWeights>> all;
        const std::lock_guard<std::mutex> lock(mutex);
        if (auto there = all[rows.data].lock()) {
            return there;
        }
        auto made      = std::make_shared<WovenWeights>();
        made->is_ready = Flags(new std::atomic<bool>[rows.ne[2]]());
        made->memory   = WovenPages::part(rows.buffer, n_bytes);
        if (made->memory == nullptr) {
            return nullptr;
        }
        all[rows.data] = made;
        return made;
    }
};

class WovenProduct {
  public:
    static bool is_usable() { return woven::level() != nullptr; }

    // Whether the bits of a column may depend on how many there are, which is faster.
    void set_free(bool are_free) { many_ = are_free ? level_->many : nullptr; }

    // A graph begins. *n_streams* have tokens in it; it is 0 where tokens of a prompt are among them. No
    // product joins one that was shown before.
    void begin(int n_streams) {
        n_streams_ = n_streams;
        leader_ = latest_ = nullptr;
        packed_of_        = nullptr;
        between_.clear();
    }

    // Each node of a graph is shown before it is computed. Columns that are computed again are packed again:
    // a batch of several micro-batches uses one graph for all.
    void see(const ggml_tensor * node) { packed_of_ = node == packed_of_ ? nullptr : packed_of_; }

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
    bool takes(ggml_tensor * node) {
        const bool has_experts = node->op == GGML_OP_MUL_MAT_ID;
        const bool is_plain = node->op == GGML_OP_MUL_MAT && node->op_params[1] == GGML_HINT_NONE;
        if (!has_experts && !is_plain) {
            return false;
        }
        const ggml_tensor *rows = node->src[0], *columns = node->src[1];
        const int          kind = kind_of(rows->type);
        // A part of a tensor would be woven as if it was all of it.
        if (kind < 0 || rows->view_src != nullptr || !is_mapped(*rows) || rows->ne[3] != 1 ||
            !ggml_is_contiguous(rows) || rows->ne[0] > kMaxValues || columns->ne[3] != 1 ||
            columns->type != GGML_TYPE_F32 || columns->nb[0] != sizeof(float) ||
            rows->ne[2] > kMaxMatrices) {
            return false;
        }
        const int          n_blocks  = int(rows->ne[0] / woven::kBlock);
        const int64_t      n_columns = ggml_nrows(columns) == 1 ? kAlone : ggml_nrows(columns);
        const char * const before    = packed_.data();
        size_t             n_bytes   = (n_columns + woven::kBehind) * woven::Columns::bytes(n_blocks);
        if (many_ != nullptr) {  // the graph may be used again
            n_bytes = std::max(n_bytes, woven::Bf16Columns::bytes(n_blocks, ggml_nrows(node)));
        }
        if (!packed_.reserve(n_bytes) ||
            !places_.reserve((rows->ne[2] + 1 + ggml_nrows(node)) * sizeof(int32_t))) {
            return false;
        }
        packed_of_ = packed_.data() == before ? packed_of_ : nullptr;
        auto & weights = weights_[rows->data];
        if (!weights) {
            weights = WovenWeights::of(*rows, rows->ne[2] * matrix_bytes(*rows));
        }
        node->extra = weights.get();
        return weights != nullptr;
    }

    // Of a product that this kernel takes, each time before it is computed.
    NodeState state(const ggml_tensor * node) {
        NodeState state{};
        state.are_many         = are_many(*node);
        const bool keeps_order = state.are_many && node->src[2] == nullptr;
        state.has_columns      = keeps_order && packed_of_ == node->src[1];
        const bool are_shown   = node->src[1]->op != GGML_OP_NONE && node->src[1]->view_src == nullptr;
        packed_of_             = keeps_order && are_shown ? node->src[1] : nullptr;
        state.is_alone = ggml_nrows(node) == 1 && node->src[0]->ne[2] == 1 && node->src[2] == nullptr &&
                         weights_of(*node).is_ready[0].load(std::memory_order_acquire);
        return state;
    }

    // Whether a product before *node* computes it, too; asked of each node of a graph in turn, once
    // those of this kernel are custom operations. Products of the same few columns join the first of them,
    // and what is added to a product joins it. So threads wait for each other once, and not for each of
    // query, key and value, or of gate and up.
    bool joins(ggml_tensor * node, bool is_ours) {
        if (leader_ != nullptr && leader_->src[1] == node) {
            leader_ = nullptr;  // its columns are computed behind it, so it is of an older graph
        }
        ggml_tensor * product = std::exchange(latest_, nullptr);
        if (is_ours && is_few(*node)) {
            latest_ = node;
            if (leader_ != nullptr && follows(*node)) {
                *std::find(leader_->src + kFollower, std::end(leader_->src), nullptr) = node;
                packed_of_ = nullptr;  // it packs nothing where it stands
                return true;
            }
            // One that has been shown before has its followers.
            leader_ = node->src[kAdded] == nullptr && node->src[kFollower] == nullptr ? node : nullptr;
            between_.clear();
            return false;
        }
        between_.push_back(node);
        if (leader_ == nullptr || between_.size() > kBetween) {
            leader_ = nullptr;
            between_.clear();
        }
        return product != nullptr && leader_ != nullptr && adds(*product, *node);
    }

    // Whether *node* looks up rows of embeddings that a product has woven. Others are in the file.
    bool looks_up(ggml_tensor * node) const {
        if (node->op != GGML_OP_GET_ROWS || node->type != GGML_TYPE_F32 || !ggml_is_contiguous(node) ||
            node->src[1]->type != GGML_TYPE_I32 || ggml_nrows(node->src[1]) != 1 ||
            !ggml_is_contiguous(node->src[1])) {
            return false;
        }
        const auto it = weights_.find(node->src[0]->data);
        if (it == weights_.end() || it->second == nullptr) {
            return false;
        }
        node->extra = it->second.get();
        return node->src[0]->ne[2] == 1 && woven::kKinds[kind_of(node->src[0]->type)].unpack != nullptr &&
               weights_of(*node).is_ready[0].load(std::memory_order_acquire);
    }

    // Every thread of libllama calls this for every such lookup, and takes one row at a time.
    static void look_up(ggml_tensor * node, int, int, void *) {
        const ggml_tensor &  rows    = *node->src[0];
        const WovenWeights & weights = weights_of(*node);
        const woven::Kind &  kind    = woven::kKinds[kind_of(rows.type)];
        const auto *         ids     = static_cast<const int32_t *>(node->src[1]->data);
        NodeState &          state   = NodeState::of(node);
        for (int i = state.take(); i < node->ne[1]; i = state.take()) {
            auto * to = reinterpret_cast<float *>(static_cast<char *>(node->data) + i * node->nb[1]);
            if (ids[i] < 0 || ids[i] >= rows.ne[1]) {
                std::fill_n(to, rows.ne[0], 0.0f);
                continue;
            }
            const uint8_t * group = memory_of(rows, weights, 0) + ids[i] / woven::kRows * group_bytes(rows);
            kind.unpack(group, ids[i] % woven::kRows, int(rows.ne[0] / woven::kBlock), to);
        }
    }

    // Every thread of libllama calls this for every product, as number *ith* of *n_threads*.
    static void compute(ggml_tensor * node, int ith, int n_threads, void * data) {
        const auto &        self    = *static_cast<const WovenProduct *>(data);
        const ggml_tensor & rows    = *node->src[0];
        WovenWeights &      weights = weights_of(*node);
        NodeState &         state   = NodeState::of(node);
        if (state.is_alone && n_threads <= kAlone) {
            self.multiply_alone(*node, state, ith, n_threads);
            return;
        }
        const bool waits_twice = state.are_many && node->src[2] != nullptr;
        if (ith == 0) {
            self.sort(*node);
        }
        if (waits_twice) {  // because columns of experts are packed in their order
            state.wait_for_all(n_threads);
        }
        if (!state.are_many) {
            self.pack(*node->src[1], ith, n_threads);
        } else if (!state.has_columns) {
            self.pack_many(*node, ith, n_threads);
        }
        // Nobody sets a flag before all threads have looked at it, which is behind the wait.
        const Matrices missing = missing_of(*node, weights);
        for (int32_t matrix = 0; missing.any() && matrix < rows.ne[2]; ++matrix) {
            if (missing[matrix]) {
                const int64_t n = n_groups(rows), last = n * (ith + 1) / n_threads;
                const int64_t step = std::max<int64_t>(1, kStep / (woven::kRows * rows.nb[1]));
                for (int64_t group = n * ith / n_threads; group < last; group += step) {
                    weave(rows, weights, matrix, group, std::min(group + step, last));
                }
            }
        }
        state.wait_for_all(waits_twice ? 2 * n_threads : n_threads);
        const int32_t * begins = self.begins();
        for (int32_t matrix = 0; ith == 0 && matrix < rows.ne[2]; ++matrix) {
            if (begins[matrix] < begins[matrix + 1] &&
                !weights.is_ready[matrix].exchange(true, std::memory_order_acq_rel)) {
                set_apart(rows);
            }
        }
        self.multiply(*node, weights, state, ith, n_threads);
    }

    static constexpr int kKinds = int(woven::kKinds.size());

  private:
    static constexpr int     kChunks      = 8;        // large ones that each thread finds
    static constexpr size_t  kStep        = 2 << 20;  // bytes that are woven, then given back
    static constexpr int64_t kMaxValues   = 1 << 18;  // of a row
    static constexpr int64_t kMaxMatrices = 1024;     // libllama: 512 experts
    static constexpr int     kAlone       = 64;       // threads that pack a column each
    static constexpr size_t  kBetween     = 8;        // nodes between products that are computed as one
    // Sources of a product that others have joined: what is added, and the first product that follows.
    static constexpr int kAdded = 3, kFollower = 4;

    using Matrices = std::bitset<kMaxMatrices>;

    // Those of a node that is ours.
    static WovenWeights & weights_of(const ggml_tensor & node) {
        return *static_cast<WovenWeights *>(node.extra);
    }

    // A product of one matrix, which is woven, and of columns that a tile takes at once.
    static bool is_few(const ggml_tensor & node) {
        return node.src[0]->ne[2] == 1 && node.src[2] == nullptr &&
               ggml_nrows(&node) <= woven::kMostColumns &&
               weights_of(node).is_ready[0].load(std::memory_order_acquire);
    }

    // Whether *node* can be computed with the leader, before what stands between the two.
    bool follows(const ggml_tensor & node) const {
        const ggml_tensor * columns = node.src[1];
        if (columns != leader_->src[1] || columns->op == GGML_OP_NONE || columns->view_src != nullptr ||
            node.src[kAdded] != nullptr || node.src[kFollower] != nullptr ||
            leader_->src[GGML_MAX_SRC - 1] != nullptr) {
            return false;
        }
        const auto * const begin    = static_cast<const char *>(node.data);
        const auto         overlaps = [&](const ggml_tensor * other) {
            const auto * const data = other == nullptr ? nullptr : static_cast<const char *>(other->data);
            return data != nullptr && begin < data + ggml_nbytes(other) &&
                   data < begin + ggml_nbytes(&node);
        };
        return std::none_of(between_.begin(), between_.end(), [&](const ggml_tensor * one) {
            return overlaps(one) || std::any_of(one->src, std::end(one->src), overlaps);
        });
    }

    // Whether *node* only adds numbers to the results of *product*, which then adds them. They are there
    // before the leader is computed.
    bool adds(ggml_tensor & product, const ggml_tensor & node) const {
        if (node.op != GGML_OP_ADD) {
            return false;
        }
        ggml_tensor * added = node.src[node.src[0] == &product ? 1 : 0];
        if ((node.src[0] != &product && node.src[1] != &product) || added == &product ||
            node.data != product.data || node.type != GGML_TYPE_F32 ||
            !ggml_are_same_shape(&node, &product) || !ggml_are_same_stride(&node, &product) ||
            added->type != GGML_TYPE_F32 || !ggml_is_contiguous(added) || added->ne[0] != node.ne[0] ||
            (ggml_nrows(added) != 1 && !ggml_are_same_shape(added, &node)) ||
            (&product != leader_ && added->src[0] != nullptr)) {
            return false;
        }
        product.src[kAdded] = added;
        return true;
    }

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

    static size_t matrix_bytes(const ggml_tensor & rows) {
        return n_groups(rows) * group_bytes(rows);
    }

    // The matrix that column *i1* of part *i2* of the result is of; it may not exist.
    static int32_t matrix_of(const ggml_tensor & node, int64_t i1, int64_t i2) {
        const ggml_tensor * ids = node.src[2];
        if (ids == nullptr) {
            return int32_t(i2 / (node.ne[2] / node.src[0]->ne[2]));
        }
        const char * data = static_cast<const char *>(ids->data) + i1 * ids->nb[0] + i2 * ids->nb[1];
        return *reinterpret_cast<const int32_t *>(data);
    }

    // Matrices that *node* needs and nobody has woven.
    static Matrices missing_of(const ggml_tensor & node, const WovenWeights & weights) {
        Matrices      missing, used;
        const int64_t n = node.src[0]->ne[2];
        for (int64_t matrix = 0; matrix < n; ++matrix) {
            missing[matrix] = !weights.is_ready[matrix].load(std::memory_order_acquire);
        }
        for (int64_t i = 0; missing.any() && i < ggml_nrows(&node); ++i) {
            const int32_t matrix = matrix_of(node, i % node.ne[1], i / node.ne[1]);
            if (matrix >= 0 && matrix < n) {
                used.set(matrix);
            }
        }
        return missing & used;
    }

    // Where the columns of each matrix begin in order(), and the end of the last.
    int32_t * begins() const { return reinterpret_cast<int32_t *>(places_.data()); }

    // The columns of the result, those of the first matrix first.
    int32_t * order(const ggml_tensor & node) const { return begins() + node.src[0]->ne[2] + 1; }

    // Sort the columns of *node* by their matrices. Those of no matrix are 0.
    void sort(ggml_tensor & node) const {
        const int64_t n_matrices = node.src[0]->ne[2];
        int32_t *     next = begins(), *to = order(node);
        std::fill_n(next, n_matrices + 1, 0);
        // First as many as there are before, then where the next one of each goes.
        for (int pass = 0; pass < 2; ++pass) {
            for (int64_t i = 0; i < ggml_nrows(&node); ++i) {
                const int32_t matrix = matrix_of(node, i % node.ne[1], i / node.ne[1]);
                if (matrix < 0 || matrix >= n_matrices) {
                    std::memset(static_cast<char *>(node.data) + i * node.nb[1], 0, node.nb[1]);
                } else if (pass == 0) {
                    ++next[matrix + 1];
                } else {
                    to[next[matrix]++] = int32_t(i);
                }
            }
            if (pass == 0) {
                std::partial_sum(next, next + n_matrices + 1, next);
            }
        }
        // Each now begins where the next one should.
        std::copy_backward(next, next + n_matrices, next + n_matrices + 1);
        next[0] = 0;
    }

    static const float * column_of(const ggml_tensor & columns, int64_t i) {
        return reinterpret_cast<const float *>(static_cast<const char *>(columns.data) +
                                               i % columns.ne[1] * columns.nb[1] +
                                               i / columns.ne[1] * columns.nb[2]);
    }

    // The column that column *i* of the result is computed from. Experts may share one.
    static int32_t source_of(const ggml_tensor & node, int64_t i) {
        const int64_t n_each = node.src[1]->ne[1];
        return int32_t(i / node.ne[1] * n_each + i % node.ne[1] % n_each);
    }

    // Whether *node* is computed by many_. Any two columns of a prompt are, so that their bits do not depend
    // on where it is cut. Experts need as many columns each as streams do, because products of a few take twice
    // as long. Drafts of a stream do not count, because they come and go.
    bool are_many(const ggml_tensor & node) const {
        const bool    is_prompt = n_streams_ == 0;
        const int64_t n_columns = ggml_nrows(&node);
        if (many_ == nullptr || n_columns == 1) {
            return false;
        }
        if (node.src[2] != nullptr) {
            return (is_prompt ? n_columns : n_streams_ * node.ne[1]) >= many_->from * node.src[0]->ne[2];
        }
        return is_prompt || n_streams_ >= many_->from;
    }

    // A thread packs some of the columns, or a part of each if there are few.
    void pack(const ggml_tensor & from, int ith, int n_threads) const {
        const int            n_blocks  = int(from.ne[0] / woven::kBlock);
        const int            n_columns = int(ggml_nrows(&from));
        const woven::Columns columns{packed_.data(), n_blocks};
        const bool           by_column = n_columns >= n_threads;
        const int            n_parts   = by_column ? n_columns : n_blocks;
        const int first = n_parts * ith / n_threads, last = n_parts * (ith + 1) / n_threads;
        for (int c = by_column ? first : 0; c < (by_column ? last : n_columns); ++c) {
            level_->pack(columns, c, by_column ? 0 : first, by_column ? n_blocks : last, column_of(from, c));
        }
    }

    // Columns of the same matrix stand behind each other, as its products read them.
    void pack_many(const ggml_tensor & node, int ith, int n_threads) const {
        const ggml_tensor &      from     = *node.src[1];
        const int                n_blocks = int(from.ne[0] / woven::kBlock);
        const bool               in_order = node.src[2] == nullptr;
        const int                n = in_order ? int(ggml_nrows(&node)) : begins()[node.src[0]->ne[2]];
        const woven::Bf16Columns columns{packed_.data(), n_blocks, n};
        for (int64_t c = int64_t(n) * ith / n_threads; c < int64_t(n) * (ith + 1) / n_threads; ++c) {
            const int32_t source = in_order ? int32_t(c) : source_of(node, order(node)[c]);
            many_->pack(columns, int(c), column_of(from, source));
        }
    }

    // Rows that do not exist repeat the last one. The pages of the file are given back.
    static void weave(const ggml_tensor & rows, const WovenWeights & weights, int32_t matrix,
                      int64_t first, int64_t last) {
        const woven::Kind & kind = woven::kKinds[kind_of(rows.type)];
        const size_t  n_bytes  = ggml_type_size(rows.type);
        const int64_t n_blocks = rows.ne[0] / ggml_blck_size(rows.type);
        uint8_t *     to       = memory_of(rows, weights, matrix) + first * group_bytes(rows);
        for (int64_t group = first; group < last; ++group) {
            const char * from[woven::kRows];
            for (int r = 0; r < woven::kRows; ++r) {
                const int64_t row = std::min(group * woven::kRows + r, rows.ne[1] - 1);
                from[r]           = data_of(rows, matrix) + row * rows.nb[1];
            }
            for (int64_t i = 0; i < n_blocks; ++i, to += kind.n_bytes) {
                kind.weave(from, to);
                for (const char *& row : from) {
                    row += n_bytes;
                }
            }
        }
        give_back(rows, data_of(rows, matrix) + first * woven::kRows * rows.nb[1],
                  size_t(last - first) * woven::kRows * rows.nb[1]);
    }

    // One column and one matrix. Each thread packs the column for itself, because that takes less time
    // than to wait for the others.
    void multiply_alone(ggml_tensor & node, NodeState & state, int ith, int n_threads) const {
        static constexpr int32_t kFirst   = 0;
        const int                n_blocks = int(node.src[0]->ne[0] / woven::kBlock);
        char * const             packed   = packed_.data() + ith * woven::Columns::bytes(n_blocks);
        level_->pack({packed, n_blocks}, 0, 0, n_blocks, static_cast<const float *>(node.src[1]->data));
        multiply_few(node, {packed, &kFirst, 1}, state, ith, n_threads);
    }

    // Columns of one matrix.
    struct Wanted {
        char *          packed;   // those of all matrices
        const int32_t * columns;  // of the result
        int             n;
        bool            are_many = false;
        int             first    = 0;  // of many: the place of the first one
    };

    // A few columns, times the matrix of *leader* and those of the products that have joined it. A thread has
    // most rows of each in one piece, which it reads from memory without a break. It takes the rest a part
    // at a time, so that nobody waits long for a thread that another program disturbs.
    void multiply_few(ggml_tensor & leader, const Wanted & wanted, NodeState & state, int ith,
                      int n_threads) const {
        const auto rows_of_a_thread = [&](int n_rows, int chunk) {
            return n_rows / chunk * 3 / 4 / n_threads * chunk;
        };
        ggml_tensor * products[GGML_MAX_SRC + 1] = {&leader};  // behind the last one is nullptr
        std::copy(leader.src + kFollower, std::end(leader.src), products + 1);
        for (ggml_tensor ** product = products; *product != nullptr; ++product) {
            const int n_rows = int((*product)->ne[0]);
            const int n_own  = rows_of_a_thread(n_rows, chunk_of(n_rows, n_threads));
            multiply(**product, weights_of(**product).memory.get(), wanted, n_own * ith, n_own * (ith + 1));
        }
        int part = state.take(), n_before = 0;  // parts of the products before
        for (ggml_tensor ** product = products; *product != nullptr; ++product) {
            const int n_rows = int((*product)->ne[0]), chunk = chunk_of(n_rows, n_threads);
            const int begin   = rows_of_a_thread(n_rows, chunk) * n_threads;  // of the rest
            const int n_parts = (n_rows - begin + chunk - 1) / chunk;
            for (; part < n_before + n_parts; part = state.take()) {
                const int first = begin + (part - n_before) * chunk;
                multiply(**product, weights_of(**product).memory.get(), wanted, first,
                         std::min(first + chunk, n_rows));
            }
            n_before += n_parts;
        }
    }

    // Rows that a thread takes at a time, of *n_rows* in all: few where there are few.
    static int chunk_of(int64_t n_rows, int n_threads) {
        return (n_rows >= int64_t(kChunks) * 4 * woven::kRows * n_threads ? 4 : 1) * woven::kRows;
    }

    // The same for many columns: enough that it pays to load these into the cache of a core.
    static int many_rows_of(int n_rows, int n_threads) {
        constexpr int kPair = 2 * woven::kRows;
        return std::max(kPair, n_rows / (4 * n_threads) / kPair * kPair);
    }

    // A thread takes some rows of a matrix at a time, and multiplies all columns of the matrix; or, of many,
    // those that stay in the cache, while it takes one part of the rows after the other.
    void multiply(ggml_tensor & node, const WovenWeights & weights, NodeState & state, int ith,
                  int n_threads) const {
        const ggml_tensor & rows       = *node.src[0];
        const int           n_matrices = int(rows.ne[2]), n_rows = int(node.ne[0]);
        const woven::Many * many       = state.are_many ? many_ : nullptr;
        const int64_t       n_all      = std::min<int64_t>(n_matrices, ggml_nrows(&node)) * n_rows;
        const int           chunk      = many == nullptr ? chunk_of(n_all, n_threads)
                                                         : many_rows_of(n_rows, n_threads);
        const int           n_chunks   = (n_rows + chunk - 1) / chunk;
        int                 matrix = 0, n_before = 0;  // parts of matrices before
        const auto wanted = [&](int of) {
            const int first = begins()[of];
            return Wanted{packed_.data(), order(node) + first, begins()[of + 1] - first, many != nullptr,
                          first};
        };
        if (n_matrices == 1 && wanted(0).n <= woven::kMostColumns) {
            multiply_few(node, wanted(0), state, ith, n_threads);
            return;
        }
        for (int part = state.take(); true; part = state.take()) {
            int n_at_once = 0;  // columns
            for (; matrix < n_matrices; ++matrix) {
                const int n      = wanted(matrix).n;
                n_at_once        = many == nullptr ? n : many->at_once(n, int(rows.ne[0] / woven::kBlock));
                const int n_here = n == 0 ? 0 : (n + n_at_once - 1) / n_at_once * n_chunks;
                if (part < n_before + n_here) {
                    break;
                }
                n_before += n_here;
            }
            if (matrix == n_matrices) {
                return;
            }
            const int first  = (part - n_before) % n_chunks * chunk;
            const int column = (part - n_before) / n_chunks * n_at_once;
            Wanted    some   = wanted(matrix);
            some.columns += column, some.first += column, some.n = std::min(n_at_once, some.n - column);
            multiply(node, memory_of(rows, weights, matrix), some, first, std::min(first + chunk, n_rows));
        }
    }

    // Rows first to last of a matrix in *memory*, times its columns.
    void multiply(ggml_tensor & node, const uint8_t * memory, const Wanted & wanted, int first,
                  int last) const {
        const ggml_tensor & rows     = *node.src[0];
        const int           kind = kind_of(rows.type), n_blocks = int(rows.ne[0] / woven::kBlock);
        const size_t        n_bytes  = group_bytes(rows), stride = node.nb[1] / sizeof(float);
        const bool          in_order = node.src[2] == nullptr;  // results of a matrix
        auto * const        results  = static_cast<float *>(node.data);
        const ggml_tensor * added    = node.src[kAdded];
        const auto * const  more     = added == nullptr ? nullptr : static_cast<const float *>(added->data);
        const size_t more_stride = added == nullptr || ggml_nrows(added) == 1 ? 0 : added->ne[0];
        // Of a product of a few columns.
        const auto add = [&](int row, int n_rows) {
            const int32_t to = wanted.columns[0];
            joined::add(results + to * stride + row, stride, wanted.n, more + to * more_stride + row,
                        more_stride, n_rows);
        };
        if (wanted.are_many) {
            const woven::Bf16Columns columns{wanted.packed, n_blocks, begins()[rows.ne[2]]};
            many_->tiles[kind](memory + first / woven::kRows * n_bytes, n_bytes, last - first, columns,
                               wanted.first, wanted.columns, wanted.n, results + first, stride);
            if (added != nullptr) {
                add(first, last - first);
            }
            return;
        }
        for (int32_t i = 0; i < wanted.n; i += woven::kMostColumns) {
            const int            n  = std::min(woven::kMostColumns, wanted.n - i);
            const int32_t *      to = wanted.columns + i;
            int32_t              from[woven::kMostColumns];
            for (int c = 0; c < n; ++c) {
                from[c] = source_of(node, to[c]);
            }
            const woven::Columns columns{wanted.packed, n_blocks, from};
            for (int row = first; row < last; row += woven::kRows) {
                alignas(64) float  out[woven::kMostColumns * woven::kRows];
                const int          n_rows = std::min(woven::kRows, last - row);
                const uint8_t *    group  = memory + row / woven::kRows * n_bytes;
                const woven::Tiles tiles  = level_->tiles[kind];
                if (in_order) {
                    tiles(group, columns, 0, n, results + to[0] * stride + row, stride, n_rows);
                    if (added != nullptr) {
                        add(row, n_rows);
                    }
                    continue;
                }
                tiles(group, columns, 0, n, out, woven::kRows, n_rows);
                for (int c = 0; c < n; ++c) {
                    std::memcpy(results + to[c] * stride + row, out + c * woven::kRows,
                                n_rows * sizeof(float));
                }
            }
        }
    }

    static const char * data_of(const ggml_tensor & rows, int32_t matrix) {
        return static_cast<const char *>(rows.data) + matrix * rows.nb[2];
    }

    static uint8_t * memory_of(const ggml_tensor & rows, const WovenWeights & weights, int32_t matrix) {
        return weights.memory.get() + matrix * matrix_bytes(rows);
    }

    // Whole huge pages of the file, because systems map these at once. Who needs what else is there
    // has it mapped again.
    static void give_back(const ggml_tensor & rows, const char * data, size_t n_bytes) {
        constexpr uintptr_t kHuge = uintptr_t(2) << 20;
        const auto page   = uintptr_t(sysconf(_SC_PAGESIZE));
        const auto buffer = uintptr_t(ggml_backend_buffer_get_base(rows.buffer));
        const auto first  = std::max(uintptr_t(data) / kHuge * kHuge, buffer / page * page);
        const auto last   = std::min((uintptr_t(data) + n_bytes + kHuge - 1) / kHuge * kHuge,
                                     buffer + ggml_backend_buffer_get_size(rows.buffer));
        madvise(reinterpret_cast<void *>(first), last - first, MADV_DONTNEED);
    }

    // Where somebody reads a vector between woven tensors, Linux from 6.18 on maps up to 2 MB around
    // it, but no more than has the same flags. So pages of a woven tensor get one that means little.
    // Those of experts would be more areas than a process may have.
    static void set_apart(const ggml_tensor & rows) {
#ifdef MADV_DONTDUMP
        const auto page  = uintptr_t(sysconf(_SC_PAGESIZE));
        const auto first = (uintptr_t(rows.data) + page - 1) / page * page;
        const auto last  = (uintptr_t(rows.data) + rows.nb[3]) / page * page;
        if (rows.ne[2] == 1 && first < last) {
            madvise(reinterpret_cast<void *>(first), last - first, MADV_DONTDUMP);
            give_back(rows, data_of(rows, 0), rows.nb[3]);
        }
#endif
    }

    const woven::Level * const level_     = woven::level();
    const woven::Many *        many_      = nullptr;  // if sums may have other bits
    int                        n_streams_ = 0;        // of the graph; 0: a prompt

    ggml_tensor * leader_ = nullptr;  // that products join, if they follow it
    ggml_tensor * latest_ = nullptr;  // the last node, if it is such a product
    std::vector<const ggml_tensor *> between_;  // the nodes that were shown since the leader

    Scratch             packed_, places_;
    const ggml_tensor * packed_of_ = nullptr;  // the many columns that the last product has packed
    std::unordered_map<const void *, std::shared_ptr<WovenWeights>> weights_;
};
