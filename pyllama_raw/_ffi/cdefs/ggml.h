/* ggml.h: types, tensors, quantisation, logging, thread pool parameters. */

#define GGML_FILE_MAGIC ...
#define GGML_FILE_VERSION ...
#define GGML_QNT_VERSION ...
#define GGML_MAX_DIMS ...
#define GGML_MAX_SRC ...
#define GGML_MAX_N_THREADS ...
#define GGML_MAX_OP_PARAMS ...
#define GGML_MAX_NAME ...
#define GGML_DEFAULT_N_THREADS ...
#define GGML_ROPE_TYPE_NORMAL ...
#define GGML_ROPE_TYPE_NEOX ...
#define GGML_ROPE_TYPE_MROPE ...
#define GGML_ROPE_TYPE_VISION ...
#define GGML_ROPE_TYPE_IMROPE ...
#define GGML_MROPE_SECTIONS ...

typedef void (*ggml_abort_callback_t)(const char * error_message);

ggml_abort_callback_t ggml_set_abort_callback(ggml_abort_callback_t callback);

enum ggml_status {
    GGML_STATUS_ALLOC_FAILED,
    GGML_STATUS_FAILED,
    GGML_STATUS_SUCCESS,
    GGML_STATUS_ABORTED,
    ...
};

const char * ggml_status_to_string(enum ggml_status status);

typedef uint16_t ggml_fp16_t;

float ggml_fp16_to_fp32(ggml_fp16_t);
ggml_fp16_t ggml_fp32_to_fp16(float);
void ggml_fp16_to_fp32_row(const ggml_fp16_t *, float *, int64_t);
void ggml_fp32_to_fp16_row(const float *, ggml_fp16_t *, int64_t);

struct ggml_object;
struct ggml_context;
struct ggml_cgraph;

enum ggml_type {
    GGML_TYPE_F32,
    GGML_TYPE_F16,
    GGML_TYPE_Q4_0,
    GGML_TYPE_Q4_1,
    GGML_TYPE_Q5_0,
    GGML_TYPE_Q5_1,
    GGML_TYPE_Q8_0,
    GGML_TYPE_Q8_1,
    GGML_TYPE_Q2_K,
    GGML_TYPE_Q3_K,
    GGML_TYPE_Q4_K,
    GGML_TYPE_Q5_K,
    GGML_TYPE_Q6_K,
    GGML_TYPE_Q8_K,
    GGML_TYPE_IQ2_XXS,
    GGML_TYPE_IQ2_XS,
    GGML_TYPE_IQ3_XXS,
    GGML_TYPE_IQ1_S,
    GGML_TYPE_IQ4_NL,
    GGML_TYPE_IQ3_S,
    GGML_TYPE_IQ2_S,
    GGML_TYPE_IQ4_XS,
    GGML_TYPE_I8,
    GGML_TYPE_I16,
    GGML_TYPE_I32,
    GGML_TYPE_I64,
    GGML_TYPE_F64,
    GGML_TYPE_IQ1_M,
    GGML_TYPE_BF16,
    GGML_TYPE_TQ1_0,
    GGML_TYPE_TQ2_0,
    GGML_TYPE_MXFP4,
    GGML_TYPE_NVFP4,
    GGML_TYPE_Q1_0,
    GGML_TYPE_Q2_0,
    GGML_TYPE_COUNT,
    ...
};

enum ggml_ftype {
    GGML_FTYPE_UNKNOWN,
    GGML_FTYPE_ALL_F32,
    GGML_FTYPE_MOSTLY_F16,
    GGML_FTYPE_MOSTLY_Q4_0,
    GGML_FTYPE_MOSTLY_Q4_1,
    GGML_FTYPE_MOSTLY_Q4_1_SOME_F16,
    GGML_FTYPE_MOSTLY_Q8_0,
    GGML_FTYPE_MOSTLY_Q5_0,
    GGML_FTYPE_MOSTLY_Q5_1,
    GGML_FTYPE_MOSTLY_Q2_K,
    GGML_FTYPE_MOSTLY_Q3_K,
    GGML_FTYPE_MOSTLY_Q4_K,
    GGML_FTYPE_MOSTLY_Q5_K,
    GGML_FTYPE_MOSTLY_Q6_K,
    GGML_FTYPE_MOSTLY_IQ2_XXS,
    GGML_FTYPE_MOSTLY_IQ2_XS,
    GGML_FTYPE_MOSTLY_IQ3_XXS,
    GGML_FTYPE_MOSTLY_IQ1_S,
    GGML_FTYPE_MOSTLY_IQ4_NL,
    GGML_FTYPE_MOSTLY_IQ3_S,
    GGML_FTYPE_MOSTLY_IQ2_S,
    GGML_FTYPE_MOSTLY_IQ4_XS,
    GGML_FTYPE_MOSTLY_IQ1_M,
    GGML_FTYPE_MOSTLY_BF16,
    GGML_FTYPE_MOSTLY_MXFP4,
    GGML_FTYPE_MOSTLY_NVFP4,
    GGML_FTYPE_MOSTLY_Q1_0,
    GGML_FTYPE_MOSTLY_Q2_0,
    ...
};

