// Rules of this file: nothing throws out of it, nothing calls Python. See shim.h.

#include "shim.h"

#include "fault.h"
#include "ggml.h"
#include "guard.h"
#include "kernels.h"
#include "log_ring.h"
#include "logprobs.h"
#include "mtmd-helper.h"
#include "output_rows.h"
#include "row_sampling.h"
#include "runner.h"
#include "top_p.h"
#include "watch.h"
#include "zeroed.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <new>
#include <stdexcept>

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

// ---- abort flag --------------------------------------------------------------------------

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

// ---- kernels of ours ---------------------------------------------------------------------

struct plr_kernels {
    Kernels value;
};

extern "C" bool plr_kernels_usable(void) {
    return guarded<bool>(false, [] { return Kernels::usable(); });
}

extern "C" bool plr_kernels_has_products(void) {
    return guarded<bool>(false, [] { return Kernels::has_products(); });
}

extern "C" plr_kernels * plr_kernels_new(void) {
    return guarded<plr_kernels *>(nullptr, [] { return new plr_kernels; });
}

extern "C" void plr_kernels_free(plr_kernels * kernels) {
    delete kernels;
}

extern "C" void plr_kernels_attach(llama_context_params * params, plr_kernels * kernels,
                                   bool follows) {
    kernels->value.attach(params, follows);
}

extern "C" void plr_kernels_taken(const plr_kernels * kernels, int64_t taken[2]) {
    taken[0] = kernels->value.n_products;
    taken[1] = kernels->value.n_attentions;
}

extern "C" int plr_cells_rm(plr_kernels * kernels, int32_t slot, int32_t p0, int32_t p1) {
    return guarded<int>(PLR_EXCEPTION, [&] {
        kernels->value.cells.remove(slot, p0, p1);
        return 0;
    });
}

extern "C" int plr_cells_cp(plr_kernels * kernels, int32_t src, int32_t dst, int32_t p0,
                            int32_t p1) {
    return guarded<int>(PLR_EXCEPTION, [&] {
        kernels->value.cells.copy(src, dst, p0, p1);
        return 0;
    });
}

extern "C" int plr_cells_add(plr_kernels * kernels, int32_t slot, int32_t p0, int32_t p1,
                             int32_t delta) {
    return guarded<int>(PLR_EXCEPTION, [&] {
        kernels->value.cells.move(slot, p0, p1, delta);
        return 0;
    });
}

extern "C" void plr_cells_clear(plr_kernels * kernels) {
    kernels->value.cells.clear();
}

extern "C" int plr_cells_restore(plr_kernels * kernels, int32_t slot, const uint8_t * state,
                                 size_t size) {
    return guarded<int>(PLR_EXCEPTION, [&] {
        kernels->value.cells.restore(slot, state, size);
        return 0;
    });
}

// ---- who computes ------------------------------------------------------------------------

struct plr_watch {
    Watch value;
};

extern "C" plr_watch * plr_watch_new(void) {
    return guarded<plr_watch *>(nullptr, [] { return new plr_watch; });
}

extern "C" void plr_watch_free(plr_watch * watch) {
    delete watch;
}

extern "C" void plr_watch_attach(llama_context_params * params, plr_watch * watch) {
    watch->value.attach(params);
}

extern "C" uint32_t plr_watch_products(const plr_watch * watch, ggml_type weights) {
    return watch->value.products[weights];
}

extern "C" uint32_t plr_watch_attentions(const plr_watch * watch) {
    return watch->value.attentions;
}

// ---- loading -----------------------------------------------------------------------------

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

