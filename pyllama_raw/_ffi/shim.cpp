// Rules of this file: nothing throws out of it, nothing calls Python. See shim.h.

#include "shim.h"

#include "ggml.h"
#include "log_ring.h"
#include "logprobs.h"
#include "mtmd-helper.h"
#include "runner.h"

#include <algorithm>
#include <atomic>
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
    std::atomic<bool> drops{false};  // what was begun ahead
};

static bool read_flag(void * data) {
    const auto * flag = static_cast<plr_flag *>(data);
    return flag->value.load(std::memory_order_relaxed) ||
           flag->drops.load(std::memory_order_relaxed);
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

static int32_t n_vocab_of(const llama_context * ctx) {
    return llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));
}

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

// Change the row as its sampler says: biases first, then ids that must not be sampled.
static void shape(const plr_sampler & sampler, float * logits, int32_t n_vocab) {
    for (int32_t i = 0; i < sampler.n_bias; ++i) {
        const llama_logit_bias bias = sampler.bias[i];
        if (bias.token >= 0 && bias.token < n_vocab) {
            logits[bias.token] += bias.bias;
        }
    }
    const auto forbid = [&](const llama_token * ids, int32_t n) {
        for (int32_t i = 0; i < n; ++i) {
            if (ids[i] >= 0 && ids[i] < n_vocab) {
                logits[ids[i]] = -INFINITY;
            }
        }
    };
    forbid(sampler.suppress, sampler.n_suppress);
    if (sampler.n_min > 0) {
        forbid(sampler.ending, sampler.n_ending);
    }
    if (sampler.mask != nullptr) {
        for (int32_t id = 0; id < n_vocab; ++id) {
            const bool allowed = (sampler.mask[id / 32] >> (id % 32)) & 1;
            logits[id] = allowed ? logits[id] : -INFINITY;
        }
    }
}

// Tokens that may be sampled, by rising id; gaps are closed: some samplers compute NaN
// from -infinity. One array a thread: gone with the next call.
static llama_token_data_array candidates(const float * logits, int32_t n_vocab) {
    thread_local std::vector<llama_token_data> storage;
    storage.resize(n_vocab);
    size_t n_left = 0;
    for (llama_token id = 0; id < n_vocab; ++id) {
        storage[n_left] = llama_token_data{id, logits[id], 0.0f};
        n_left += logits[id] > -INFINITY;  // and not NaN
    }
    return {storage.data(), n_left, -1, false};
}

static void drop_forbidden(llama_token_data_array & view) {
    size_t n_left = 0;
    for (size_t i = 0; i < view.size; ++i) {
        const llama_token_data candidate = view.data[i];
        view.data[n_left] = candidate;
        n_left += candidate.logit > -INFINITY;
    }
    view.size = n_left;
}

// As llama_sampler_sample, which would end the process if the chain selects nothing.
// What the draw was from is left in *view*; nothing where there was no draw.
static llama_token draw(llama_sampler * chain, llama_token_data_array & view) {
    if (view.size == 0) {
        throw std::runtime_error("no token is allowed here");
    }
    if (chain == nullptr) {
        const auto less = [](const auto & a, const auto & b) { return a.logit < b.logit; };
        const size_t n = view.size;
        view.size = 0;
        return std::max_element(view.data, view.data + n, less)->id;
    }
    llama_sampler_apply(chain, &view);
    if (view.selected < 0 || view.selected >= static_cast<int64_t>(view.size)) {
        throw std::runtime_error("the sampler chain selected no token");
    }
    return view.data[view.selected].id;
}

static bool allows(llama_sampler * grammar, llama_token token) {
    llama_token_data data = {token, 1.0f, 0.0f};
    llama_token_data_array view = {&data, 1, -1, false};
    llama_sampler_apply(grammar, &view);
    return data.logit != -INFINITY;
}

