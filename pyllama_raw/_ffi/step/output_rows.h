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

inline llama_token sample_row(const Row & row, plr_sampler * sampler, int32_t n_vocab) {
    return row.n_left > 0
               ? row_sampling::sample_lane(sampler, row.logits, row.ids, row.n_left, n_vocab)
               : row_sampling::sample_row(sampler, row.logits, n_vocab);
}

// Whether sampling the row takes less time than waking threads: a lane has left a few
// candidates, or the sampler only looks for the largest logit.
inline bool is_quick(const Row & row, const plr_sampler * sampler) {
    return row.n_left > 0 ||
           (sampler != nullptr && sampler->chain == nullptr && sampler->grammar == nullptr);
}

// This thread alone asks the context for the rows. Then all threads of libllama sample. A row
// that fails has no token; the message of one such row is kept.
inline void sample_all(const Job & job) {
    thread_local Parallel         parallel;
    thread_local std::vector<Row> rows;
    const int32_t n_vocab = n_vocab_of(job.ctx);
    std::mutex    mutex;
    std::string   error;
    int32_t       n_quick = 0;
    rows.resize(job.n_rows);
    for (int32_t i = 0; i < job.n_rows; ++i) {
        rows[i] = guarded<Row>({}, [&] { return find(job.ctx, *job.batch, job.rows[i]); });
        n_quick += is_quick(rows[i], job.samplers[i]);
    }
    const bool  alone = n_quick == job.n_rows && job.n_rows <= 32;
    Row * const found = rows.data();  // thread_local: by its name each thread has its own
    parallel.each(job.n_rows, alone ? 1 : llama_n_threads(job.ctx), [&, found](int32_t i) {
        job.tokens[i] = LLAMA_TOKEN_NULL;
        if (found[i].logits == nullptr) {
            return;
        }
        job.tokens[i] = guarded<llama_token>(
            LLAMA_TOKEN_NULL, [&] { return sample_row(found[i], job.samplers[i], n_vocab); });
        if (job.tokens[i] == LLAMA_TOKEN_NULL) {
            const std::lock_guard<std::mutex> lock(mutex);
            error = last_error;
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
        job.codes[i] = job.tokens[i] == LLAMA_TOKEN_NULL ? PLR_EXCEPTION : 0;
        job.times->n_failed += job.codes[i] != 0;
    }
    const bool is_asked = job.ahead || job.n_rows == job.batch->n_tokens;
    const bool advances = is_asked && job.n_rows > 0 && job.times->n_failed == 0;
    if (advances) {
        advance(job);
    }
    return advances;
}

}  // namespace output_rows
