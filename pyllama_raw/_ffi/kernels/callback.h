// The kernels that we have, and the evaluation callback that makes nodes of a graph ours.
//
// libllama shows every node of a graph to its evaluation callback before it computes the
// graph. The callback makes custom operations of the nodes that our kernels take, and
// the threads of libllama run them in their turn.
#pragma once

#include <cstdint>
#include <utility>

#include "boundary/views.h"
#include "cells.h"
#include "ggml-backend.h"
#include "kernels.h"
#include "llama.h"

// The batch that this thread decodes, and the cells that the batch fills.
struct Decoding {
    const llama_batch * batch;
    int32_t             n_rows;       // that are sampled
    int32_t             n_shown = 0;  // tokens in the graphs so far
    Cells *             cells   = nullptr;
    bool                is_new  = true;  // none of its nodes has been seen

    // The streams whose next tokens the batch has; 0 if it has tokens of a prompt. A stream has one token, or
    // several, which are all sampled, if the others are drafts.
    int n_streams() const {
        int n = 1;
        for (int32_t i = 1; i < batch->n_tokens; ++i) {
            n += batch->seq_id[i][0] != batch->seq_id[i - 1][0];
        }
        return n == batch->n_tokens || n_rows == batch->n_tokens ? n : 0;
    }

    static Decoding *& current() {
        thread_local Decoding * value = nullptr;
        return value;
    }
};

#if defined(__x86_64__) && defined(__GNUC__)

#include "attention.h"
#include "column_product.h"
#include "elementwise.h"
#include "float_product.h"
#include "text_attention.h"
#include "woven_product.h"

// What each kernel computes, and which CPUs it needs.
namespace kernels {

constexpr const char * kAvx512 = "AVX-512 F, BW, DQ, VL and VNNI";
constexpr const char * kAvx2   = "AVX2, FMA and F16C";
constexpr const char * kNoMore = "AVX2, FMA and F16C at most";

enum Index {
    ATTENTION_AVX512, ATTENTION_AVX2, COLUMNS, F32, F16, GELU, NORM, HALVES,
    WOVEN, N_ROWS = WOVEN + WovenProduct::kKinds  // in the order of its kinds
};

struct Row {
    const char * computes;
    const char * needs;
    bool (*is_usable)();
};

constexpr Row kTable[WOVEN] = {  // of one kind the first usable row computes
    {"attention", kAvx512, has_avx512},
    {"attention", kAvx2, has_avx2},
    {"columns", "x86-64", ColumnProduct::is_usable},  // only if deterministic
    {"f32", kNoMore, float_tile::Tile::is_usable},  // these five only where vectors are made of texts
    {"f16", kAvx2, short_tile::Tile::is_usable},
    {"gelu", kAvx2, has_avx2},
    {"norm", kAvx2, has_avx2},
    {"halves", kAvx2, has_avx2},
};

// Those of woven weights follow, which need what the level needs that is chosen.
inline Row row(int index) {
    if (index < WOVEN) {
        return kTable[index];
    }
    const woven::Level * level = woven::level();
    return {ggml_type_name(woven::kKinds[index - WOVEN].type),
            level != nullptr ? level->needs : "AVX2", WovenProduct::is_usable};
}

// No other device knows a custom operation.
inline bool has_only_cpus() {
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        if (ggml_backend_dev_type(ggml_backend_dev_get(i)) != GGML_BACKEND_DEVICE_TYPE_CPU) {
            return false;
        }
    }
    return true;
}

inline bool is_usable(int index) {
    static const bool only_cpus = has_only_cpus();
    return only_cpus && row(index).is_usable();
}

inline Index attention_row() {
    return Attention::unit() == &attention::avx512::kUnit ? ATTENTION_AVX512 : ATTENTION_AVX2;
}

}  // namespace kernels

class Kernels {
  public:
    static bool has_attention() { return kernels::is_usable(kernels::attention_row()); }
    static bool has_fast() { return has_attention() || kernels::is_usable(kernels::WOVEN); }
    static bool has_columns() { return kernels::is_usable(kernels::COLUMNS); }

    int64_t n_taken[kernels::N_ROWS] = {};  // operations of all graphs, by row of the table
    Cells   cells;
    const char * stray = "";  // see plr_kernels_stray()

    // With *follows* there is one pool of cells in one cache, and they are listed by position.
    void attach(llama_context_params * params, bool fast, bool follows, int32_t sums) {
        sums_                     = has_columns() ? sums : PLR_SUMS_ANY;
        attends_                  = fast && has_attention();
        follows_                  = attends_ && follows;
        // Sums have other last digits than libllama's.
        weaves_ = fast && sums != PLR_SUMS_LIBLLAMA && kernels::is_usable(kernels::WOVEN);
        woven_.set_free(weaves_ && sums == PLR_SUMS_ANY);
        makes_vectors_            = attends_ && params->embeddings;
        params->cb_eval           = on_node;
        params->cb_eval_user_data = this;
    }

  private:
    using F32Product = FloatProduct<float_tile::Tile>;
    using F16Product = FloatProduct<short_tile::Tile>;