extern "C" int64_t plr_skip_strings(const uint8_t * data, int64_t size, int64_t at,
                                    uint64_t count) {
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

extern "C" llama_context * plr_context_new(llama_model * model,
                                           const llama_context_params * params) {
    remember("");
    return guarded<llama_context *>(
        nullptr, [&] { return llama_init_from_model(model, *params); });
}

extern "C" int plr_quantize(const char * path_in, const char * path_out,
                            const llama_model_quantize_params * params) {
    remember("");
    return guarded<int>(PLR_EXCEPTION, [&] {
        return static_cast<int>(llama_model_quantize(path_in, path_out, params));
    });
}

// ---- a step ------------------------------------------------------------------------------

extern "C" int plr_sample(plr_sampler * sampler, float * logits, int32_t n_vocab,
                          llama_token * token) {
    *token = LLAMA_TOKEN_NULL;
    return guarded<int>(PLR_EXCEPTION, [&] {
        *token = row_sampling::sample_row(sampler, logits, n_vocab);
        return 0;
    });
}

extern "C" int plr_score(llama_context * ctx, int32_t n_rows, const int32_t * rows,
                         const llama_token * tokens, int32_t n_top, float * chosen,
                         llama_token * ids, float * values) {
    return guarded<int>(PLR_EXCEPTION, [&] {
        const int32_t n_vocab = output_rows::n_vocab_of(ctx);
        for (int32_t i = 0; i < n_rows; ++i) {
            const float * logits = llama_get_logits_ith(ctx, rows[i]);
            if (logits == nullptr || llama_get_sampled_candidates_count_ith(ctx, rows[i]) > 0) {
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

extern "C" int plr_set_lanes(llama_context * ctx, int32_t n_lanes,
                             llama_sampler * const * chains) {
    return guarded<int>(PLR_EXCEPTION, [&] {
        for (int32_t i = 0; i < n_lanes; ++i) {
            llama_set_sampler(ctx, i, chains[i]);  // false: not on this device, rows stay whole
        }
        return 0;
    });
}

static Fault fault;  // of tests

extern "C" void plr_fail_decode(int32_t code, int32_t n_until, int32_t seq_id) {
    fault = {code, n_until, seq_id};
}

static int decode(llama_context * ctx, const llama_batch * batch) {
    if (const int32_t code = fault.take(*batch)) {
        remember("a test wants this decode to fail");
        return code;
    }
    Decoding decoding{batch};
    Decoding::current() = &decoding;
    const int code = guarded<int>(PLR_EXCEPTION, [&] {
        const int done = llama_decode(ctx, *batch);
        llama_synchronize(ctx);
        return done;
    });
    Decoding::current() = nullptr;
    for (int32_t i = 0; code != 0 && decoding.cells != nullptr && i < batch->n_tokens; ++i) {
        const llama_seq_id slot = batch->seq_id[i][0];  // what was not computed is gone
        const llama_pos    last = llama_memory_seq_pos_max(llama_get_memory(ctx), slot);
        decoding.cells->remove(slot, last + 1, -1);
    }
    return code;
}

// Whether the batch was advanced to the next one.
static bool sample_rows(const Job & job) {
    const int64_t start_ns = now_ns();
    const bool    advances = output_rows::sample(job);
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

// ---- grammars ----------------------------------------------------------------------------

extern "C" plr_pieces * plr_pieces_new(const llama_vocab * vocab) {
    return guarded<plr_pieces *>(nullptr, [&] { return new plr_pieces(vocab); });
}

extern "C" void plr_pieces_free(plr_pieces * pieces) {
    delete pieces;
}

extern "C" plr_grammar * plr_grammar_new(const plr_pieces * pieces, const plr_node * nodes,
                                         size_t n_nodes, const uint32_t * sets, size_t n_sets,
                                         int32_t start, const plr_triggers * triggers) {
    return guarded<plr_grammar *>(nullptr, [&] {
        return new plr_grammar(
            *pieces, grammar::make_program(nodes, n_nodes, sets, n_sets, start),
            {{triggers->texts, triggers->texts + triggers->n_texts},
             {triggers->tokens, triggers->tokens + triggers->n_tokens}});
    });
}

extern "C" plr_grammar * plr_grammar_copy(const plr_grammar * grammar) {
    return guarded<plr_grammar *>(nullptr, [&] { return new plr_grammar(*grammar); });
}

extern "C" void plr_grammar_free(plr_grammar * grammar) {
    delete grammar;
}

extern "C" int plr_grammar_mask(plr_grammar * grammar, uint8_t * allowed) {
    return guarded<int>(PLR_EXCEPTION, [&] {
        grammar->begin_row();
        const std::vector<bool> mask = grammar->mask();
        std::copy(mask.begin(), mask.end(), allowed);
        return 0;
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

extern "C" llama_sampler * plr_init_top_p(float p, size_t min_keep) {
    return guarded<llama_sampler *>(nullptr, [&] { return top_p::make({p, min_keep}); });
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

extern "C" void plr_vocab_eog(const llama_vocab * vocab, bool * is_eog) {
    const int32_t n_tokens = llama_vocab_n_tokens(vocab);
    for (int32_t token = 0; token < n_tokens; ++token) {
        is_eog[token] = llama_vocab_is_eog(vocab, token);
    }
}

extern "C" int plr_state_seq_size(llama_context * ctx, llama_seq_id seq_id,
                                  size_t * n_bytes) {
    *n_bytes = 0;
    return guarded<int>(PLR_EXCEPTION, [&] {
        *n_bytes = llama_state_seq_get_size(ctx, seq_id);
        return 0;
    });
}

extern "C" int plr_state_seq_get(llama_context * ctx, uint8_t * dst, size_t size,
                                 llama_seq_id seq_id, size_t * n_bytes) {
    *n_bytes = 0;
    return guarded<int>(PLR_EXCEPTION, [&] {
        *n_bytes = llama_state_seq_get_data(ctx, dst, size, seq_id);
        return 0;
    });
}

extern "C" int plr_state_seq_set(llama_context * ctx, const uint8_t * src, size_t size,
                                 llama_seq_id seq_id, size_t * n_bytes) {
    *n_bytes = 0;
    return guarded<int>(PLR_EXCEPTION, [&] {
        *n_bytes = llama_state_seq_set_data(ctx, src, size, seq_id);
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
