#include "log.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>

#include "exceptions.h"
#include "llama.h"
#include "mtmd-helper.h"

namespace {

// Keeps the log lines that Python has not read yet, in bounded memory. Any thread writes.
// A record is a byte for the level, the text, and a NUL. The oldest records make room.
class LogRing {
  public:
    void write(char level, const char * text) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const size_t length = std::min(std::strlen(text), max_bytes / 4);
        const bool goes_on = level == GGML_LOG_LEVEL_CONT;
        if (goes_on && !records_.empty()) {
            records_.pop_back();  // the NUL
        } else {
            records_.push_back(goes_on ? level_ : level);
        }
        level_ = goes_on ? level_ : level;
        for (size_t i = 0; i < length; ++i) {
            records_.push_back(text[i]);
        }
        records_.push_back('\0');
        if (records_.size() > max_bytes) {
            drop_oldest();
        }
    }

    size_t drain(char * buf, size_t size) {
        const std::lock_guard<std::mutex> lock(mutex_);
        size_t n_bytes = 0;
        for (size_t end = end_of_record(0); end <= std::min(size, records_.size());
             end = end_of_record(n_bytes)) {
            n_bytes = end;
            if (end == records_.size()) {
                break;
            }
        }
        std::memcpy(buf, records_.data(), n_bytes);
        records_.erase(0, n_bytes);
        return n_bytes;
    }

  private:
    static constexpr size_t max_bytes = 64 * 1024;

    // One past the NUL of the record that starts at *start*; past the end if there is none.
    size_t end_of_record(size_t start) const {
        const size_t nul = records_.find('\0', std::min(start + 1, records_.size()));
        return nul == std::string::npos ? records_.size() + 1 : nul + 1;
    }

    // A quarter at once, so that a full ring is not moved for every line.
    void drop_oldest() {
        size_t n_bytes = 0;
        while (n_bytes < records_.size() && records_.size() - n_bytes > max_bytes * 3 / 4) {
            n_bytes = std::min(end_of_record(n_bytes), records_.size());
        }
        records_.erase(0, n_bytes);
    }

    std::mutex  mutex_;
    std::string records_;
    char        level_ = GGML_LOG_LEVEL_INFO;
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