// A grammar looks at all tokens only if it refuses the one that was drawn without it.
static llama_token sample(const plr_sampler & sampler, const float * logits,
                          int32_t n_vocab, llama_token_data_array & view) {
    llama_token token;
    if (sampler.chain == nullptr) {
        token = argmax(logits, n_vocab);
    } else {
        view  = candidates(logits, n_vocab);
        token = draw(sampler.chain, view);
    }
    if (sampler.grammar == nullptr || allows(sampler.grammar, token)) {
        return token;
    }
    view = candidates(logits, n_vocab);
    llama_sampler_apply(sampler.grammar, &view);
    drop_forbidden(view);
    return draw(sampler.chain, view);
}

static llama_token sample_and_accept(plr_sampler * sampler, float * logits,
                                     int32_t n_vocab) {
    if (sampler == nullptr || sampler->n_suppress < 0) {
        throw std::invalid_argument("the sampler of the row is closed or was never set");
    }
    thread_local std::vector<float> raw;
    plr_logprobs * wanted = sampler->logprobs;
    if (wanted != nullptr && !wanted->of_sampler) {
        raw.assign(logits, logits + n_vocab);
    }
    shape(*sampler, logits, n_vocab);
    llama_token_data_array view = {nullptr, 0, -1, false};
    const llama_token token = sample(*sampler, logits, n_vocab, view);
    if (wanted != nullptr && wanted->of_sampler) {
        logprobs::read_view(view, token, *wanted);
    } else if (wanted != nullptr) {
        logprobs::read_row(raw.data(), n_vocab, token, *wanted);
    }
    if (sampler->grammar != nullptr) {
        llama_sampler_accept(sampler->grammar, token);
    }
    if (sampler->chain != nullptr) {
        llama_sampler_accept(sampler->chain, token);
    }
    sampler->n_min -= sampler->n_min > 0;
    return token;
}

static llama_token sample_row(llama_context * ctx, const llama_batch * batch, int32_t row,
                              plr_sampler * sampler, int32_t n_vocab) {
    if (row < 0 || row >= batch->n_tokens || batch->logits[row] == 0) {
        throw std::out_of_range("the row is no output of this batch");
    }
    float * logits = llama_get_logits_ith(ctx, row);
    if (logits == nullptr) {
        throw std::runtime_error("the row has no logits");
    }
    return sample_and_accept(sampler, logits, n_vocab);
}

extern "C" int plr_sample(plr_sampler * sampler, float * logits, int32_t n_vocab,
                          llama_token * token) {
    *token = LLAMA_TOKEN_NULL;
    return guarded<int>(PLR_EXCEPTION, [&] {
        *token = sample_and_accept(sampler, logits, n_vocab);
        return 0;
    });
}

extern "C" int plr_score(llama_context * ctx, int32_t n_rows, const int32_t * rows,
                         const llama_token * tokens, int32_t n_top, float * chosen,
                         llama_token * ids, float * values) {
    return guarded<int>(PLR_EXCEPTION, [&] {
        const int32_t n_vocab = n_vocab_of(ctx);
        for (int32_t i = 0; i < n_rows; ++i) {
            const float * logits = llama_get_logits_ith(ctx, rows[i]);
            if (logits == nullptr) {
                throw std::runtime_error("the row has no logits");
            }
            plr_logprobs out = {n_top, false, 0, 0.0f, ids + i * n_top, values + i * n_top};
            logprobs::read_row(logits, n_vocab, tokens[i], out);
            chosen[i] = out.value;
            std::fill(out.ids + out.n_found, out.ids + n_top, LLAMA_TOKEN_NULL);
        }
        return 0;
    });
}

static int decode(llama_context * ctx, const llama_batch * batch) {
    return guarded<int>(PLR_EXCEPTION, [&] {
        const int code = llama_decode(ctx, *batch);
        llama_synchronize(ctx);
        return code;
    });
}

