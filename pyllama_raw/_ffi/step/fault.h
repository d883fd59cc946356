// Makes a decode fail on purpose, so that tests see what follows. It costs each decode one
// comparison.
#pragma once

#include <cstdint>

#include "llama.h"

struct Fault {
    int32_t code    = 0;   // what to end with; 0: nothing fails
    int32_t n_until = 0;   // decodes that work before; below 0: all of them fail
    int32_t seq_id  = -1;  // of decodes that compute this slot only; below 0: of any

    // The code that the decode of *batch* is to end with instead of being computed.
    int32_t take(const llama_batch & batch) {
        if (code == 0 || !concerns(batch)) {
            return 0;
        }
        if (n_until < 0) {
            return code;
        }
        const int32_t taken = n_until == 0 ? code : 0;
        n_until -= 1;
        if (taken != 0) {
            code = 0;
        }
        return taken;
    }

  private:
    bool concerns(const llama_batch & batch) const {
        if (seq_id < 0) {
            return true;
        }
        for (int32_t i = 0; i < batch.n_tokens; ++i) {
            if (batch.seq_id[i][0] == seq_id) {
                return true;
            }
        }
        return false;
    }
};
