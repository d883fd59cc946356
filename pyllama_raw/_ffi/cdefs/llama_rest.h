/* llama.h: model splits, system information, logging, timings, training. */

int32_t llama_split_path(
    char * split_path, size_t maxlen, const char * path_prefix, int32_t split_no,
    int32_t split_count);
int32_t llama_split_prefix(
    char * split_prefix, size_t maxlen, const char * split_path, int32_t split_no,
    int32_t split_count);
const char * llama_print_system_info(void);
void llama_log_get(ggml_log_callback * log_callback, void ** user_data);
void llama_log_set(ggml_log_callback log_callback, void * user_data);

struct llama_perf_context_data {
    double t_start_ms;
    double t_load_ms;
    double t_p_eval_ms;
    double t_eval_ms;
    int32_t n_p_eval;
    int32_t n_eval;
    int32_t n_reused;
    ...;
};

struct llama_perf_sampler_data {
    double t_sample_ms;
    int32_t n_sample;
    ...;
};

struct llama_perf_context_data llama_perf_context(const struct llama_context * ctx);
void llama_perf_context_print(const struct llama_context * ctx);
void llama_perf_context_reset(struct llama_context * ctx);
struct llama_perf_sampler_data llama_perf_sampler(const struct llama_sampler * chain);
void llama_perf_sampler_print(const struct llama_sampler * chain);
void llama_perf_sampler_reset(struct llama_sampler * chain);

typedef bool (*llama_opt_param_filter)(
    const struct ggml_tensor * tensor, void * userdata);

bool llama_opt_param_filter_all(const struct ggml_tensor * tensor, void * userdata);

struct llama_opt_params {
    uint32_t n_ctx_train;
    llama_opt_param_filter param_filter;
    void * param_filter_ud;
    ggml_opt_get_optimizer_params get_opt_pars;
    void * get_opt_pars_ud;
    enum ggml_opt_optimizer_type optimizer_type;
    ...;
};

void llama_opt_init(
    struct llama_context * lctx, struct llama_model * model,
    struct llama_opt_params lopt_params);
void llama_opt_epoch(
    struct llama_context * lctx, ggml_opt_dataset_t dataset,
    ggml_opt_result_t result_train, ggml_opt_result_t result_eval, int64_t idata_split,
    ggml_opt_epoch_callback callback_train, ggml_opt_epoch_callback callback_eval);
