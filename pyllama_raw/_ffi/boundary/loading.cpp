#include "loading.h"

#include <atomic>
#include <cstring>
#include <new>

#include "adapters_gate.h"
#include "exceptions.h"
#include "lane.h"

struct plr_progress {
    std::atomic<float> value{0.0f};
    std::atomic<bool>  cancelled{false};
};

plr_progress * plr_progress_new(void) {
    return new (std::nothrow) plr_progress;
}

void plr_progress_free(plr_progress * progress) {
    delete progress;
}

float plr_progress_get(const plr_progress * progress) {
    return progress->value.load(std::memory_order_relaxed);
}

void plr_progress_cancel(plr_progress * progress) {
    progress->cancelled.store(true, std::memory_order_relaxed);
}

static bool on_progress(float value, void * data) {
    auto * progress = static_cast<plr_progress *>(data);
    progress->value.store(value, std::memory_order_relaxed);
    return !progress->cancelled.load(std::memory_order_relaxed);
}

llama_model * plr_model_load(const char * path, const llama_model_params * params,
                             plr_progress * progress) {
    remember("");
    return guarded<llama_model *>(nullptr, [&] {
        llama_model_params used = *params;
        if (progress != nullptr) {
            used.progress_callback           = on_progress;
            used.progress_callback_user_data = progress;
        }
        return llama_model_load_from_file(path, used);
    });
}

int64_t plr_skip_strings(const uint8_t * data, int64_t size, int64_t at, uint64_t count) {
    constexpr int64_t n_head = sizeof(uint64_t);
    for (uint64_t i = 0; i < count; ++i) {
        uint64_t length;
        if (size - at < n_head) {
            return -1;
        }
        std::memcpy(&length, data + at, n_head);
        at += n_head;
        if (length > static_cast<uint64_t>(size - at)) {
            return -1;
        }
        at += static_cast<int64_t>(length);
    }
    return at;
}

llama_context * plr_context_new(llama_model * model, const llama_context_params * params) {
    remember("");
    return guarded<llama_context *>(nullptr, [&] {
        const auto lock = adapters_gate.reading();
        for (size_t i = 0; i < params->n_samplers; ++i) {
            lane::keep(params->samplers[i].sampler);
        }
        return llama_init_from_model(model, *params);
    });
}

int plr_quantize(const char * path_in, const char * path_out,
                 const llama_model_quantize_params * params) {
    remember("");
    return guarded<int>(PLR_EXCEPTION, [&] {
        return static_cast<int>(llama_model_quantize(path_in, path_out, params));
    });
}
