/* Adapters: what changes the products of a model, or adds to what its layers give. */
#pragma once

#include <stdint.h>

#include "llama.h"

/*
 * llama_adapter_lora_init and _free. Both change the list of adapters of the model, which
 * libllama reads while it makes a context and while it decodes: they wait for these, and
 * these for them.
 */
struct llama_adapter_lora * plr_adapter_load(struct llama_model * model, const char * path);
void plr_adapter_free(struct llama_adapter_lora * adapter);

/*
 * From the next decode on compute with *adapters*, each at its scale, and with *directions*:
 * (n_layer - 1) times n_embd floats that are added to the output of layers 1, 2 and so on; NULL:
 * none. Not while a step is begun ahead.
 */
int plr_set_adapters(struct llama_context * ctx, int32_t n_adapters,
                     struct llama_adapter_lora ** adapters, float * scales,
                     const float * directions, int32_t n_layer, int32_t n_embd);
