// Operations that we compute instead of libllama: products (product.h), attention.
//
// libllama shows every node of a graph to its evaluation callback before it computes the
// graph. There we make custom operations of those that we take, so the threads of libllama
// run them in their turn. Only where all devices are CPUs: no other knows such an operation.
#pragma once

#include <cstdint>

#include "llama.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <new>

#include "attention.h"
#include "ggml-backend.h"
#include "product.h"

class Kernels {
  public:
    static bool usable() {
        static const bool is_usable = has_avx512() && has_only_cpus() &&
                                      Product<product::Q4_1>::is_equal() &&
                                      Product<product::Q8_0>::is_equal();
        return is_usable;
    }

    Kernels()
        : q4_1_node_(custom(Product<product::Q4_1>::compute, &q4_1_)),
          q8_0_node_(custom(Product<product::Q8_0>::compute, &q8_0_)),
          attention_node_(custom(Attention::compute, nullptr)) {}

    // Operations of all graphs so far that were taken.
    int64_t n_products = 0, n_attentions = 0;

    void attach(llama_context_params * params) {
        params->cb_eval           = on_node;
        params->cb_eval_user_data = this;
    }

  private:
    static bool on_node(ggml_tensor * node, bool, void * data) {
        auto & self = *static_cast<Kernels *>(data);
        if (node->op == GGML_OP_CUSTOM) {
            if (self.is_ours(node)) {
                NodeState::of(node).reset();
            }
        } else if (self.q4_1_.takes(node)) {
            replace(node, self.q4_1_node_, 0);
            ++self.n_products;
        } else if (self.q8_0_.takes(node)) {
            replace(node, self.q8_0_node_, 0);
            ++self.n_products;
        } else if (Attention::takes(node)) {
            replace(node, self.attention_node_, Attention::scale(node));
            ++self.n_attentions;
        }
        return false;  // we do not want to see its result
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

    Product<product::Q4_1> q4_1_;
    Product<product::Q8_0> q8_0_;
    const ggml_tensor      q4_1_node_, q8_0_node_, attention_node_;
};

#else

class Kernels {
  public:
    int64_t     n_products = 0, n_attentions = 0;
    static bool usable() { return false; }
    void        attach(llama_context_params *) {}
};

#endif
