/* Our shim: see ../shim.h. */

#define PLR_EXCEPTION ...

const char * plr_last_error(void);

typedef struct plr_flag plr_flag;

plr_flag * plr_flag_new(void);
void plr_flag_free(plr_flag * flag);
void plr_flag_set(plr_flag * flag, bool value);
bool plr_flag_get(const plr_flag * flag);
void plr_flag_attach(struct llama_context_params * params, plr_flag * flag);

typedef struct plr_progress plr_progress;

plr_progress * plr_progress_new(void);
void plr_progress_free(plr_progress * progress);
float plr_progress_get(const plr_progress * progress);
void plr_progress_cancel(plr_progress * progress);
struct llama_model * plr_model_load(
    const char * path, const struct llama_model_params * params,
    plr_progress * progress);
struct llama_context * plr_context_new(
    struct llama_model * model, const struct llama_context_params * params);

typedef struct plr_sampler {
    struct llama_sampler * chain;
    const llama_token * suppress;
    int32_t n_suppress;
    ...;
} plr_sampler;

typedef struct plr_times {
    int64_t decode_ns;
    int64_t sample_ns;
    ...;
} plr_times;

int plr_step(
    struct llama_context * ctx, const struct llama_batch * batch, int32_t n_rows,
    const int32_t * rows, const plr_sampler * samplers, llama_token * tokens,
    int32_t * codes, plr_times * times);
int plr_decode(struct llama_context * ctx, const struct llama_batch * batch);
int plr_encode(struct llama_context * ctx, const struct llama_batch * batch);
int plr_sampler_accept(struct llama_sampler * sampler, llama_token token);
int plr_state_seq_get(
    struct llama_context * ctx, uint8_t * dst, size_t size, llama_seq_id seq_id,
    llama_state_seq_flags flags, size_t * n_bytes);
int plr_state_seq_set(
    struct llama_context * ctx, const uint8_t * src, size_t size, llama_seq_id seq_id,
    llama_state_seq_flags flags, size_t * n_bytes);
void plr_log_install(void);
size_t plr_log_drain(char * buf, size_t size);
size_t plr_log_n_dropped(void);
