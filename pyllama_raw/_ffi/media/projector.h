/*
 * A projector makes rows of embeddings of images and sounds (mtmd.h). Nothing throws, and an
 * encode gives way to steps, and can be cancelled, at the borders of layers.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "llama.h"
#include "mtmd.h"
#include "step/step.h"

/* An encode, which any thread may cancel while it runs. */
typedef struct plr_encode plr_encode;
plr_encode * plr_encode_new(void);
void         plr_encode_free(plr_encode * encode);
void         plr_encode_cancel(plr_encode * encode);
/* Borders of layers that were reached. */
int32_t      plr_encode_n_borders(const plr_encode * encode);

/*
 * thread: computes its encodes, and is freed after it. params: those of cb_eval are set here.
 * NULL: see plr_last_error() and the log.
 */
typedef struct plr_projector plr_projector;
plr_projector * plr_projector_new(plr_thread * thread, const char * path,
                                  const struct llama_model * model,
                                  const struct mtmd_context_params * params);
void            plr_projector_free(plr_projector * projector);
/* Until an encode gets no memory: the file is loaded anew then. */
mtmd_context *  plr_projector_ctx(const plr_projector * projector);
/* Bytes of weights and of compute buffers on *device*, NULL: on all; 0: they cannot be told. */
size_t          plr_projector_bytes(const char * path, const struct mtmd_context_params * params,
                                    ggml_backend_dev_t device);

/* Pixels of 3 bytes; NULL for *pixels*: a bitmap of this size without content. */
mtmd_bitmap * plr_bitmap_image(uint32_t n_x, uint32_t n_y, const uint8_t * pixels);
mtmd_bitmap * plr_bitmap_sound(size_t n_samples, const float * samples);
/* The chunks of a bitmap, which may begin and end with text; NULL: it cannot be cut. */
mtmd_input_chunks * plr_bitmap_cut(plr_projector * projector, const mtmd_bitmap * bitmap);
/* Whether rows of *chunk* see those before them only. */
bool plr_chunk_is_causal(plr_projector * projector, const mtmd_input_chunk * chunk);

#define PLR_CANCELLED (-1001)
/*
 * Fill *rows* with the embeddings of *chunk*: n_floats = its tokens x the width of a row.
 * 0; PLR_CANCELLED; PLR_EXCEPTION; or the code of mtmd_encode_chunk(). One encode of a
 * thread runs at a time, others wait for it. Steps of contexts of the thread are computed at
 * the borders of layers.
 */
int plr_projector_encode(plr_projector * projector, plr_encode * encode,
                         const mtmd_input_chunk * chunk, float * rows, size_t n_floats);
/* Whether all *n* values are numbers. */
bool plr_all_finite(const float * values, size_t n);
