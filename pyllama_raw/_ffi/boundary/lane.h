// What a lane leaves is kept until it is read.
//
// libllama marks what the lanes of this batch leave as outputs of the graph, and plans the memory
// of a graph anew only if its nodes are others. A graph of other slots has the same nodes: by the
// old plan the candidates of one slot then lie where those of another do, and both get the same
// tokens. So each lane ends with a stage that marks what it leaves, whether its slot has a row in
// the batch or not. All graphs then have one plan.
#pragma once

#include <stdexcept>

#include "ggml.h"
#include "llama.h"

namespace lane {

inline const char * name(const llama_sampler *) {
    return "kept";
}

inline void apply(llama_sampler *, llama_token_data_array *) {}

inline bool begin(llama_sampler *, ggml_backend_buffer_type_t, uint32_t) {
    return true;  // it adds no operation
}

inline void mark(llama_sampler *, ggml_context *, ggml_cgraph *, llama_sampler_data * data) {
    for (ggml_tensor * left : {data->logits, data->candidates}) {
        if (left != nullptr) {
            ggml_set_output(left);
        }
    }
}

// Let *chain*, which no context has yet, keep what it leaves.
inline void keep(llama_sampler * chain) {
    static llama_sampler_i interface = [] {
        llama_sampler_i stage{};  // without a state there is nothing to clone or free
        stage.name          = name;
        stage.apply         = apply;
        stage.backend_init  = begin;
        stage.backend_apply = mark;
        return stage;
    }();
    llama_sampler * stage = llama_sampler_init(&interface, nullptr);
    if (stage == nullptr) {
        throw std::runtime_error("no memory for a lane");
    }
    llama_sampler_chain_add(chain, stage);
}

}  // namespace lane
