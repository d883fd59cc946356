// Runs a function for many indices at once, in the threads of libllama.
//
// The function becomes the only operation of a graph, and libllama computes the graph. Threads
// of our own would compete for CPUs with the threads of libllama, because these spin for a
// while after every graph.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <new>

#include "boundary/cpu_backend.h"
#include "ggml-backend.h"
#include "ggml.h"

class Parallel {
  public:
    Parallel() {
        const size_t n_bytes = 4 * ggml_tensor_overhead() + ggml_graph_overhead_custom(1, false);
        ctx_ = ggml_init({n_bytes, nullptr, false});
        if (ctx_ == nullptr) {
            throw std::bad_alloc();
        }
        ggml_tensor * source = ggml_new_tensor_1d(ctx_, GGML_TYPE_F32, 1);
        graph_ = ggml_new_graph_custom(ctx_, 1, false);
        ggml_build_forward_expand(graph_, ggml_custom_4d(ctx_, GGML_TYPE_F32, 1, 1, 1, 1, &source,
                                                         1, take_all, GGML_N_TASKS_MAX, this));
    }

    ~Parallel() { ggml_free(ctx_); }

    Parallel(const Parallel &) = delete;

    // Calls work(i) for each i below *n*, in any order. It must not throw.
    template <typename Work>
    void each(int32_t n, int32_t n_threads, const Work & work) {
        if (n < 2 || n_threads < 2 || !keeps_threads()) {
            for (int32_t i = 0; i < n; ++i) {
                work(i);
            }
            return;
        }
        n_       = n;
        n_taken_ = 0;
        data_    = &work;
        work_    = [](const void * data, int32_t i) { (*static_cast<const Work *>(data))(i); };
        const CpuBackend & backend = CpuBackend::get();
        ggml_cplan plan = backend.graph_plan(graph_, n_threads, nullptr);
        backend.graph_compute(graph_, &plan);
    }

  private:
    // Without OpenMP every graph starts new threads, which takes longer than sampling a row.
    static bool keeps_threads() {
        static const bool has_openmp =
            CpuBackend::get().graph_plan != nullptr && has_feature("OPENMP");
        return has_openmp;
    }

    static bool has_feature(const char * name) {
        ggml_backend_reg_t cpu = ggml_backend_reg_by_name("CPU");
        const auto features = reinterpret_cast<ggml_backend_get_features_t>(
            cpu ? ggml_backend_reg_get_proc_address(cpu, "ggml_backend_get_features") : nullptr);
        const ggml_backend_feature * feature = features ? features(cpu) : nullptr;
        while (feature != nullptr && feature->name != nullptr && std::strcmp(feature->name, name)) {
            ++feature;
        }
        return feature != nullptr && feature->name != nullptr;
    }

    static void take_all(ggml_tensor *, int, int, void * data) {
        auto & self = *static_cast<Parallel *>(data);
        for (int32_t i = self.n_taken_++; i < self.n_; i = self.n_taken_++) {
            self.work_(self.data_, i);
        }
    }

    ggml_context *       ctx_   = nullptr;
    ggml_cgraph *        graph_ = nullptr;
    std::atomic<int32_t> n_taken_{0};
    int32_t              n_     = 0;
    const void *         data_  = nullptr;
    void (*work_)(const void * data, int32_t i) = nullptr;
};
