/* llama.h: library, models, adapters. */

const char * llama_version(void);
struct llama_model_params llama_model_default_params(void);
struct llama_context_params llama_context_default_params(void);
struct llama_sampler_chain_params llama_sampler_chain_default_params(void);
struct llama_model_quantize_params llama_model_quantize_default_params(void);
void llama_backend_init(void);
void llama_backend_free(void);
void llama_numa_init(enum ggml_numa_strategy numa);
void llama_attach_threadpool(
    struct llama_context * ctx, ggml_threadpool_t threadpool,
    ggml_threadpool_t threadpool_batch);
void llama_detach_threadpool(struct llama_context * ctx);

typedef void (*llama_model_set_tensor_data_t)(
    struct ggml_tensor * tensor, void * userdata);

struct llama_model * llama_model_init_from_user(
    struct gguf_context * metadata, llama_model_set_tensor_data_t set_tensor_data,
    void * set_tensor_data_ud, struct llama_model_params params);
struct llama_model * llama_model_load_from_file(
    const char * path_model, struct llama_model_params params);
struct llama_model * llama_model_load_from_file_ptr(
    FILE * file, struct llama_model_params params);
struct llama_model * llama_model_load_from_splits(
    const char ** paths, size_t n_paths, struct llama_model_params params);
void llama_model_save_to_file(
    const struct llama_model * model, const char * path_model);
void llama_model_free(struct llama_model * model);
struct llama_context * llama_init_from_model(
    struct llama_model * model, struct llama_context_params params);
void llama_free(struct llama_context * ctx);
int64_t llama_time_us(void);
size_t llama_max_devices(void);
size_t llama_max_parallel_sequences(void);
size_t llama_max_tensor_buft_overrides(void);
bool llama_supports_mmap(void);
bool llama_supports_mlock(void);
bool llama_supports_gpu_offload(void);
bool llama_supports_rpc(void);
uint32_t llama_n_ctx(const struct llama_context * ctx);
uint32_t llama_n_ctx_seq(const struct llama_context * ctx);
uint32_t llama_n_batch(const struct llama_context * ctx);
uint32_t llama_n_ubatch(const struct llama_context * ctx);
uint32_t llama_n_seq_max(const struct llama_context * ctx);
uint32_t llama_n_rs_seq(const struct llama_context * ctx);
const struct llama_model * llama_get_model(const struct llama_context * ctx);
llama_memory_t llama_get_memory(const struct llama_context * ctx);
enum llama_pooling_type llama_pooling_type(const struct llama_context * ctx);
const struct llama_vocab * llama_model_get_vocab(const struct llama_model * model);
enum llama_rope_type llama_model_rope_type(const struct llama_model * model);
int32_t llama_model_n_ctx_train(const struct llama_model * model);
int32_t llama_model_n_embd(const struct llama_model * model);
int32_t llama_model_n_embd_inp(const struct llama_model * model);
int32_t llama_model_n_embd_out(const struct llama_model * model);
int32_t llama_model_n_layer(const struct llama_model * model);
int32_t llama_model_n_layer_nextn(const struct llama_model * model);
int32_t llama_model_n_head(const struct llama_model * model);
int32_t llama_model_n_head_kv(const struct llama_model * model);
int32_t llama_model_n_swa(const struct llama_model * model);
float llama_model_rope_freq_scale_train(const struct llama_model * model);
uint32_t llama_model_n_cls_out(const struct llama_model * model);
const char * llama_model_cls_label(const struct llama_model * model, uint32_t i);
enum llama_vocab_type llama_vocab_type(const struct llama_vocab * vocab);
int32_t llama_vocab_n_tokens(const struct llama_vocab * vocab);
int32_t llama_model_meta_val_str(
    const struct llama_model * model, const char * key, char * buf, size_t buf_size);
int32_t llama_model_meta_count(const struct llama_model * model);
const char * llama_model_meta_key_str(enum llama_model_meta_key key);
int32_t llama_model_meta_key_by_index(
    const struct llama_model * model, int32_t i, char * buf, size_t buf_size);
int32_t llama_model_meta_val_str_by_index(
    const struct llama_model * model, int32_t i, char * buf, size_t buf_size);
int32_t llama_model_desc(const struct llama_model * model, char * buf, size_t buf_size);
enum llama_ftype llama_model_ftype(const struct llama_model * model);
uint64_t llama_model_size(const struct llama_model * model);
const char * llama_model_chat_template(
    const struct llama_model * model, const char * name);
uint64_t llama_model_n_params(const struct llama_model * model);
bool llama_model_has_encoder(const struct llama_model * model);
bool llama_model_has_decoder(const struct llama_model * model);
llama_token llama_model_decoder_start_token(const struct llama_model * model);
bool llama_model_is_recurrent(const struct llama_model * model);
bool llama_model_is_hybrid(const struct llama_model * model);
bool llama_model_is_diffusion(const struct llama_model * model);
uint32_t llama_model_quantize(
    const char * fname_inp, const char * fname_out,
    const llama_model_quantize_params * params);
struct llama_adapter_lora * llama_adapter_lora_init(
    struct llama_model * model, const char * path_lora);
struct llama_adapter_lora * llama_adapter_lora_init_from_file_ptr(
    struct llama_model * model, FILE * file);
int32_t llama_adapter_meta_val_str(
    const struct llama_adapter_lora * adapter, const char * key, char * buf,
    size_t buf_size);
int32_t llama_adapter_meta_count(const struct llama_adapter_lora * adapter);
int32_t llama_adapter_meta_key_by_index(
    const struct llama_adapter_lora * adapter, int32_t i, char * buf, size_t buf_size);
int32_t llama_adapter_meta_val_str_by_index(
    const struct llama_adapter_lora * adapter, int32_t i, char * buf, size_t buf_size);
void llama_adapter_lora_free(struct llama_adapter_lora * adapter);
uint64_t llama_adapter_get_alora_n_invocation_tokens(
    const struct llama_adapter_lora * adapter);
const llama_token * llama_adapter_get_alora_invocation_tokens(
    const struct llama_adapter_lora * adapter);
int32_t llama_set_adapters_lora(
    struct llama_context * ctx, struct llama_adapter_lora ** adapters,
    size_t n_adapters, float * scales);
int32_t llama_set_adapter_cvec(
    struct llama_context * ctx, const float * data, size_t len, int32_t n_embd,
    int32_t il_start, int32_t il_end);
