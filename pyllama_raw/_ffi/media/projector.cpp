#include "projector.h"

#include <atomic>
#include <cctype>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>

#include "boundary/errors.h"
#include "boundary/exceptions.h"
#include "boundary/log.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "node_fault.h"
#include "step/runner.h"

struct plr_encode {
    // False: the encode is to end here. Others compute meanwhile.
    bool pass_border(ComputeThread & thread) {
        ++n_borders;
        thread.give_way(now_ns() - since_ns);
        since_ns = now_ns();
        return !cancelled;
    }

    int64_t              since_ns = 0;  // when the last border was passed
    std::atomic<bool>    cancelled{false};
    std::atomic<int32_t> n_borders{0};
};

plr_encode * plr_encode_new(void) {
    return guarded<plr_encode *>(nullptr, [] { return new plr_encode; });
}

void plr_encode_free(plr_encode * encode) {
    delete encode;
}

void plr_encode_cancel(plr_encode * encode) {
    encode->cancelled = true;
}

int32_t plr_encode_n_borders(const plr_encode * encode) {
    return encode->n_borders;
}

struct plr_projector {
    plr_projector(ComputeThread & thread, const char * path, const llama_model * model)
        : thread(thread), path(path), model(model) {}

    // The file, loaded when it is needed; nullptr: it cannot be loaded.
    std::shared_ptr<mtmd_context> load() {
        const std::lock_guard<std::mutex> lock(mutex);
        if (ctx == nullptr) {
            const int n_before = plr_log_n_unallocated();
            ctx.reset(mtmd_init_from_file(path.c_str(), model, params), mtmd_free);
            if (plr_log_n_unallocated() > n_before) {
                ctx.reset();
            }
        }
        return ctx;
    }

    // A graph that got no memory is lost: ggml would write to its buffers the next time.
    void unload() {
        const std::lock_guard<std::mutex> lock(mutex);
        ctx.reset();
    }

    ComputeThread &               thread;
    std::string                   path;
    const llama_model *           model;
    mtmd_context_params           params{};
    plr_encode *                  current = nullptr;  // whose graph is computed
    std::mutex                    mutex;
    std::shared_ptr<mtmd_context> ctx;
};

// clip.cpp names the result of each layer so, and nodes made of it by longer names.
static bool is_border(const char * name) {
    constexpr char   prefix[] = "layer_out-";
    constexpr size_t n_prefix = sizeof(prefix) - 1;
    if (std::strncmp(name, prefix, n_prefix) != 0) {
        return false;
    }
    for (name += n_prefix; std::isdigit(static_cast<unsigned char>(*name)); ++name) {
    }
    return *name == '\0';
}

// Throws if a kernel would end the process; it is not computed then.
static void check_node(const ggml_tensor * node) {
    const bool on_host = node->buffer != nullptr && ggml_backend_buffer_is_host(node->buffer);
    if (on_host && !can_compute(node)) {
        throw std::runtime_error(std::string("a tensor of the file is not as ") +
                                 ggml_op_name(node->op) + " needs it");
    }
}

// ggml asks whether to stop behind a node, and tells when all up to it is computed.
static bool on_node(ggml_tensor * node, bool asks, void * data) {
    if (asks) {
        check_node(node);
        return is_border(node->name);
    }
    const auto * projector = static_cast<plr_projector *>(data);
    return projector->current == nullptr || projector->current->pass_border(projector->thread);
}

plr_projector * plr_projector_new(plr_thread * thread, const char * path,
                                  const llama_model * model,
                                  const mtmd_context_params * params) {
    remember("");
    return guarded<plr_projector *>(nullptr, [&]() -> plr_projector * {
        auto projector    = std::make_unique<plr_projector>(*thread, path, model);
        projector->params = *params;
        projector->params.cb_eval           = on_node;
        projector->params.cb_eval_user_data = projector.get();
        return projector->load() == nullptr ? nullptr : projector.release();
    });
}

void plr_projector_free(plr_projector * projector) {
    delete projector;
}

mtmd_context * plr_projector_ctx(const plr_projector * projector) {
    return projector->ctx.get();
}

bool plr_chunk_is_causal(plr_projector * projector, const mtmd_input_chunk * chunk) {
    const auto ctx = projector->load();
    return ctx != nullptr && !mtmd_decode_use_non_causal(ctx.get(), chunk);
}

