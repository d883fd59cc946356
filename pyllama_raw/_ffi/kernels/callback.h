// Operations that we compute instead of libllama: products (product.h), attention.
//
// libllama shows every node of a graph to its evaluation callback before it computes the
// graph. There we make custom operations of those that we take, so the threads of libllama
// run them in their turn. Only where all devices are CPUs: no other knows such an operation.
#pragma once

#include <cstdint>

#include "cells.h"
#include "llama.h"

// What this thread decodes, and the cells that it fills.
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

#include <new>

#include "attention.h"
#include "ggml-backend.h"
#include "product.h"

class Kernels {
  public:
    static bool usable() {
        static const bool is_usable = Attention::unit() != nullptr && has_only_cpus();
        return is_usable;
    }

    static bool has_products() {
        static const bool has_equal = usable() && has_avx512() &&
                                      Product<product::Q4_1>::is_equal() &&
                                      Product<product::Q8_0>::is_equal();
        return has_equal;
    }

    Kernels()
        : q4_1_node_(custom(Product<product::Q4_1>::compute, &q4_1_)),
          q8_0_node_(custom(Product<product::Q8_0>::compute, &q8_0_)),
          attention_node_(custom(Attention::compute, &orders_)) {}

    // Operations of all graphs so far that were taken.
    int64_t n_products = 0, n_attentions = 0;

    Cells cells;

    // *follows*: one pool of cells and one cache, whose cells are listed by position.
    void attach(llama_context_params * params, bool follows) {
        follows_                  = follows;
        params->cb_eval           = on_node;
        params->cb_eval_user_data = this;
    }

  private:
    static bool on_node(ggml_tensor * node, bool, void * data) {
        auto & self = *static_cast<Kernels *>(data);
        if (node->op == GGML_OP_SET_ROWS && self.follows_) {
            self.follow(node);
        } else if (node->op == GGML_OP_CUSTOM) {
            if (self.is_ours(node)) {
                NodeState::of(node).reset();
            }
        } else if (self.has_products_ && self.q4_1_.takes(node)) {
            replace(node, self.q4_1_node_, 0);
            ++self.n_products;
        } else if (self.has_products_ && self.q8_0_.takes(node)) {
            replace(node, self.q8_0_node_, 0);
            ++self.n_products;
        } else if (Attention::takes(node)) {
            replace(node, self.attention_node_, Attention::scale(node));
            ++self.n_attentions;
        }
        return false;  // we do not want to see its result
    }

    // *node* stores keys or values; the first tensor that one stored to stands for all.
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
            cells.clear();  // tokens of nobody we know
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

    // A custom operation, as ggml writes it.
    static ggml_tensor custom(ggml_custom_op_t compute, void * data) {
        const ggml_init_params params = {ggml_tensor_overhead() * 2, nullptr, true};
        ggml_context *         ctx    = ggml_init(params);
        if (ctx == nullptr) {
            throw std::bad_alloc();
        }
        ggml_tensor *     source = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, 1);
        const ggml_tensor made   = *ggml_custom_4d(ctx, GGML_TYPE_F32, 1, 1, 1, 1, &source, 1,
                                                   compute, GGML_N_TASKS_MAX, data);
        ggml_free(ctx);
        return made;
    }

    // Of the same function with the same data.
    bool is_ours(const ggml_tensor * node) const {
        for (const ggml_tensor * ours : {&q4_1_node_, &q8_0_node_, &attention_node_}) {
            if (std::memcmp(node->op_params, ours->op_params, NodeState::kOffset) == 0) {
                return true;
            }
        }
        return false;
    }

    static void replace(ggml_tensor * node, const ggml_tensor & custom, float scale) {
        node->op = custom.op;
        std::memcpy(node->op_params, custom.op_params, sizeof(node->op_params));
        NodeState::of(node) = {scale, 0, 0};
    }

    static bool has_only_cpus() {
        for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
            if (ggml_backend_dev_type(ggml_backend_dev_get(i)) != GGML_BACKEND_DEVICE_TYPE_CPU) {
                return false;
            }
        }
        return true;
    }

    const bool             has_products_ = has_products();
    bool                   follows_      = false;
    const ggml_tensor *    stored_       = nullptr;
    Attention::Orders      orders_;  // of the graph that is being computed
    Product<product::Q4_1> q4_1_;
    Product<product::Q8_0> q8_0_;
    const ggml_tensor      q4_1_node_, q8_0_node_, attention_node_;
};

#else

class Kernels {
  public:
    int64_t     n_products = 0, n_attentions = 0;
    Cells       cells;
    static bool usable() { return false; }
    static bool has_products() { return false; }
    void        attach(llama_context_params *, bool) {}
};

#endif
