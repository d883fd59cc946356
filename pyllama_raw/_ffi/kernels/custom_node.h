// Makes custom operations of nodes of a graph, and keeps their state and memory.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#include "ggml.h"
#include "simd.h"

#if defined(__linux__)
// Sleeps until *number* is not *seen*, or wakes without a reason.
inline void sleep_while(int32_t * number, int32_t seen) {
    syscall(SYS_futex, number, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

inline void wake_all(int32_t * number) {
    syscall(SYS_futex, number, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}
#else
inline void sleep_while(int32_t *, int32_t) { sched_yield(); }

inline void wake_all(int32_t *) {}
#endif

// The state of an operation while threads compute it. It stands at the end of op_params, which
// ggml does not use, so it lives as long as the node.
struct NodeState {
    float   scale, max_bias;  // of attention, from the operation that was replaced
    float   epsilon;          // of a norm
    int32_t has_gelu;         // a product, because GELU has joined it
    int32_t has_columns;      // a product, whose columns the one before it has packed
    int32_t is_alone;         // a woven product, which has one column and is woven
    int32_t are_many;         // a woven product, whose columns are multiplied as many
    int32_t n_ready;  // threads that have passed wait_for_all()
    int32_t n_asleep;  // threads that sleep there
    int32_t n_taken;  // parts that threads have taken

    static constexpr int    kSpins  = 1000;  // as libgomp waits shortly, see openmp.py
    static constexpr size_t kOffset = GGML_MAX_OP_PARAMS - 10 * sizeof(int32_t);
    static_assert(kOffset >= 24, "a custom operation has its function, its threads and its data before");

    static NodeState & of(ggml_tensor * node) {
        return *reinterpret_cast<NodeState *>(reinterpret_cast<char *>(node->op_params) +
                                              kOffset);
    }

    static const NodeState & of(const ggml_tensor * node) {
        return of(const_cast<ggml_tensor *>(node));
    }

    // Before each time that a graph is computed.
    void reset() { n_ready = n_asleep = n_taken = 0; }

    // Waits until all threads of libllama are here, as they wait between two operations: awake
    // for a while, then asleep, because another program may compute on the CPU of the last one. The second
    // time in an operation *n_threads* is twice as many.
    void wait_for_all(int n_threads) {
        if (__atomic_add_fetch(&n_ready, 1, __ATOMIC_SEQ_CST) == n_threads) {
            if (__atomic_load_n(&n_asleep, __ATOMIC_SEQ_CST) > 0) {
                wake_all(&n_ready);
            }
            return;
        }
        for (int i = 0; i < kSpins; ++i) {
            if (__atomic_load_n(&n_ready, __ATOMIC_ACQUIRE) >= n_threads) {
                return;
            }
            _mm_pause();
        }
        __atomic_add_fetch(&n_asleep, 1, __ATOMIC_SEQ_CST);
        for (int32_t n = here(); n < n_threads; n = here()) {
            sleep_while(&n_ready, n);
        }
    }

    // The next part of the work, from 0 on; each goes to one thread.
    int32_t take() { return __atomic_fetch_add(&n_taken, 1, __ATOMIC_RELAXED); }

  private:
    int32_t here() const { return __atomic_load_n(&n_ready, __ATOMIC_SEQ_CST); }
};

// One custom operation, as ggml writes it into the nodes that it replaces.
class CustomNode {
  public:
    CustomNode(ggml_custom_op_t compute, void * data) {
        const ggml_init_params params = {ggml_tensor_overhead() * 2, nullptr, true};
        ggml_context *         ctx    = ggml_init(params);
        if (ctx == nullptr) {
            throw std::bad_alloc();
        }
        ggml_tensor * source = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, 1);
        pattern_ = *ggml_custom_4d(ctx, GGML_TYPE_F32, 1, 1, 1, 1, &source, 1, compute,
                                   GGML_N_TASKS_MAX, data);
        ggml_free(ctx);
    }

    // Whether *node* runs the same function with the same data.
    bool is_of(const ggml_tensor * node) const {
        return std::memcmp(node->op_params, pattern_.op_params, NodeState::kOffset) == 0;
    }

    void replace(ggml_tensor * node, const NodeState & state) const {
        node->op = pattern_.op;
        std::memcpy(node->op_params, pattern_.op_params, sizeof(node->op_params));
        NodeState::of(node) = state;
    }

  private:
    ggml_tensor pattern_;
};

// Memory for the columns of the product that runs; it grows and is never given back.
class Scratch {
  public:
    // False if there is no memory; then libllama computes.
    bool reserve(size_t n_bytes) {
        if (n_bytes > n_bytes_) {
            const size_t padded = (n_bytes + 63) / 64 * 64;
            data_.reset(static_cast<char *>(std::aligned_alloc(64, padded)));
            n_bytes_ = data_ ? n_bytes : 0;
        }
        return n_bytes <= n_bytes_;
    }

    char * data() const { return data_.get(); }

  private:
    struct Free {
        void operator()(char * data) const { std::free(data); }
    };

    std::unique_ptr<char, Free> data_;
    size_t                      n_bytes_ = 0;
};
