#include "abort_flag.h"

#include <new>

static bool read_flag(void * data) {
    const auto * flag = static_cast<plr_flag *>(data);
    return (flag->value.load(std::memory_order_relaxed) ||
            flag->drops.load(std::memory_order_relaxed)) &&
           !Unstoppable::here();
}

plr_flag * plr_flag_new(void) {
    return new (std::nothrow) plr_flag;
}

void plr_flag_free(plr_flag * flag) {
    delete flag;
}

void plr_flag_set(plr_flag * flag, bool value) {
    flag->value.store(value, std::memory_order_relaxed);
}

void plr_flag_attach(llama_context_params * params, plr_flag * flag) {
    params->abort_callback      = read_flag;
    params->abort_callback_data = flag;
}
