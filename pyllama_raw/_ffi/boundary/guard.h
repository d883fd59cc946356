// No exception leaves a plr_ call: it becomes a code, and a message of its thread.
#pragma once

#include <cstdio>
#include <exception>

#include "errors.h"

inline thread_local char last_error[2048] = "";
inline thread_local int  n_guards         = 0;  // plr_ calls in progress on this thread

inline void remember(const char * message) noexcept {
    std::snprintf(last_error, sizeof(last_error), "%s", message);
}

struct Guard {
    Guard() { ++n_guards; }
    ~Guard() { --n_guards; }
};

// Run *body*; what it throws becomes *failure* and a message.
template <typename Result, typename Body>
Result guarded(Result failure, Body && body) noexcept {
    try {
        Guard guard;
        return body();
    } catch (const std::exception & error) {
        remember(error.what());
    } catch (...) {
        remember("unknown C++ exception");
    }
    return failure;
}
