// Rules of this file: nothing throws out of it, nothing calls Python. See shim.h.

#include "shim.h"

#include "ggml.h"
#include "log_ring.h"
#include "mtmd-helper.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <exception>
#include <new>
#include <stdexcept>
#include <vector>

namespace {

thread_local char last_error[2048] = "";
thread_local int  n_guards         = 0;  // plr_ calls in progress on this thread

void remember(const char * message) noexcept {
    std::snprintf(last_error, sizeof(last_error), "%s", message);
}

struct Guard {
    Guard() { ++n_guards; }
    ~Guard() { --n_guards; }
};

// Run *body*; what it throws becomes *failure* and a message.
template <typename Result, typename Body>
Result guarded(Result failure, Body && body) noexcept {
    try {
        Guard guard;
        return body();
    } catch (const std::exception & error) {
        remember(error.what());
    } catch (...) {
        remember("unknown C++ exception");
    }
    return failure;
}

int64_t now_ns() {
    using namespace std::chrono;
    return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

}  // namespace

extern "C" const char * plr_last_error(void) {
    return last_error;
}

// ---- failed assertions -------------------------------------------------------------------

static void on_ggml_abort(const char * message) {
    // Unwinding crosses C frames of ggml: they hold nothing that needs a destructor.
    if (n_guards > 0) {
        throw std::runtime_error(message);
    }
    std::fprintf(stderr, "%s\n", message);
}

extern "C" void plr_abort_install(void) {
    ggml_set_abort_callback(on_ggml_abort);
}

// ---- abort flag and loading --------------------------------------------------------------

struct plr_flag {
    std::atomic<bool> value{false};
};

static bool read_flag(void * data) {
    return static_cast<plr_flag *>(data)->value.load(std::memory_order_relaxed);
}

extern "C" plr_flag * plr_flag_new(void) {
    return new (std::nothrow) plr_flag;
}

extern "C" void plr_flag_free(plr_flag * flag) {
    delete flag;
}

extern "C" void plr_flag_set(plr_flag * flag, bool value) {
    flag->value.store(value, std::memory_order_relaxed);
}

extern "C" bool plr_flag_get(const plr_flag * flag) {
    return flag->value.load(std::memory_order_relaxed);
}

extern "C" void plr_flag_attach(llama_context_params * params, plr_flag * flag) {
    params->abort_callback      = read_flag;
    params->abort_callback_data = flag;
}

struct plr_progress {
    std::atomic<float> value{0.0f};
    std::atomic<bool>  cancelled{false};
};

extern "C" plr_progress * plr_progress_new(void) {
    return new (std::nothrow) plr_progress;
}

extern "C" void plr_progress_free(plr_progress * progress) {
    delete progress;
}

extern "C" float plr_progress_get(const plr_progress * progress) {
    return progress->value.load(std::memory_order_relaxed);
}

extern "C" void plr_progress_cancel(plr_progress * progress) {
    progress->cancelled.store(true, std::memory_order_relaxed);
}

static bool on_progress(float value, void * data) {
    auto * progress = static_cast<plr_progress *>(data);
    progress->value.store(value, std::memory_order_relaxed);
    return !progress->cancelled.load(std::memory_order_relaxed);
}

extern "C" llama_model * plr_model_load(const char * path, const llama_model_params * params,
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

extern "C" llama_context * plr_context_new(llama_model * model,
                                           const llama_context_params * params) {
    remember("");
    return guarded<llama_context *>(
        nullptr, [&] { return llama_init_from_model(model, *params); });
}

// ---- a step ------------------------------------------------------------------------------

// The largest of *n* logits; NaN is never larger. Lanes let the compiler use vectors.
static float largest(const float * logits, int32_t n) {
    constexpr int32_t n_lanes = 32;
    float lanes[n_lanes];
    std::fill_n(lanes, n_lanes, -INFINITY);
    int32_t i = 0;
    for (; i + n_lanes <= n; i += n_lanes) {
        for (int32_t lane = 0; lane < n_lanes; ++lane) {
            const float x = logits[i + lane];
            lanes[lane]   = x > lanes[lane] ? x : lanes[lane];
        }
    }
    for (; i < n; ++i) {
        lanes[0] = logits[i] > lanes[0] ? logits[i] : lanes[0];
    }
    return *std::max_element(lanes, lanes + n_lanes);
}

// The first of the largest. Memory is read once; only the best block is looked at again.
static llama_token argmax(const float * logits, int32_t n_vocab) {
    constexpr int32_t n_block = 1024;
    float   best  = -INFINITY;
    int32_t start = 0;
    for (int32_t i = 0; i < n_vocab; i += n_block) {
        const float x = largest(logits + i, std::min(n_block, n_vocab - i));
        if (x > best) {
            best  = x;
            start = i;
        }
    }
    if (best == -INFINITY) {
        throw std::runtime_error("no token has a finite logit");
    }
    return static_cast<llama_token>(std::find(logits + start, logits + n_vocab, best) - logits);
}

// As llama_sampler_sample, which would end the process if the chain selects nothing.
static llama_token sample(llama_sampler * chain, const float * logits, int32_t n_vocab) {
    thread_local std::vector<llama_token_data> candidates;
    candidates.resize(n_vocab);
    for (llama_token id = 0; id < n_vocab; ++id) {
        candidates[id] = llama_token_data{id, logits[id], 0.0f};
    }
    llama_token_data_array view = {candidates.data(), candidates.size(), -1, false};
    llama_sampler_apply(chain, &view);
    if (view.selected < 0 || view.selected >= static_cast<int64_t>(view.size)) {
        throw std::runtime_error("the sampler chain selected no token");
    }
    const llama_token token = view.data[view.selected].id;
    llama_sampler_accept(chain, token);
    return token;
}

static llama_token sample_row(llama_context * ctx, const llama_batch * batch, int32_t row,
                              const plr_sampler * sampler, int32_t n_vocab) {
    if (row < 0 || row >= batch->n_tokens || batch->logits[row] == 0) {
        throw std::out_of_range("the row is no output of this batch");
    }
    if (sampler == nullptr || sampler->n_suppress < 0) {
        throw std::invalid_argument("the sampler of the row is closed or was never set");
    }
    float * logits = llama_get_logits_ith(ctx, row);
    if (logits == nullptr) {
        throw std::runtime_error("the row has no logits");
    }
    for (int32_t i = 0; i < sampler->n_suppress; ++i) {
        const llama_token id = sampler->suppress[i];
        if (id >= 0 && id < n_vocab) {
            logits[id] = -INFINITY;
        }
    }
    return sampler->chain == nullptr ? argmax(logits, n_vocab)
                                     : sample(sampler->chain, logits, n_vocab);
}

static int decode(llama_context * ctx, const llama_batch * batch) {
    return guarded<int>(PLR_EXCEPTION, [&] {
        const int code = llama_decode(ctx, *batch);
        llama_synchronize(ctx);
        return code;
    });
}

extern "C" int plr_step(llama_context * ctx, const llama_batch * batch, int32_t n_rows,
                        const int32_t * rows, const plr_sampler * const * samplers,
                        llama_token * tokens, int32_t * codes, plr_times * times) {
    const int64_t start_ns = now_ns();
    const int code = decode(ctx, batch);
    const int64_t decoded_ns = now_ns();
    times->decode_ns = decoded_ns - start_ns;
    times->sample_ns = 0;
    if (code != 0) {
        return code;
    }
    const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));
    for (int32_t i = 0; i < n_rows; ++i) {
        tokens[i] = guarded<llama_token>(LLAMA_TOKEN_NULL, [&] {
            return sample_row(ctx, batch, rows[i], samplers[i], n_vocab);
        });
        codes[i] = tokens[i] == LLAMA_TOKEN_NULL ? PLR_EXCEPTION : 0;
    }
    times->sample_ns = now_ns() - decoded_ns;
    return 0;
}

