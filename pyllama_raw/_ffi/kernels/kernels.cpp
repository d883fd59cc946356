#include "kernels.h"

#include <cstring>
#include <iterator>

#include "boundary/exceptions.h"
#include "callback.h"

struct plr_kernels : Kernels {};

bool plr_kernels_row(int32_t index, plr_kernel * row) {
#if defined(__x86_64__) && defined(__GNUC__)
    if (index < kernels::N_ROWS) {
        const kernels::Row one = kernels::row(index);
        *row = {one.computes, one.needs, index >= kernels::WOVEN,
                guarded<bool>(false, [&] { return kernels::is_usable(index); })};
        return true;
    }
#endif
    return false;
}

const char * plr_woven_level(int32_t index, bool * is_usable) {
#if defined(__x86_64__) && defined(__GNUC__)
    if (index < int32_t(std::size(woven::kLevels))) {
        *is_usable = woven::kLevels[index].is_usable();
        return woven::kLevels[index].name;
    }
#endif
    return nullptr;
}

bool plr_woven_choose(const char * name) {
#if defined(__x86_64__) && defined(__GNUC__)
    return woven::choose_level(name);
#else
    return std::strcmp(name, "auto") == 0;
#endif
}

void plr_cpu_only(bool avx2, bool avxvnni, bool avx512vnni, bool amx) {
#if defined(__x86_64__) && defined(__GNUC__)
    cpu_may = {avx2, avxvnni, avx512vnni, amx};
#endif
}

const char * plr_cpu_level(void) {
    return PLR_CPU_LEVEL;
}

plr_kernels * plr_kernels_attach(llama_context_params * params, bool fast, bool follows,
                                 int32_t sums) {
    return guarded<plr_kernels *>(nullptr, [&]() -> plr_kernels * {
        if (!(fast && Kernels::has_fast()) && !(sums != PLR_SUMS_ANY && Kernels::has_columns())) {
            return nullptr;
        }
        auto * kernels = new plr_kernels;
        kernels->attach(params, fast, follows, sums);
        return kernels;
    });
}

const char * plr_kernels_stray(const plr_kernels * kernels) {
    return kernels->stray;
}

void plr_kernels_free(plr_kernels * kernels) {
    delete kernels;
}

int64_t plr_kernels_taken(const plr_kernels * kernels, int32_t index) {
    return kernels->n_taken[index];
}

int plr_cells_rm(plr_kernels * kernels, int32_t slot, int32_t p0, int32_t p1) {
    return attempt([&] { kernels->cells.remove(slot, p0, p1); });
}

int plr_cells_cp(plr_kernels * kernels, int32_t src, int32_t dst, int32_t p0, int32_t p1) {
    return attempt([&] { kernels->cells.copy(src, dst, p0, p1); });
}

int plr_cells_add(plr_kernels * kernels, int32_t slot, int32_t p0, int32_t p1, int32_t delta) {
    return attempt([&] { kernels->cells.move(slot, p0, p1, delta); });
}

void plr_cells_clear(plr_kernels * kernels) {
    kernels->cells.clear();
}

int plr_cells_restore(plr_kernels * kernels, int32_t slot, const uint8_t * state, size_t size) {
    return attempt([&] { kernels->cells.restore(slot, state, size); });
}

int plr_kernels_decode(llama_context * ctx, const llama_batch & batch, int32_t n_rows) {
    Decoding decoding{&batch, n_rows};
    Decoding::current() = &decoding;
    const int code = guarded<int>(PLR_EXCEPTION, [&] {
        const int done = llama_decode(ctx, batch);
        llama_synchronize(ctx);
        return done;
    });
    Decoding::current() = nullptr;
    for (int32_t i = 0; code != 0 && decoding.cells != nullptr && i < batch.n_tokens; ++i) {
        const llama_seq_id slot = batch.seq_id[i][0];  // libllama forgets what it has not computed
        const llama_pos    last = llama_memory_seq_pos_max(llama_get_memory(ctx), slot);
        decoding.cells->remove(slot, last + 1, -1);
    }
    return code;
}
