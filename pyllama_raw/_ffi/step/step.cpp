#include "step.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "boundary/abort_flag.h"
#include "boundary/adapters_gate.h"
#include "boundary/exceptions.h"
#include "boundary/lane.h"
#include "fault.h"
#include "kernels/kernels.h"
#include "logprobs.h"
#include "output_rows.h"
#include "runner.h"

// Exported by libllama, but in a header that is not installed.
LLAMA_API void    llama_set_embeddings_nextn(llama_context * ctx, bool value, bool masked);
LLAMA_API float * llama_get_embeddings_nextn(llama_context * ctx);
LLAMA_API float * llama_get_embeddings_nextn_ith(llama_context * ctx, int32_t i);

int plr_score(llama_context * ctx, int32_t n_rows, const int32_t * rows,
              const llama_token * tokens, int32_t n_top, float * chosen,
              llama_token * ids, float * values) {
    return attempt([&] {
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
    });
}

int plr_set_lanes(llama_context * ctx, int32_t n_lanes, llama_sampler * const * chains) {
    return attempt([&] {
        for (int32_t i = 0; i < n_lanes; ++i) {
            if (chains[i] != nullptr) {
                lane::keep(chains[i]);
            }
            llama_set_sampler(ctx, i, chains[i]);  // false: not on this device, rows stay whole
        }
    });
}

static Fault fault;  // of tests

void plr_fail_decode(int32_t code, int32_t n_until, int32_t seq_id) {
    fault = {code, n_until, seq_id};
}

static int encode(llama_context * ctx, const llama_batch & batch) {
    return guarded<int>(PLR_EXCEPTION, [&] {
        const int done = llama_encode(ctx, batch);
        llama_synchronize(ctx);
        return done;
    });
}

static bool is_mended = PLR_IS_MENDED;  // libllama; changed by tests only

bool plr_set_mended(bool value) {
    return std::exchange(is_mended, value);
}

// Whether libllama goes on rightly after an abort of *batch*.
//
// A slot with cells of its own may only share a micro-batch with its neighbours. A libllama
// that is not mended (MENDS of build_lib.py) leaves slots whose micro-batch was not reached
// searching their next cell at the place of another slot. They then leave a gap, and sums
// over cells are made in another order. So such a batch is computed to its end, and what is not
// wanted is cut off. Where all slots are neighbours the first micro-batch has all of them.
static bool may_abort(const llama_context * ctx, const llama_batch & batch) {
    if (is_mended || llama_n_ctx_seq(ctx) == llama_n_ctx(ctx)) {  // one pool, or one slot
        return true;
    }
    for (int32_t i = 1; i < batch.n_tokens; ++i) {
        const int32_t further = batch.seq_id[i][0] - batch.seq_id[i - 1][0];
        if (further != 0 && further != 1) {
            return false;
        }
    }
    return true;
}

static int decode(const Job & job) {
    if (const int32_t code = fault.take(*job.batch)) {
        remember("a test wants this decode to fail");
        return code;
    }
    const auto lock = adapters_gate.reading();
    if (job.encodes) {
        return encode(job.ctx, *job.batch);
    }
    const Unstoppable to_its_end(!may_abort(job.ctx, *job.batch));
    return plr_kernels_decode(job.ctx, *job.batch, job.n_rows);
}

// Copy the hidden states of the batch that was decoded: the next decode overwrites them.
static void keep_hidden(const Job & job) {
    const size_t width = llama_model_n_embd_out(llama_get_model(job.ctx));
    const auto   copy  = [&](const float * from, size_t n_rows, size_t to) {
        if (from == nullptr) {
            throw std::runtime_error("the decode has left no hidden states");
        }
        std::copy_n(from, n_rows * width, job.hidden + to * width);
    };
    if (!job.hidden_of_rows) {
        copy(llama_get_embeddings_nextn(job.ctx), job.batch->n_tokens, 0);
        return;
    }
    for (int32_t i = 0; i < job.n_rows; ++i) {
        copy(llama_get_embeddings_nextn_ith(job.ctx, job.rows[i]), 1, i);
    }
}

// 1 if the batch was advanced to the next one, 0 if not.
static int sample_rows(const Job & job) {
    return guarded<int>(PLR_EXCEPTION, [&] {
        if (job.hidden != nullptr) {
            keep_hidden(job);
        }
        const int64_t start_ns = now_ns();
        const bool    advances = output_rows::sample(job);
        job.times->sample_ns = now_ns() - start_ns;
        return advances ? 1 : 0;
    });
}

struct plr_runner : Runner {
    explicit plr_runner(plr_thread & thread) : Runner(thread, ::decode, sample_rows) {}

    float * hidden         = nullptr;
    bool    hidden_of_rows = false;
};

plr_thread * plr_thread_new(void) {
    return guarded<plr_thread *>(nullptr, [] { return new plr_thread; });
}

void plr_thread_free(plr_thread * thread) {
    if (thread->is_here()) {
        delete thread;
    }
}

plr_runner * plr_runner_new(plr_thread * thread) {
    return guarded<plr_runner *>(nullptr, [&] { return new plr_runner(*thread); });
}

void plr_runner_free(plr_runner * runner) {
    if (runner->is_here()) {
        delete runner;
    }
}

int plr_step(plr_runner * runner, llama_context * ctx, llama_batch * batch,
             int32_t n_rows, const int32_t * rows, const int8_t * drafts,
             plr_sampler * const * samplers, llama_token * tokens, int32_t * codes,
             plr_times * times, bool ahead) {
    *times = {};
    if (!runner->is_here()) {
        remember("the context belongs to the parent process");
        return PLR_EXCEPTION;
    }
    Job job{ctx, batch, n_rows, rows, samplers, tokens, codes, times, ahead};
    job.drafts         = drafts;
    job.hidden         = runner->hidden;
    job.hidden_of_rows = runner->hidden_of_rows;
    const int code     = runner->step(job);
    if (code != 0 || times->n_failed > 0) {
        remember(runner->error());
    }
    return code;
}

int plr_read_sources(plr_runner * runner, llama_context * ctx, llama_batch * batch,
                     plr_times * times) {
    *times = {};
    if (!runner->is_here()) {
        remember("the context belongs to the parent process");
        return PLR_EXCEPTION;
    }
    Job job{ctx, batch, 0, nullptr, nullptr, nullptr, nullptr, times, false};
    job.encodes    = true;
    const int code = runner->step(job);
    if (code != 0) {
        remember(runner->error());
    }
    return code;
}

int plr_keep_hidden(plr_runner * runner, llama_context * ctx, float * hidden, bool of_rows) {
    return attempt([&] {
        llama_set_embeddings_nextn(ctx, hidden != nullptr, of_rows);
        runner->hidden         = hidden;
        runner->hidden_of_rows = of_rows;
    });
}

bool plr_drop(plr_runner * runner, plr_flag * flag) {
    return runner->is_here() && runner->drop([flag](bool stops) {
        if (flag != nullptr) {
            flag->drops.store(stops, std::memory_order_relaxed);
        }
    });
}
