// libllama shows every node of a graph to the evaluation callback of the context. A watch calls
// the callback that was there before, which is that of our kernels, and sees what it changes.
#include <atomic>
#include <cstring>
#include <deque>
#include <mutex>

#include "boundary/exceptions.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "kernels.h"

struct plr_watch {
    using Counts = std::atomic<int64_t>[PLR_COMPUTERS];

    Counts products[GGML_TYPE_COUNT] = {};  // multiply-adds, by type of the weights
    Counts attentions                = {};

    void attach(llama_context_params * params) {
        const std::lock_guard<std::mutex> lock(mutex_);
        contexts_.push_back({this, params->cb_eval, params->cb_eval_user_data});
        params->cb_eval           = on_node;
        params->cb_eval_user_data = &contexts_.back();
    }

    static void copy(const Counts & from, int64_t * to) {
        for (int i = 0; i < PLR_COMPUTERS; ++i) {
            to[i] = from[i].load(std::memory_order_relaxed);
        }
    }

  private:
    struct OfContext {
        plr_watch *                      watch;
        ggml_backend_sched_eval_callback inner;
        void *                           inner_data;
    };

    static bool on_node(ggml_tensor * node, bool ask, void * data) {
        const auto &  context = *static_cast<const OfContext *>(data);
        const ggml_op op      = node->op;  // before our kernels take the node
        const bool    wants =
            context.inner != nullptr && context.inner(node, ask, context.inner_data);
        if (ask) {
            context.watch->count(*node, op);
        }
        return wants;
    }

    void count(const ggml_tensor & node, ggml_op op) {
        // What was ours when a graph was made is ours when it is computed again. Of our
        // operations products alone have weights and then columns of floats.
        const bool ours     = node.op != op || op == GGML_OP_CUSTOM;
        const bool is_named = op == GGML_OP_MUL_MAT || op == GGML_OP_MUL_MAT_ID;
        if (op == GGML_OP_FLASH_ATTN_EXT) {
            add(attentions[ours ? PLR_BY_US : PLR_BY_LIBLLAMA], 1);
        } else if ((is_named || op == GGML_OP_CUSTOM) && is_weight(node.src[0]) &&
                   node.src[1]->type == GGML_TYPE_F32) {
            const ggml_tensor & rows = *node.src[0];
            add(products[rows.type][ours ? PLR_BY_US : by_buffer(rows)],
                ggml_nelements(&node) * rows.ne[0]);
        }
    }

    static void add(std::atomic<int64_t> & to, int64_t n) {  // by one thread
        to.store(to.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
    }

    static bool is_weight(const ggml_tensor * rows) {
        return rows->buffer != nullptr && ggml_backend_buffer_get_usage(rows->buffer) ==
                                              GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
    }

    // The buffer tells what computes, because each has its own order of weights.
    static int by_buffer(const ggml_tensor & rows) {
        const char * name = ggml_backend_buft_name(ggml_backend_buffer_get_type(rows.buffer));
        if (std::strcmp(name, "AMX") == 0) {
            return PLR_BY_AMX;
        }
        return std::strcmp(name, "CPU_REPACK") == 0 ? PLR_BY_REPACKED : PLR_BY_LIBLLAMA;
    }

    std::mutex            mutex_;
    std::deque<OfContext> contexts_;  // each stays where it is
};

plr_watch * plr_watch_new(void) {
    return guarded<plr_watch *>(nullptr, [] { return new plr_watch; });
}

void plr_watch_free(plr_watch * watch) {
    delete watch;
}

bool plr_watch_attach(llama_context_params * params, plr_watch * watch) {
    return guarded<bool>(false, [&] {
        watch->attach(params);
        return true;
    });
}

void plr_watch_products(const plr_watch * watch, int64_t * counts) {
    for (int type = 0; type < GGML_TYPE_COUNT; ++type) {
        plr_watch::copy(watch->products[type], counts + type * PLR_COMPUTERS);
    }
}

void plr_watch_attentions(const plr_watch * watch, int64_t * counts) {
    plr_watch::copy(watch->attentions, counts);
}
