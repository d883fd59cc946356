#include "log.h"

#include "exceptions.h"
#include "llama.h"
#include "log_ring.h"
#include "mtmd-helper.h"

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

void plr_log_install(void) {
    llama_log_set(on_log, nullptr);  // sets the log of ggml as well
    mtmd_helper_log_set(on_log, nullptr);
}

size_t plr_log_drain(char * buf, size_t size) {
    return guarded<size_t>(0, [&] { return ring().drain(buf, size); });
}

size_t plr_log_n_dropped(void) {
    return guarded<size_t>(0, [&] { return ring().n_dropped(); });
}