// llama.cpp 0.6 wraps the map that versions before return.
using Bytes = std::map<ggml_backend_dev_t, size_t>;

static const Bytes & by_device(const Bytes & usage) {
    return usage;
}

template <typename Usage> static const Bytes & by_device(const Usage & usage) {
    return usage.backend_mem_usage;
}

size_t plr_projector_bytes(const char * path, const mtmd_context_params * params,
                           ggml_backend_dev_t device) {
    remember("");
    return guarded<size_t>(0, [&] {
        size_t     n_bytes = 0;
        const auto usage   = mtmd_get_memory_usage(path, *params);
        for (const auto & [place, n_used] : by_device(usage)) {
            n_bytes += device == nullptr || device == place ? n_used : 0;
        }
        return n_bytes;
    });
}

mtmd_bitmap * plr_bitmap_image(uint32_t n_x, uint32_t n_y, const uint8_t * pixels) {
    return guarded<mtmd_bitmap *>(nullptr, [&] { return mtmd_bitmap_init(n_x, n_y, pixels); });
}

mtmd_bitmap * plr_bitmap_sound(size_t n_samples, const float * samples) {
    return guarded<mtmd_bitmap *>(
        nullptr, [&] { return mtmd_bitmap_init_from_audio(n_samples, samples); });
}

mtmd_input_chunks * plr_bitmap_cut(plr_projector * projector, const mtmd_bitmap * bitmap) {
    remember("");
    return guarded<mtmd_input_chunks *>(nullptr, [&]() -> mtmd_input_chunks * {
        const auto ctx = projector->load();
        if (ctx == nullptr) {
            return nullptr;
        }
        std::unique_ptr<mtmd_input_chunks, decltype(&mtmd_input_chunks_free)> chunks(
            mtmd_input_chunks_init(), mtmd_input_chunks_free);
#ifdef PLR_WITHOUT_MTMD_TOKENIZE_FROM_PARTS
        (void) bitmap;
        throw std::runtime_error("this llama.cpp takes no image without a text");
#else
        const mtmd_input_part   part{nullptr, bitmap};
        const mtmd_input_part * parts[] = {&part};
        const int code =
            mtmd_tokenize_from_parts(ctx.get(), chunks.get(), parts, 1, false);
        return code == 0 ? chunks.release() : nullptr;
#endif
    });
}

static int compute(plr_projector * projector, plr_encode * encode, const mtmd_input_chunk * chunk,
                   float * rows, size_t n_floats) {
    return guarded<int>(PLR_EXCEPTION, [&]() -> int {
        encode->since_ns = now_ns();
        if (!encode->pass_border(projector->thread)) {
            return PLR_CANCELLED;
        }
        const auto ctx = projector->load();
        if (ctx == nullptr) {
            throw std::runtime_error("the projector cannot be loaded again");
        }
        const int n_before = plr_log_n_unallocated();
        projector->current = encode;
        const int code     = mtmd_encode_chunk(ctx.get(), chunk);
        projector->current = nullptr;
        if (code == 0) {
            std::memcpy(rows, mtmd_get_output_embd(ctx.get()), n_floats * sizeof(float));
        } else if (plr_log_n_unallocated() > n_before) {
            projector->unload();
        }
        // Of an encode that ended early the rows are not those of the chunk, with code 0.
        return encode->pass_border(projector->thread) ? code : PLR_CANCELLED;
    });
}

int plr_projector_encode(plr_projector * projector, plr_encode * encode,
                         const mtmd_input_chunk * chunk, float * rows, size_t n_floats) {
    remember("");
    return guarded<int>(PLR_EXCEPTION, [&]() -> int {
        if (!projector->thread.is_here()) {
            throw std::runtime_error("the projector belongs to the parent process");
        }
        int         code = 0;
        std::string error;  // of the compute thread
        LongJob     job;
        job.compute = [&] {
            code = compute(projector, encode, chunk, rows, n_floats);
            if (code == PLR_EXCEPTION) {
                error = plr_last_error();
            }
        };
        projector->thread.compute(job);
        remember(error.c_str());
        return code;
    });
}

bool plr_all_finite(const float * values, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        if (!std::isfinite(values[i])) {
            return false;
        }
    }
    return true;
}
