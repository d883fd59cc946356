// Samples a token for each output row of a batch, and makes the next batch of these tokens.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "boundary/exceptions.h"
#include "llama.h"
#include "row_sampling.h"
#include "runner.h"
#include "parallel.h"

namespace output_rows {

inline int32_t n_vocab_of(const llama_context * ctx) {
    return llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));
}

// What a decode left of an output row: candidates of a lane, else all logits.
struct Row {
    float *             logits;
    const llama_token * ids;     // of a lane
    int32_t             n_left;  // 0: there is no lane, or a device that cannot select
};

inline Row find(llama_context * ctx, const llama_batch & batch, int32_t row) {
    if (row < 0 || row >= batch.n_tokens || batch.logits[row] == 0) {
        throw std::out_of_range("the row is no output of this batch");
    }
    const auto n_left = static_cast<int32_t>(llama_get_sampled_candidates_count_ith(ctx, row));
    if (n_left > 0) {
        return {llama_get_sampled_logits_ith(ctx, row), llama_get_sampled_candidates_ith(ctx, row),
                n_left};
    }
    float * logits = llama_get_logits_ith(ctx, row);
    if (logits == nullptr) {
        throw std::runtime_error("the row has no logits");
    }
    return {logits, nullptr, 0};
}

inline llama_token sample_row(const Row & row, plr_sampler * sampler, int32_t n_vocab,
                              int32_t place) {
    if (row.n_left > 0 && place > 0) {
        throw std::logic_error("a slot with a lane takes no drafts");
    }
    return row.n_left > 0
               ? row_sampling::sample_lane(sampler, row.logits, row.ids, row.n_left, n_vocab)
               : row_sampling::sample_row(sampler, row.logits, n_vocab, place);
}

// Whether sampling the row takes less time than waking threads: a lane has left a few
// candidates, or the sampler only looks for the largest logit.
inline bool is_quick(const Row & row, const plr_sampler * sampler) {
    return row.n_left > 0 ||
           (sampler != nullptr && sampler->chain == nullptr && sampler->grammar == nullptr);
}

// Whether the row after *i* is sampled, too: its token is the draft of what row *i* gave.
inline bool goes_on(const Job & job, int32_t i) {
    const int32_t next = i + 1;
    return job.drafts != nullptr && next < job.n_rows && job.drafts[next] != 0 &&
           job.batch->token[job.rows[next]] == job.tokens[i];
}

// This thread alone asks the context for the rows. Then all threads of libllama sample, each a
// row or those of one sequence in their order. A row that fails has no token; the message of
// one such row is kept.
inline void sample_all(const Job & job) {
    thread_local Parallel         parallel;
    thread_local std::vector<Row> rows;
    thread_local std::vector<int32_t> starts;  // rows whose token is no draft
    const int32_t n_vocab = n_vocab_of(job.ctx);
    std::mutex    mutex;
    std::string   error;
    int32_t       n_quick = 0;
    rows.resize(job.n_rows);
    starts.clear();
    for (int32_t i = 0; i < job.n_rows; ++i) {
        job.tokens[i] = LLAMA_TOKEN_NULL;
        job.codes[i]  = 0;
        if (job.drafts == nullptr || i == 0 || job.drafts[i] == 0) {
            starts.push_back(i);
        }
        rows[i] = guarded<Row>({}, [&] { return find(job.ctx, *job.batch, job.rows[i]); });
        n_quick += is_quick(rows[i], job.samplers[i]);
    }
    const bool  alone = n_quick == job.n_rows && job.n_rows <= 32;
    // thread_local: by their names each thread has its own.
    Row * const           found = rows.data();
    const int32_t * const start = starts.data();
    const auto            n     = static_cast<int32_t>(starts.size());
    parallel.each(n, alone ? 1 : llama_n_threads(job.ctx), [&, found, start](int32_t k) {
        for (int32_t i = start[k];; ++i) {
            if (found[i].logits != nullptr) {
                job.tokens[i] = guarded<llama_token>(LLAMA_TOKEN_NULL, [&] {
                    return sample_row(found[i], job.samplers[i], n_vocab, i - start[k]);
                });
            }
            if (job.tokens[i] == LLAMA_TOKEN_NULL) {
                job.codes[i] = PLR_EXCEPTION;
                const std::lock_guard<std::mutex> lock(mutex);
                error = found[i].logits == nullptr ? error : last_error;
            }
            if (job.codes[i] != 0 || !goes_on(job, i)) {
                return;
            }
        }
    });
    if (!error.empty()) {
        remember(error.c_str());
    }
}

// Turn the batch into the next one: the sampled tokens, each one position after its row.
inline void advance(const Job & job) {
    llama_batch & batch = *job.batch;
    for (int32_t i = 0; i < job.n_rows; ++i) {
        const int32_t row = job.rows[i];  // never before i
        batch.token[i]  = job.tokens[i];
        batch.pos[i]    = batch.pos[row] + 1;
        batch.seq_id[i] = batch.seq_id[row];
        batch.logits[i] = 1;
    }
    batch.n_tokens = job.n_rows;
}

// Sample all rows; whether the batch was advanced to the next one.
inline bool sample(const Job & job) {
    sample_all(job);
    for (int32_t i = 0; i < job.n_rows; ++i) {
        job.times->n_failed += job.codes[i] != 0;
    }
    const bool is_asked = job.ahead || job.n_rows == job.batch->n_tokens;
    const bool advances = job.drafts == nullptr && is_asked && job.n_rows > 0 && job.times->n_failed == 0;
    if (advances) {
        advance(job);
    }
    return advances;
}

}  // namespace output_rows
