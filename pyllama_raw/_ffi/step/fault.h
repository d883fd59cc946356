// Makes a decode fail on purpose, so that tests see what follows. It costs each decode one
// comparison.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "llama.h"

struct Fault {
    int32_t code    = 0;   // what to end with; 0: nothing fails
    int32_t n_until = 0;   // decodes that work before; below 0: all of them fail
    int32_t seq_id  = -1;  // of decodes that compute this slot only; below 0: of any

    // The code that the decode of *batch* is to end with instead of being computed; else 0.
    int32_t take(const llama_batch & batch) {
        if (code == 0 || !concerns(batch)) {
            return 0;
        }
        if (n_until > 0) {
            --n_until;
            return 0;
        }
        return n_until < 0 ? code : std::exchange(code, 0);
    }

  private:
    bool concerns(const llama_batch & batch) const {
        return seq_id < 0 ||
               std::any_of(batch.seq_id, batch.seq_id + batch.n_tokens,
                           [this](const llama_seq_id * slots) { return slots[0] == seq_id; });
    }
};