enum ggml_op {
    GGML_OP_NONE,
    GGML_OP_DUP,
    GGML_OP_ADD,
    GGML_OP_ADD_ID,
    GGML_OP_ADD1,
    GGML_OP_ACC,
    GGML_OP_SUB,
    GGML_OP_MUL,
    GGML_OP_DIV,
    GGML_OP_SQR,
    GGML_OP_SQRT,
    GGML_OP_LOG,
    GGML_OP_SIN,
    GGML_OP_COS,
    GGML_OP_SUM,
    GGML_OP_SUM_ROWS,
    GGML_OP_CUMSUM,
    GGML_OP_MEAN,
    GGML_OP_ARGMAX,
    GGML_OP_COUNT_EQUAL,
    GGML_OP_REPEAT,
    GGML_OP_REPEAT_BACK,
    GGML_OP_CONCAT,
    GGML_OP_SILU_BACK,
    GGML_OP_NORM,
    GGML_OP_RMS_NORM,
    GGML_OP_RMS_NORM_BACK,
    GGML_OP_GROUP_NORM,
    GGML_OP_L2_NORM,
    GGML_OP_MUL_MAT,
    GGML_OP_MUL_MAT_ID,
    GGML_OP_OUT_PROD,
    GGML_OP_SCALE,
    GGML_OP_SET,
    GGML_OP_CPY,
    GGML_OP_CONT,
    GGML_OP_RESHAPE,
    GGML_OP_VIEW,
    GGML_OP_PERMUTE,
    GGML_OP_TRANSPOSE,
    GGML_OP_GET_ROWS,
    GGML_OP_GET_ROWS_BACK,
    GGML_OP_SET_ROWS,
    GGML_OP_DIAG,
    GGML_OP_DIAG_MASK_INF,
    GGML_OP_DIAG_MASK_ZERO,
    GGML_OP_SOFT_MAX,
    GGML_OP_SOFT_MAX_BACK,
    GGML_OP_ROPE,
    GGML_OP_ROPE_BACK,
    GGML_OP_CLAMP,
    GGML_OP_CONV_TRANSPOSE_1D,
    GGML_OP_IM2COL,
    GGML_OP_IM2COL_BACK,
    GGML_OP_IM2COL_3D,
    GGML_OP_COL2IM_1D,
    GGML_OP_CONV_2D,
    GGML_OP_CONV_3D,
    GGML_OP_CONV_2D_DW,
    GGML_OP_CONV_TRANSPOSE_2D,
    GGML_OP_POOL_1D,
    GGML_OP_POOL_2D,
    GGML_OP_POOL_2D_BACK,
    GGML_OP_UPSCALE,
    GGML_OP_PAD,
    GGML_OP_PAD_REFLECT_1D,
    GGML_OP_ROLL,
    GGML_OP_ARANGE,
    GGML_OP_TIMESTEP_EMBEDDING,
    GGML_OP_ARGSORT,
    GGML_OP_TOP_K,
    GGML_OP_LEAKY_RELU,
    GGML_OP_TRI,
    GGML_OP_FILL,
    GGML_OP_FLASH_ATTN_EXT,
    GGML_OP_FLASH_ATTN_BACK,
    GGML_OP_SSM_CONV,
    GGML_OP_SSM_SCAN,
    GGML_OP_WIN_PART,
    GGML_OP_WIN_UNPART,
    GGML_OP_GET_REL_POS,
    GGML_OP_ADD_REL_POS,
    GGML_OP_RWKV_WKV6,
    GGML_OP_GATED_LINEAR_ATTN,
    GGML_OP_RWKV_WKV7,
    GGML_OP_SOLVE_TRI,
    GGML_OP_GATED_DELTA_NET,
    GGML_OP_LIGHTNING_INDEXER,
    GGML_OP_DSV4_HC_COMB,
    GGML_OP_DSV4_HC_PRE,
    GGML_OP_DSV4_HC_POST,
    GGML_OP_UNARY,
    GGML_OP_MAP_CUSTOM1,
    GGML_OP_MAP_CUSTOM2,
    GGML_OP_MAP_CUSTOM3,
    GGML_OP_CUSTOM,
    GGML_OP_CROSS_ENTROPY_LOSS,
    GGML_OP_CROSS_ENTROPY_LOSS_BACK,
    GGML_OP_OPT_STEP_ADAMW,
    GGML_OP_OPT_STEP_SGD,
    GGML_OP_GLU,
    GGML_OP_COUNT,
    ...
};

enum ggml_log_level {
    GGML_LOG_LEVEL_NONE,
    GGML_LOG_LEVEL_DEBUG,
    GGML_LOG_LEVEL_INFO,
    GGML_LOG_LEVEL_WARN,
    GGML_LOG_LEVEL_ERROR,
    GGML_LOG_LEVEL_CONT,
    ...
};

