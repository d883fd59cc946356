#include "log.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>

#include "exceptions.h"
#include "llama.h"
#include "mtmd-helper.h"

namespace {

// Keeps the log lines that Python has not read yet, in bounded memory. Any thread writes.
// A record is a byte for the level and the text. The oldest records make room.
class LogRing {
  public:
    void write(char level, const char * text) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const bool goes_on = level == GGML_LOG_LEVEL_CONT;
        level_ = goes_on ? level_ : level;
        if (!goes_on || records_.empty()) {
            records_.emplace_back(1, level_);
            ++n_bytes_;
        }
        const size_t length = std::min(std::strlen(text), max_bytes / 4);
        records_.back().append(text, length);
        for (n_bytes_ += length; n_bytes_ > max_bytes; records_.pop_front()) {
            n_bytes_ -= records_.front().size();
        }
    }

    // Moves whole records, each with a NUL behind it, to *buf*.
    size_t drain(char * buf, size_t size) {
        const std::lock_guard<std::mutex> lock(mutex_);
        size_t n_bytes = 0;
        for (; !records_.empty(); records_.pop_front()) {
            const std::string & record = records_.front();
            if (n_bytes + record.size() >= size) {
                break;
            }
            std::memcpy(buf + n_bytes, record.c_str(), record.size() + 1);
            n_bytes += record.size() + 1;
            n_bytes_ -= record.size();
        }
        return n_bytes;
    }

  private:
    static constexpr size_t max_bytes = 64 * 1024;

    std::mutex              mutex_;
    std::deque<std::string> records_;
    size_t                  n_bytes_ = 0;  // of all
    char                    level_   = GGML_LOG_LEVEL_INFO;
};

// Never destroyed: worker threads may log while the process ends.
LogRing & ring() {
    static LogRing * const instance = new LogRing;
    return *instance;
}

thread_local int n_unallocated = 0;

void on_log(ggml_log_level level, const char * text, void *) noexcept {
    thread_local bool skips = false;  // continuations of a debug line
    if (level != GGML_LOG_LEVEL_CONT) {
        skips = level == GGML_LOG_LEVEL_DEBUG;
    }
    if (skips || text == nullptr) {
        return;
    }
    if (level == GGML_LOG_LEVEL_ERROR && std::strstr(text, "failed to allocate") != nullptr) {
        ++n_unallocated;
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

int plr_log_n_unallocated(void) {
    return n_unallocated;
}
