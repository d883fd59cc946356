// libllama shows every node of a graph to the evaluation callback of the context. A watch calls
// the callback that was there before, which is that of our kernels, and sees what it changes.
#include "watch.h"

#include <cstring>

#include "boundary/exceptions.h"
#include "ggml-backend.h"
#include "ggml.h"

struct plr_watch {
    uint32_t products[GGML_TYPE_COUNT] = {};  // PLR_BY_ bits, by type of the weights
    uint32_t attentions                = 0;

    void attach(llama_context_params * params) {
        inner_                    = params->cb_eval;
        inner_data_               = params->cb_eval_user_data;
        params->cb_eval           = on_node;
        params->cb_eval_user_data = this;
    }

  private:
    static bool on_node(ggml_tensor * node, bool ask, void * data) {
        auto &        self  = *static_cast<plr_watch *>(data);
        const ggml_op op    = node->op;  // before our kernels take the node
        const bool    wants = self.inner_ != nullptr && self.inner_(node, ask, self.inner_data_);
        const bool    ours  = node->op != op;
        if (op == GGML_OP_FLASH_ATTN_EXT) {
            self.attentions |= ours ? PLR_BY_US : PLR_BY_LIBLLAMA;
        } else if ((op == GGML_OP_MUL_MAT || op == GGML_OP_MUL_MAT_ID) && is_weight(node->src[0])) {
            self.products[node->src[0]->type] |= ours ? PLR_BY_US : by_buffer(*node->src[0]);
        }
        return wants;
    }

    static bool is_weight(const ggml_tensor * rows) {
        return rows->buffer != nullptr && ggml_backend_buffer_get_usage(rows->buffer) ==
                                              GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
    }

    // The buffer tells what computes, because each has its own order of weights.
    static uint32_t by_buffer(const ggml_tensor & rows) {
        const char * name = ggml_backend_buft_name(ggml_backend_buffer_get_type(rows.buffer));
        if (std::strcmp(name, "AMX") == 0) {
            return PLR_BY_AMX;
        }
        return std::strcmp(name, "CPU_REPACK") == 0 ? PLR_BY_REPACKED : PLR_BY_LIBLLAMA;
    }

    ggml_backend_sched_eval_callback inner_      = nullptr;
    void *                           inner_data_ = nullptr;
};

plr_watch * plr_watch_new(void) {
    return guarded<plr_watch *>(nullptr, [] { return new plr_watch; });
}

void plr_watch_free(plr_watch * watch) {
    delete watch;
}

void plr_watch_attach(llama_context_params * params, plr_watch * watch) {
    watch->attach(params);
}

uint32_t plr_watch_products(const plr_watch * watch, ggml_type weights) {
    return watch->products[weights];
}

uint32_t plr_watch_attentions(const plr_watch * watch) {
    return watch->attentions;
}
