/* Files become models, contexts, other files; nothing throws. */
#pragma once

#include <stdint.h>

#include "llama.h"

/* Model loading whose progress can be polled and cancelled from another thread. */
typedef struct plr_progress plr_progress;
plr_progress * plr_progress_new(void);
void           plr_progress_free(plr_progress * progress);
float          plr_progress_get(const plr_progress * progress);
void           plr_progress_cancel(plr_progress * progress);
struct llama_model * plr_model_load(const char * path, const struct llama_model_params * params,
                                    plr_progress * progress);

/*
 * GGUF: where *count* strings end that begin at *at* of *data*, each a length of 8 bytes and
 * its bytes; -1 if they do not fit *size*. In Python a vocabulary takes 20 ms.
 */
int64_t plr_skip_strings(const uint8_t * data, int64_t size, int64_t at, uint64_t count);
struct llama_context * plr_context_new(struct llama_model * model,
                                       const struct llama_context_params * params);
/*
 * llama_model_quantize behind a try block: 0, its code, or PLR_EXCEPTION. With nthread 1 all
 * of it runs on this thread, where a failed assertion is an exception.
 */
int plr_quantize(const char * path_in, const char * path_out,
                 const struct llama_model_quantize_params * params);
