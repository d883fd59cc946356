/* ggml-cpu.h: NUMA, thread pools, CPU features. */

enum ggml_numa_strategy {
    GGML_NUMA_STRATEGY_DISABLED,
    GGML_NUMA_STRATEGY_DISTRIBUTE,
    GGML_NUMA_STRATEGY_ISOLATE,
    GGML_NUMA_STRATEGY_NUMACTL,
    GGML_NUMA_STRATEGY_MIRROR,
    GGML_NUMA_STRATEGY_COUNT,
    ...
};

void ggml_numa_init(enum ggml_numa_strategy numa);
bool ggml_is_numa(void);
struct ggml_threadpool * ggml_threadpool_new(struct ggml_threadpool_params * params);
void ggml_threadpool_free(struct ggml_threadpool * threadpool);
void ggml_threadpool_pause(struct ggml_threadpool * threadpool);
void ggml_threadpool_resume(struct ggml_threadpool * threadpool);
int ggml_cpu_has_sse3(void);
int ggml_cpu_has_ssse3(void);
int ggml_cpu_has_avx(void);
int ggml_cpu_has_avx_vnni(void);
int ggml_cpu_has_avx2(void);
int ggml_cpu_has_bmi2(void);
int ggml_cpu_has_f16c(void);
int ggml_cpu_has_fma(void);
int ggml_cpu_has_avx512(void);
int ggml_cpu_has_avx512_vbmi(void);
int ggml_cpu_has_avx512_vnni(void);
int ggml_cpu_has_avx512_bf16(void);
int ggml_cpu_has_amx_int8(void);
int ggml_cpu_has_neon(void);
int ggml_cpu_has_arm_fma(void);
int ggml_cpu_has_fp16_va(void);
int ggml_cpu_has_dotprod(void);
int ggml_cpu_has_matmul_int8(void);
int ggml_cpu_has_sve(void);
int ggml_cpu_get_sve_cnt(void);
int ggml_cpu_has_sme(void);
int ggml_cpu_has_riscv_v(void);
int ggml_cpu_get_rvv_vlen(void);
int ggml_cpu_has_vsx(void);
int ggml_cpu_has_vxe(void);
int ggml_cpu_has_wasm_simd(void);
int ggml_cpu_has_llamafile(void);
void ggml_cpu_init(void);
ggml_backend_t ggml_backend_cpu_init(void);
bool ggml_backend_is_cpu(ggml_backend_t backend);
ggml_backend_reg_t ggml_backend_cpu_reg(void);