// Whether the batch was advanced to the next one.
static bool sample_rows(const Job & job) {
    const int64_t start_ns = now_ns();
    const int32_t n_vocab  = n_vocab_of(job.ctx);
    llama_batch & batch    = *job.batch;
    for (int32_t i = 0; i < job.n_rows; ++i) {
        job.tokens[i] = guarded<llama_token>(LLAMA_TOKEN_NULL, [&] {
            return sample_row(job.ctx, &batch, job.rows[i], job.samplers[i], n_vocab);
        });
        job.codes[i] = job.tokens[i] == LLAMA_TOKEN_NULL ? PLR_EXCEPTION : 0;
        job.times->n_failed += job.codes[i] != 0;
    }
    const bool advances = job.n_rows == batch.n_tokens && job.times->n_failed == 0;
    for (int32_t i = 0; advances && i < job.n_rows; ++i) {
        batch.token[i] = job.tokens[i];
        batch.pos[i] += 1;
    }
    job.times->sample_ns = now_ns() - start_ns;
    return advances;
}

struct plr_runner : Runner {
    plr_runner() : Runner(::decode, sample_rows) {}
};

extern "C" plr_runner * plr_runner_new(void) {
    return guarded<plr_runner *>(nullptr, [] { return new plr_runner; });
}

extern "C" void plr_runner_free(plr_runner * runner) {
    delete runner;
}

extern "C" int plr_step(plr_runner * runner, llama_context * ctx, llama_batch * batch,
                        int32_t n_rows, const int32_t * rows, plr_sampler * const * samplers,
                        llama_token * tokens, int32_t * codes, plr_times * times, bool ahead) {
    const int code =
        runner->step({ctx, batch, n_rows, rows, samplers, tokens, codes, times, ahead});
    if (code != 0 || times->n_failed > 0) {
        remember(runner->error());
    }
    return code;
}

extern "C" bool plr_drop(plr_runner * runner, plr_flag * flag) {
    return runner->drop([flag](bool stops) {
        if (flag != nullptr) {
            flag->drops.store(stops, std::memory_order_relaxed);
        }
    });
}

// ---- calls that may throw ----------------------------------------------------------------

extern "C" llama_sampler * plr_init_dry(const llama_vocab * vocab, float multiplier, float base,
                                        int32_t allowed_length, int32_t last_n,
                                        const char ** breakers, size_t n_breakers) {
    remember("");
    return guarded<llama_sampler *>(nullptr, [&] {
        return llama_sampler_init_dry(vocab, multiplier, base, allowed_length, last_n,
                                      breakers, n_breakers);
    });
}

extern "C" llama_sampler * plr_init_grammar(const llama_vocab * vocab, const char * grammar,
                                            const char * root, bool lazy,
                                            const char ** patterns, size_t n_patterns,
                                            const llama_token * tokens, size_t n_tokens) {
    remember("");
    return guarded<llama_sampler *>(nullptr, [&] {
        return lazy ? llama_sampler_init_grammar_lazy_patterns(
                          vocab, grammar, root, patterns, n_patterns, tokens, n_tokens)
                    : llama_sampler_init_grammar(vocab, grammar, root);
    });
}

extern "C" llama_sampler * plr_sampler_clone(const llama_sampler * sampler) {
    return guarded<llama_sampler *>(nullptr, [&] { return llama_sampler_clone(sampler); });
}

extern "C" int plr_sampler_accept_many(llama_sampler * sampler, const llama_token * tokens,
                                       int32_t n_tokens) {
    return guarded<int>(PLR_EXCEPTION, [&] {
        for (int32_t i = 0; i < n_tokens; ++i) {
            llama_sampler_accept(sampler, tokens[i]);
        }
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

extern "C" int64_t plr_vocab_pieces(const llama_vocab * vocab, char * pieces, int64_t size,
                                    int64_t * ends) {
    return guarded<int64_t>(PLR_EXCEPTION, [&] {
        const int32_t n_tokens = llama_vocab_n_tokens(vocab);
        int64_t end = 0;
        for (int32_t token = 0; token < n_tokens; ++token) {
            const int64_t room = std::clamp<int64_t>(size - end, 0, INT32_MAX);
            const int32_t n = llama_token_to_piece(vocab, token, pieces + std::min(end, size),
                                                   static_cast<int32_t>(room), 0, false);
            end += std::abs(n);  // negative: it did not fit
            ends[token] = end;
        }
        return end;
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
