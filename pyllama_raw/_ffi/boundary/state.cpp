#include "state.h"

#include <chrono>
#include <thread>

#include "exceptions.h"

static int64_t cell_ns = 0;  // of tests

void plr_slow_copies(int64_t ns_per_cell) {
    cell_ns = ns_per_cell;
}

// Wait as a device does that copies cells one by one.
static void wait_as_slow(llama_context * ctx, llama_seq_id seq_id) {
    const auto memory = cell_ns > 0 && seq_id >= 0 ? llama_get_memory(ctx) : nullptr;
    const auto last   = memory == nullptr ? -1 : llama_memory_seq_pos_max(memory, seq_id);
    if (last >= 0) {
        // Of a hybrid memory the lowest position is that of its recurrent part, which has one cell.
        const bool is_hybrid = llama_model_is_hybrid(llama_get_model(ctx));
        const auto first     = is_hybrid ? 0 : llama_memory_seq_pos_min(memory, seq_id);
        const int64_t n_cells = last - first + 1;
        std::this_thread::sleep_for(std::chrono::nanoseconds(cell_ns * n_cells));
    }
}

int plr_state_seq_size(llama_context * ctx, llama_seq_id seq_id, size_t * n_bytes) {
    *n_bytes = 0;
    return attempt([&] { *n_bytes = llama_state_seq_get_size(ctx, seq_id); });
}

int plr_state_seq_get(llama_context * ctx, uint8_t * dst, size_t size,
                      llama_seq_id seq_id, size_t * n_bytes) {
    *n_bytes = 0;
    return attempt([&] {
        *n_bytes = llama_state_seq_get_data(ctx, dst, size, seq_id);
        wait_as_slow(ctx, seq_id);
    });
}

int plr_state_seq_set(llama_context * ctx, const uint8_t * src, size_t size,
                      llama_seq_id seq_id, size_t * n_bytes) {
    *n_bytes = 0;
    return attempt([&] {
        *n_bytes = llama_state_seq_set_data(ctx, src, size, seq_id);
        wait_as_slow(ctx, seq_id);
    });
}

bool plr_state_is_bounded() {
    return PLR_IS_MENDED || LLAMA_STATE_SEQ_VERSION > 2;  // MENDS_OF_OLDER of build_lib.py
}