    static bool on_node(ggml_tensor * node, bool, void * data) {
        static_cast<Kernels *>(data)->see(node);
        return false;  // the result of the node is not wanted
    }

    void see(ggml_tensor * node) {
        // A graph has nodes for each kind of batch, and only those of this batch are computed.
        const bool is_computed = (node->flags & GGML_TENSOR_FLAG_COMPUTE) != 0;
        Decoding * decoding = Decoding::current();
        if (decoding == nullptr || std::exchange(decoding->is_new, false)) {
            // The node before is of another graph, which libllama may have freed. Without a Decoding, as
            // in llama_encode(), nobody tells where a graph begins, so no node joins another.
            leader_ = nullptr;
            woven_.begin(decoding == nullptr ? 0 : decoding->n_streams());
        }
        woven_.see(node);
        if (!is_computed || is_view(node) || joins(node)) {
            return;
        }
        replace(node);
        if (weaves_ && woven_.joins(node, woven_node_.is_of(node))) {
            node->op = GGML_OP_NONE;
        }
        if (sums_ != PLR_SUMS_LIBLLAMA && !is_apart(node->op)) {
            stray = ggml_op_name(node->op);
        }
    }

    // Whether *node* multiplies weights of the model or of an adapter. Keys, values and what a
    // graph computes are no weights: sums over cells depend on where these lie.
    static bool is_product(const ggml_tensor * node) {
        if (node->op != GGML_OP_MUL_MAT && node->op != GGML_OP_MUL_MAT_ID) {
            return false;
        }
        return node->src[0]->view_src == nullptr && outlives(node->src[0]);
    }

    // Whether *tensor* is no result of the graph.
    static bool outlives(const ggml_tensor * tensor) {
        return tensor->buffer != nullptr &&
               ggml_backend_buffer_get_usage(tensor->buffer) != GGML_BACKEND_BUFFER_USAGE_COMPUTE;
    }

    // Whether what an operation computes of a token does not depend on the tokens beside it. It
    // moves numbers, or computes a row of a tensor from the same row of others.
    static bool is_apart(ggml_op op) {
        switch (op) {
            case GGML_OP_CUSTOM:  // ours
            case GGML_OP_NONE:    // has joined one of ours
            case GGML_OP_DUP: case GGML_OP_CPY: case GGML_OP_CONT: case GGML_OP_CONCAT:
            case GGML_OP_REPEAT: case GGML_OP_GET_ROWS: case GGML_OP_SET_ROWS:
            case GGML_OP_ADD: case GGML_OP_ADD_ID: case GGML_OP_SUB: case GGML_OP_MUL:
            case GGML_OP_DIV: case GGML_OP_SQR: case GGML_OP_SQRT: case GGML_OP_SCALE:
            case GGML_OP_CLAMP: case GGML_OP_UNARY: case GGML_OP_GLU:
            case GGML_OP_NORM: case GGML_OP_RMS_NORM: case GGML_OP_L2_NORM:
            case GGML_OP_SUM_ROWS: case GGML_OP_SOFT_MAX: case GGML_OP_ROPE:
            case GGML_OP_ARGSORT: case GGML_OP_TOP_K:
                return true;
            default:
                return false;
        }
    }

    void replace(ggml_tensor * node) {
        const ggml_tensor * before = std::exchange(leader_, nullptr);
        if (node->op == GGML_OP_SET_ROWS && follows_) {
            follow(node);
        } else if (node->op == GGML_OP_CUSTOM) {
            reset(node);
        } else if (weaves_ && woven_.looks_up(node)) {
            take(node, kernels::WOVEN + WovenProduct::kind_of(node->src[0]->type), lookup_node_);
        } else if (weaves_ && woven_.takes(node)) {
            take(node, kernels::WOVEN + WovenProduct::kind_of(node->src[0]->type), woven_node_,
                 woven_.state(node));
        } else if (sums_ == PLR_SUMS_LIBLLAMA && columns_.takes(node, are_streams())) {
            take(node, kernels::COLUMNS, columns_node_);
        } else if (sums_ == PLR_SUMS_OURS && is_product(node) && columns_.can_take(node)) {
            take(node, kernels::COLUMNS, columns_node_);
        } else if (attends_ && Attention::takes(node)) {
            take(node, kernels::attention_row(), makes_vectors_ ? text_node_ : attention_node_,
                 Attention::state(node));
        } else if (makes_vectors_) {
            see_for_vectors(node, before);
        }
    }

    // *before* is the last node, if others can join it.
    void see_for_vectors(ggml_tensor * node, const ggml_tensor * before) {
        if (f32_.takes(node)) {
            take(node, kernels::F32, f32_node_);
            tail_ = leader_ = node;
        } else if (f16_.takes(node)) {
            const bool follows = before != nullptr && f16_node_.is_of(before);
            take(node, kernels::F16, f16_node_, F16Product::state(node, follows ? before : nullptr));
            tail_ = leader_ = node;
        } else if (Gelu::takes(node)) {
            take(node, kernels::GELU, gelu_node_);
        } else if (Norm::takes(node)) {
            take(node, kernels::NORM, norm_node_, Norm::state(node));
            tail_ = leader_ = node;
        } else if (Halves::takes(node)) {
            take(node, kernels::HALVES, halves_node_);
        }
    }

