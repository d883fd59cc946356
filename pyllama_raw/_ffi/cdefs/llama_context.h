/* llama.h: memory, state, batches, decoding, outputs. */

void llama_memory_clear(llama_memory_t mem, bool data);
bool llama_memory_seq_rm(
    llama_memory_t mem, llama_seq_id seq_id, llama_pos p0, llama_pos p1);
void llama_memory_seq_cp(
    llama_memory_t mem, llama_seq_id seq_id_src, llama_seq_id seq_id_dst, llama_pos p0,
    llama_pos p1);
void llama_memory_seq_keep(llama_memory_t mem, llama_seq_id seq_id);
void llama_memory_seq_add(
    llama_memory_t mem, llama_seq_id seq_id, llama_pos p0, llama_pos p1,
    llama_pos delta);
void llama_memory_seq_div(
    llama_memory_t mem, llama_seq_id seq_id, llama_pos p0, llama_pos p1, int d);
llama_pos llama_memory_seq_pos_min(llama_memory_t mem, llama_seq_id seq_id);
llama_pos llama_memory_seq_pos_max(llama_memory_t mem, llama_seq_id seq_id);
bool llama_memory_can_shift(llama_memory_t mem);
size_t llama_state_get_size(struct llama_context * ctx);
size_t llama_state_get_data(struct llama_context * ctx, uint8_t * dst, size_t size);
size_t llama_state_set_data(
    struct llama_context * ctx, const uint8_t * src, size_t size);
bool llama_state_load_file(
    struct llama_context * ctx, const char * path_session, llama_token * tokens_out,
    size_t n_token_capacity, size_t * n_token_count_out);
bool llama_state_save_file(
    struct llama_context * ctx, const char * path_session, const llama_token * tokens,
    size_t n_token_count);
size_t llama_state_seq_get_size(struct llama_context * ctx, llama_seq_id seq_id);
size_t llama_state_seq_get_data(
    struct llama_context * ctx, uint8_t * dst, size_t size, llama_seq_id seq_id);
size_t llama_state_seq_set_data(
    struct llama_context * ctx, const uint8_t * src, size_t size,
    llama_seq_id dest_seq_id);
size_t llama_state_seq_save_file(
    struct llama_context * ctx, const char * filepath, llama_seq_id seq_id,
    const llama_token * tokens, size_t n_token_count);
size_t llama_state_seq_load_file(
    struct llama_context * ctx, const char * filepath, llama_seq_id dest_seq_id,
    llama_token * tokens_out, size_t n_token_capacity, size_t * n_token_count_out);

typedef uint32_t llama_state_seq_flags;

size_t llama_state_seq_get_size_ext(
    struct llama_context * ctx, llama_seq_id seq_id, llama_state_seq_flags flags);
size_t llama_state_seq_get_data_ext(
    struct llama_context * ctx, uint8_t * dst, size_t size, llama_seq_id seq_id,
    llama_state_seq_flags flags);
size_t llama_state_seq_set_data_ext(
    struct llama_context * ctx, const uint8_t * src, size_t size,
    llama_seq_id dest_seq_id, llama_state_seq_flags flags);
struct llama_batch llama_batch_get_one(llama_token * tokens, int32_t n_tokens);
struct llama_batch llama_batch_init(int32_t n_tokens, int32_t embd, int32_t n_seq_max);
void llama_batch_free(struct llama_batch batch);
int32_t llama_encode(struct llama_context * ctx, struct llama_batch batch);
int32_t llama_decode(struct llama_context * ctx, struct llama_batch batch);

struct llama_batch_ext;

struct llama_embd {
    const float * data;
    size_t n_rows;
    size_t n_embd;
    ...;
};

struct llama_batch_ext * llama_batch_ext_init(struct llama_context * ctx);
void llama_batch_ext_free(struct llama_batch_ext * batch);
void llama_batch_ext_clear(struct llama_batch_ext * batch);
int32_t llama_batch_ext_add(struct llama_batch_ext * batch, llama_seq_id seq_id);
int32_t llama_batch_ext_add_token(
    struct llama_batch_ext * batch, llama_seq_id seq_id, llama_token id);
int32_t llama_batch_ext_add_embd(
    struct llama_batch_ext * batch, llama_seq_id seq_id, struct llama_embd embd);
bool llama_batch_ext_add_seq(
    struct llama_batch_ext * batch, int32_t idx, llama_seq_id seq_id);
bool llama_batch_ext_set_embd_token(
    struct llama_batch_ext * batch, int32_t idx, struct llama_embd embd);
bool llama_batch_ext_set_embd_state(
    struct llama_batch_ext * batch, int32_t idx, struct llama_embd embd);
bool llama_batch_ext_set_output_embd(
    struct llama_batch_ext * batch, int32_t idx, bool value);
bool llama_batch_ext_set_output_logits(
    struct llama_batch_ext * batch, int32_t idx, bool value);
bool llama_batch_ext_set_pos(
    struct llama_batch_ext * batch, int32_t idx, const llama_pos * pos);
int32_t llama_process(
    struct llama_context * ctx, enum llama_process_type type,
    struct llama_batch_ext * batch);
void llama_set_n_threads(
    struct llama_context * ctx, int32_t n_threads, int32_t n_threads_batch);
int32_t llama_n_threads(struct llama_context * ctx);
int32_t llama_n_threads_batch(struct llama_context * ctx);
void llama_set_embeddings(struct llama_context * ctx, bool embeddings);
void llama_set_causal_attn(struct llama_context * ctx, bool causal_attn);
bool llama_get_causal_attn(const struct llama_context * ctx);
void llama_set_abort_callback(
    struct llama_context * ctx, ggml_abort_callback abort_callback,
    void * abort_callback_data);
void llama_synchronize(struct llama_context * ctx);
float * llama_get_logits(struct llama_context * ctx);
float * llama_get_logits_ith(struct llama_context * ctx, int32_t i);
float * llama_get_embeddings(struct llama_context * ctx);
float * llama_get_embeddings_ith(struct llama_context * ctx, int32_t i);
float * llama_get_embeddings_seq(struct llama_context * ctx, llama_seq_id seq_id);
llama_token llama_get_sampled_token_ith(struct llama_context * ctx, int32_t i);
float * llama_get_sampled_probs_ith(struct llama_context * ctx, int32_t i);
uint32_t llama_get_sampled_probs_count_ith(struct llama_context * ctx, int32_t i);
float * llama_get_sampled_logits_ith(struct llama_context * ctx, int32_t i);
uint32_t llama_get_sampled_logits_count_ith(struct llama_context * ctx, int32_t i);
llama_token * llama_get_sampled_candidates_ith(struct llama_context * ctx, int32_t i);
uint32_t llama_get_sampled_candidates_count_ith(struct llama_context * ctx, int32_t i);
