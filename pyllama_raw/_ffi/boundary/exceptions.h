// No exception leaves a plr_ function: it becomes a return value, and a message that
// plr_last_error() gives to the same thread.
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

// The result of *body*; *failure* if it throws.
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

// 0; PLR_EXCEPTION if *body* throws.
template <typename Body>
int attempt(Body && body) noexcept {
    return guarded<int>(PLR_EXCEPTION, [&] {
        body();
        return 0;
    });
}