    // Whether the tokens that are computed are of several slots, one of each.
    static bool are_streams() {
        const Decoding * decoding = Decoding::current();
        return decoding != nullptr && decoding->batch->n_tokens > 1 &&
               decoding->batch->seq_id[0][0] != decoding->batch->seq_id[1][0];
    }

    void take(ggml_tensor * node, int row, const CustomNode & custom, NodeState state = {}) {
        custom.replace(node, state);
        ++n_taken[row];
    }

    // Whether *node* only changes what the node before it computes, which is ours and does that
    // at once. Nothing is left to do then.
    bool joins(ggml_tensor * node) {
        if (leader_ == nullptr) {
            return false;
        }
        const bool is_norm = norm_node_.is_of(leader_);
        if (!(is_norm ? Norm::joins : F32Product::joins)(leader_, tail_, node)) {
            return false;
        }
        n_taken[kernels::GELU] += node->op == GGML_OP_UNARY;
        node->op = GGML_OP_NONE;
        tail_    = node;
        return true;
    }

    // libllama computes a graph again without making its nodes anew.
    void reset(ggml_tensor * node) {
        for (const CustomNode * ours : {&woven_node_, &lookup_node_, &columns_node_, &attention_node_, &text_node_,
                                        &f32_node_, &f16_node_, &gelu_node_, &norm_node_,
                                        &halves_node_}) {
            if (ours->is_of(node)) {
                NodeState::of(node).reset();
                if (ours == &woven_node_) {
                    NodeState::of(node) = woven_.state(node);
                }
                return;
            }
        }
    }

    // *node* stores keys or values, if it stores to memory that outlives the graph. All layers
    // store to the same cells, so the first tensor that is stored to stands for all.
    void follow(const ggml_tensor * node) {
        if (!outlives(node->view_src)) {
            return;  // such as rows of tokens beside those of an image, which llama.cpp 0.6 joins
        }
        stored_ = stored_ ? stored_ : node->view_src;
        if (node->view_src != stored_) {
            return;
        }
        orders_.clear();
        const ggml_tensor * places   = node->src[1];
        Decoding *          decoding = Decoding::current();
        const auto          n_tokens = int32_t(places->ne[0]);
        if (decoding == nullptr || decoding->n_shown + n_tokens > decoding->batch->n_tokens ||
            places->type != GGML_TYPE_I64) {
            cells.clear();  // the tokens are of an unknown batch
            return;
        }
        const llama_batch & batch = *decoding->batch;
        const auto *        to    = static_cast<const int64_t *>(places->data);
        const int32_t       first = decoding->n_shown;
        for (int32_t i = 0; i < n_tokens; ++i) {
            cells.write(batch.seq_id[first + i][0], batch.pos[first + i], int32_t(to[i]));
        }
        bool are_disordered = false;
        for (int32_t i = 0; i < n_tokens; ++i) {
            orders_.push_back(cells.disordered(batch.seq_id[first + i][0]));
            are_disordered = are_disordered || orders_.back() != nullptr;
        }
        if (!are_disordered) {
            orders_.clear();
        }
        decoding->n_shown += n_tokens;
        decoding->cells = &cells;
    }

    bool                   attends_  = false;
    int32_t                sums_     = PLR_SUMS_ANY;
    bool                   follows_  = false;
    bool                   weaves_   = false;
    bool                   makes_vectors_ = false;  // bits then need not be libllama's
    const ggml_tensor *    stored_   = nullptr;
    ggml_tensor *          leader_   = nullptr;  // the last node, if others can join it
    const ggml_tensor *    tail_     = nullptr;  // the last one that has
    Attention::Orders      orders_;  // of the graph that is being computed
    WovenProduct           woven_;
    ColumnProduct          columns_;
    F32Product             f32_;
    F16Product             f16_;
    const CustomNode woven_node_{WovenProduct::compute, &woven_};
    const CustomNode lookup_node_{WovenProduct::look_up, nullptr};
    const CustomNode columns_node_{ColumnProduct::compute, &columns_};
    const CustomNode attention_node_{Attention::compute, &orders_};
    const CustomNode text_node_{TextAttention::compute, &orders_};
    const CustomNode f32_node_{F32Product::compute, &f32_};
    const CustomNode f16_node_{F16Product::compute, &f16_};
    const CustomNode gelu_node_{Gelu::compute, nullptr};
    const CustomNode norm_node_{Norm::compute, nullptr};
    const CustomNode halves_node_{Halves::compute, nullptr};
};

#else

class Kernels {
  public:
    int64_t     n_taken[1] = {};
    Cells       cells;
    const char * stray = "";
    static bool has_fast() { return false; }
    static bool has_columns() { return false; }
    void        attach(llama_context_params *, bool, bool, int32_t) {}
};

#endif
