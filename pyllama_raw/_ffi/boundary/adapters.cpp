#include "adapters.h"

#include <stdexcept>

#include "adapters_gate.h"
#include "exceptions.h"

llama_adapter_lora * plr_adapter_load(llama_model * model, const char * path) {
    remember("");
    return guarded<llama_adapter_lora *>(nullptr, [&] {
        return adapters_gate.changing([&] { return llama_adapter_lora_init(model, path); });
    });
}

void plr_adapter_free(llama_adapter_lora * adapter) {
    attempt([&] { adapters_gate.changing([&] { llama_adapter_lora_free(adapter); }); });
}

int plr_set_adapters(llama_context * ctx, int32_t n_adapters, llama_adapter_lora ** adapters,
                     float * scales, const float * directions, int32_t n_layer,
                     int32_t n_embd) {
    return attempt([&] {
        llama_set_adapters_lora(ctx, adapters, static_cast<size_t>(n_adapters), scales);
        const auto n_floats = static_cast<size_t>(n_layer - 1) * static_cast<size_t>(n_embd);
        if (llama_set_adapter_cvec(ctx, directions, n_floats, n_embd, 1, n_layer - 1) != 0) {
            throw std::runtime_error("there is no memory for a control vector");
        }
    });
}
