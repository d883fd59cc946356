/*
 * ggml-cpu.h: only a type. The CPU backend may be a plug-in (GGML_BACKEND_DL), which cannot be
 * linked: its functions (ggml_threadpool_new, ...) come from ggml_backend_reg_get_proc_address.
 */

enum ggml_numa_strategy {
    GGML_NUMA_STRATEGY_DISABLED,
    GGML_NUMA_STRATEGY_DISTRIBUTE,
    GGML_NUMA_STRATEGY_ISOLATE,
    GGML_NUMA_STRATEGY_NUMACTL,
    GGML_NUMA_STRATEGY_MIRROR,
    GGML_NUMA_STRATEGY_COUNT,
    ...
};
