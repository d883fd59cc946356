// The evaluation callback that makes nodes of a graph ours.
//
// libllama shows every node of a graph to its evaluation callback before it computes the
// graph. The callback makes custom operations of the nodes that our kernels take (table.h), and
// the threads of libllama run them in their turn.
#pragma once

#include <cstdint>

#include "cells.h"
#include "llama.h"
#include "table.h"

// The batch that this thread decodes, and the cells that the batch fills.
struct Decoding {
    const llama_batch * batch;
    int32_t             n_shown = 0;  // tokens in the graphs so far
    Cells *             cells   = nullptr;

    static Decoding *& current() {
        thread_local Decoding * value = nullptr;
        return value;
    }
};

#if defined(__x86_64__) && defined(__GNUC__)

class Kernels {
  public:
    // Products need more of the CPU than attention, so one row decides for all.
    static bool usable() { return kernels::is_usable(kernels::attention_row()); }

    int64_t n_taken[kernels::N_ROWS] = {};  // operations of all graphs, by row of the table
    Cells   cells;

    // With *follows* there is one pool of cells in one cache, and they are listed by position.
    void attach(llama_context_params * params, bool follows) {
        follows_                  = follows;
        makes_vectors_            = params->embeddings;
        params->cb_eval           = on_node;
        params->cb_eval_user_data = this;
    }

  private:
    static bool on_node(ggml_tensor * node, bool, void * data) {
        auto & self = *static_cast<Kernels *>(data);
        if (node->op == GGML_OP_SET_ROWS && self.follows_) {
            self.follow(node);
        } else if (node->op == GGML_OP_CUSTOM) {
            self.reset(node);
        } else if (self.has_q4_1_ && self.q4_1_.takes(node)) {
            self.take(node, kernels::Q4_1, self.q4_1_node_, 0);
        } else if (self.has_q8_0_ && self.q8_0_.takes(node)) {
            self.take(node, kernels::Q8_0, self.q8_0_node_, 0);
        } else if (Attention::takes(node)) {
            self.take(node, kernels::attention_row(), self.attention_node_,
                      Attention::scale(node));
        } else if (self.makes_vectors_ && FloatProduct::takes(node)) {
            const bool is_half = node->src[0]->type == GGML_TYPE_F16;
            self.take(node, is_half ? kernels::F16 : kernels::F32, self.float_node_, 0);
        } else if (self.makes_vectors_ && Gelu::takes(node)) {
            self.take(node, kernels::GELU, self.gelu_node_, 0);
        } else if (self.makes_vectors_ && Halves::takes(node)) {
            self.take(node, kernels::HALVES, self.halves_node_, 0);
        }
        return false;  // the result of the node is not wanted
    }

    void take(ggml_tensor * node, int row, const CustomNode & custom, float scale) {
        custom.replace(node, scale);
        ++n_taken[row];
    }

    // libllama computes a graph again without making its nodes anew.
    void reset(ggml_tensor * node) const {
        for (const CustomNode * ours : {&q4_1_node_, &q8_0_node_, &attention_node_, &float_node_,
                                        &gelu_node_, &halves_node_}) {
            if (ours->is_of(node)) {
                NodeState::of(node).reset();
                return;
            }
        }
    }

    // *node* stores keys or values. All layers store to the same cells, so the first tensor
    // that is stored to stands for all.
    void follow(const ggml_tensor * node) {
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

    const bool             has_q4_1_ = kernels::is_usable(kernels::Q4_1);
    const bool             has_q8_0_ = kernels::is_usable(kernels::Q8_0);
    bool                   follows_  = false;
    bool                   makes_vectors_ = false;  // bits then need not be libllama's
    const ggml_tensor *    stored_   = nullptr;
    Attention::Orders      orders_;  // of the graph that is being computed
    Product<product::Q4_1> q4_1_;
    Product<product::Q8_0> q8_0_;
    const CustomNode q4_1_node_{Product<product::Q4_1>::compute, &q4_1_};
    const CustomNode q8_0_node_{Product<product::Q8_0>::compute, &q8_0_};
    const CustomNode attention_node_{Attention::compute, &orders_};
    const CustomNode float_node_{FloatProduct::compute, nullptr};
    const CustomNode gelu_node_{Gelu::compute, nullptr};
    const CustomNode halves_node_{Halves::compute, nullptr};
};

#else

class Kernels {
  public:
    int64_t     n_taken[1] = {};
    Cells       cells;
    static bool usable() { return false; }
    void        attach(llama_context_params *, bool) {}
};

#endif