extern "C" int plr_decode(llama_context * ctx, const llama_batch * batch) {
    return decode(ctx, batch);
}

extern "C" int plr_encode(llama_context * ctx, const llama_batch * batch) {
    return guarded<int>(PLR_EXCEPTION, [&] {
        const int code = llama_encode(ctx, *batch);
        llama_synchronize(ctx);
        return code;
    });
}

// ---- calls that may throw ----------------------------------------------------------------

extern "C" int plr_sampler_accept(llama_sampler * sampler, llama_token token) {
    return guarded<int>(PLR_EXCEPTION, [&] {
        llama_sampler_accept(sampler, token);
        return 0;
    });
}

extern "C" int plr_tokenize(const llama_vocab * vocab, const char * text, int32_t text_len,
                            llama_token * tokens, int32_t n_tokens_max, bool add_special,
                            bool parse_special, int32_t * n_tokens) {
    *n_tokens = 0;
    return guarded<int>(PLR_EXCEPTION, [&] {
        *n_tokens = llama_tokenize(vocab, text, text_len, tokens, n_tokens_max, add_special,
                                   parse_special);
        return 0;
    });
}

extern "C" int plr_state_seq_size(llama_context * ctx, llama_seq_id seq_id,
                                  llama_state_seq_flags flags, size_t * n_bytes) {
    *n_bytes = 0;
    return guarded<int>(PLR_EXCEPTION, [&] {
        *n_bytes = llama_state_seq_get_size_ext(ctx, seq_id, flags);
        return 0;
    });
}

extern "C" int plr_state_seq_get(llama_context * ctx, uint8_t * dst, size_t size,
                                 llama_seq_id seq_id, llama_state_seq_flags flags,
                                 size_t * n_bytes) {
    *n_bytes = 0;
    return guarded<int>(PLR_EXCEPTION, [&] {
        *n_bytes = llama_state_seq_get_data_ext(ctx, dst, size, seq_id, flags);
        return 0;
    });
}

extern "C" int plr_state_seq_set(llama_context * ctx, const uint8_t * src, size_t size,
                                 llama_seq_id seq_id, llama_state_seq_flags flags,
                                 size_t * n_bytes) {
    *n_bytes = 0;
    return guarded<int>(PLR_EXCEPTION, [&] {
        *n_bytes = llama_state_seq_set_data_ext(ctx, src, size, seq_id, flags);
        return 0;
    });
}

// ---- log ring ----------------------------------------------------------------------------

namespace {

// Never destroyed: worker threads may log while the process ends.
LogRing & ring() {
    static LogRing * const instance = new LogRing;
    return *instance;
}

void on_log(ggml_log_level level, const char * text, void *) noexcept {
    thread_local bool skips = false;  // continuations of a debug line
    if (level != GGML_LOG_LEVEL_CONT) {
        skips = level == GGML_LOG_LEVEL_DEBUG;
    }
    if (skips || text == nullptr) {
        return;
    }
    try {
        ring().write(static_cast<char>(level), text);
    } catch (...) {
        // No memory for a log line: nothing better can be done than to lose it.
    }
}

}  // namespace

extern "C" void plr_log_install(void) {
    llama_log_set(on_log, nullptr);  // sets the log of ggml as well
    mtmd_helper_log_set(on_log, nullptr);
}

extern "C" size_t plr_log_drain(char * buf, size_t size) {
    return guarded<size_t>(0, [&] { return ring().drain(buf, size); });
}

extern "C" size_t plr_log_n_dropped(void) {
    return guarded<size_t>(0, [&] { return ring().n_dropped(); });
}