struct ggml_init_params {
    size_t mem_size;
    void * mem_buffer;
    bool no_alloc;
    ...;
};

struct ggml_tensor {
    enum ggml_type type;
    struct ggml_backend_buffer * buffer;
    int64_t ne[...];
    size_t nb[...];
    enum ggml_op op;
    int32_t op_params[...];
    int32_t flags;
    struct ggml_tensor * src[...];
    struct ggml_tensor * view_src;
    size_t view_offs;
    void * data;
    char name[...];
    void * extra;
    char padding[8];
    ...;
};

typedef bool (*ggml_abort_callback)(void * data);

const char * ggml_version(void);
const char * ggml_commit(void);
void ggml_time_init(void);
int64_t ggml_time_us(void);
FILE * ggml_fopen(const char * fname, const char * mode);
int64_t ggml_nelements(const struct ggml_tensor * tensor);
int64_t ggml_nrows(const struct ggml_tensor * tensor);
size_t ggml_nbytes(const struct ggml_tensor * tensor);
int64_t ggml_blck_size(enum ggml_type type);
size_t ggml_type_size(enum ggml_type type);
size_t ggml_row_size(enum ggml_type type, int64_t ne);
const char * ggml_type_name(enum ggml_type type);
size_t ggml_element_size(const struct ggml_tensor * tensor);
bool ggml_is_quantized(enum ggml_type type);
enum ggml_type ggml_ftype_to_ggml_type(enum ggml_ftype ftype);
int ggml_n_dims(const struct ggml_tensor * tensor);
bool ggml_is_contiguous(const struct ggml_tensor * tensor);
size_t ggml_tensor_overhead(void);
struct ggml_context * ggml_init(struct ggml_init_params params);
void ggml_reset(struct ggml_context * ctx);
void ggml_free(struct ggml_context * ctx);
size_t ggml_used_mem(const struct ggml_context * ctx);
struct ggml_tensor * ggml_new_tensor(
    struct ggml_context * ctx, enum ggml_type type, int n_dims, const int64_t * ne);
struct ggml_tensor * ggml_new_tensor_1d(
    struct ggml_context * ctx, enum ggml_type type, int64_t ne0);
struct ggml_tensor * ggml_new_tensor_2d(
    struct ggml_context * ctx, enum ggml_type type, int64_t ne0, int64_t ne1);
struct ggml_tensor * ggml_new_tensor_3d(
    struct ggml_context * ctx, enum ggml_type type, int64_t ne0, int64_t ne1,
    int64_t ne2);
struct ggml_tensor * ggml_new_tensor_4d(
    struct ggml_context * ctx, enum ggml_type type, int64_t ne0, int64_t ne1,
    int64_t ne2, int64_t ne3);
struct ggml_tensor * ggml_get_first_tensor(const struct ggml_context * ctx);
struct ggml_tensor * ggml_get_next_tensor(
    const struct ggml_context * ctx, struct ggml_tensor * tensor);
struct ggml_tensor * ggml_get_tensor(struct ggml_context * ctx, const char * name);
void * ggml_get_data(const struct ggml_tensor * tensor);
const char * ggml_get_name(const struct ggml_tensor * tensor);
struct ggml_tensor * ggml_set_name(struct ggml_tensor * tensor, const char * name);

typedef void (*ggml_log_callback)(
    enum ggml_log_level level, const char * text, void * user_data);

void ggml_log_get(ggml_log_callback * log_callback, void ** user_data);
void ggml_log_set(ggml_log_callback log_callback, void * user_data);
void ggml_quantize_init(enum ggml_type type);
void ggml_quantize_free(void);
bool ggml_quantize_requires_imatrix(enum ggml_type type);
size_t ggml_quantize_chunk(
    enum ggml_type type, const float * src, void * dst, int64_t start, int64_t nrows,
    int64_t n_per_row, const float * imatrix);

enum ggml_sched_priority {
    GGML_SCHED_PRIO_LOW,
    GGML_SCHED_PRIO_NORMAL,
    GGML_SCHED_PRIO_MEDIUM,
    GGML_SCHED_PRIO_HIGH,
    GGML_SCHED_PRIO_REALTIME,
    ...
};

struct ggml_threadpool_params {
    bool cpumask[...];
    int n_threads;
    enum ggml_sched_priority prio;
    uint32_t poll;
    bool strict_cpu;
    bool paused;
    ...;
};

struct ggml_threadpool;

typedef struct ggml_threadpool * ggml_threadpool_t;

struct ggml_threadpool_params ggml_threadpool_params_default(int n_threads);
void ggml_threadpool_params_init(struct ggml_threadpool_params * p, int n_threads);
bool ggml_threadpool_params_match(
    const struct ggml_threadpool_params * p0, const struct ggml_threadpool_params * p1);
