// The gate between threads that read the adapters of a model and threads that change them.
#pragma once

#include <pthread.h>

#include <mutex>
#include <new>
#include <shared_mutex>

// Many may read at a time. A thread that wants to change waits for the readers, and lets no
// further one in meanwhile: else a thread that decodes all the time would never let it.
class AdaptersGate {
  public:
    std::shared_lock<std::shared_mutex> reading() {
        const std::lock_guard<std::mutex> turn(turn_);
        return std::shared_lock<std::shared_mutex>(inside_);
    }

    template <typename Body>
    auto changing(Body && body) {
        const std::lock_guard<std::mutex>         turn(turn_);
        const std::unique_lock<std::shared_mutex> lock(inside_);
        return body();
    }

  private:
    std::mutex        turn_;
    std::shared_mutex inside_;
};

inline AdaptersGate adapters_gate;  // of all models

// A fork has none of the threads that were inside.
inline const int adapters_gate_in_forks =
    pthread_atfork(nullptr, nullptr, [] { new (&adapters_gate) AdaptersGate; });
