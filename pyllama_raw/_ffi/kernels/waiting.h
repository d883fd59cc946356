// Sleep until a number changes, and an end to that.
#pragma once

#include <climits>
#include <cstdint>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

// Returns also without a reason. Does not sleep if *number* is not *seen*.
inline void sleep_while(int32_t * number, int32_t seen) {
    syscall(SYS_futex, number, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

inline void wake_all(int32_t * number) {
    syscall(SYS_futex, number, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}
#else
#include <sched.h>

inline void sleep_while(int32_t *, int32_t) { sched_yield(); }

inline void wake_all(int32_t *) {}
#endif
