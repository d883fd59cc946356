#include "breakdown.h"

#include <map>
#include <stdexcept>

#include "exceptions.h"

// Exported by libllama, but in a header that is not installed.
struct llama_memory_breakdown_data {
    size_t model;
    size_t context;
    size_t compute;
};

LLAMA_API std::map<ggml_backend_buffer_type_t, llama_memory_breakdown_data>
          llama_get_memory_breakdown(const llama_context * ctx);

LLAMA_API ggml_cgraph * llama_graph_reserve(llama_context * ctx, uint32_t n_tokens, uint32_t n_seqs,
                                            uint32_t n_outputs);

int32_t plr_memory_parts(const llama_context * ctx, int32_t n_max, plr_memory_part * parts) {
    remember("");
    return guarded<int32_t>(PLR_EXCEPTION, [&] {
        int32_t n_parts = 0;
        for (const auto & [type, found] : llama_get_memory_breakdown(ctx)) {
            if (n_parts == n_max) {
                throw std::length_error("more types of buffers than there is room for");
            }
            const auto device = ggml_backend_buft_is_host(type) ? nullptr
                                                                : ggml_backend_buft_get_device(type);
            parts[n_parts++]  = {device, found.model, found.context, found.compute,
                                 type == ggml_backend_cpu_buffer_type()};
        }
        return n_parts;
    });
}

int64_t plr_graph_nodes(llama_context * ctx) {
    remember("");
    return guarded<int64_t>(PLR_EXCEPTION, [&] {
        const uint32_t n_seqs = llama_n_seq_max(ctx);
        ggml_cgraph *  graph  = llama_graph_reserve(ctx, n_seqs, n_seqs, n_seqs);
        if (graph == nullptr) {
            throw std::runtime_error("no graph of one token a sequence can be reserved");
        }
        return int64_t{ggml_graph_size(graph)};
    });
}
