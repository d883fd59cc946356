/* Memory that a context and its model take, or would take if nothing was allocated. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "ggml-backend.h"
#include "llama.h"

/* Bytes of one type of buffer; device NULL: host memory, whatever reads it. */
typedef struct plr_memory_part {
    ggml_backend_dev_t device;
    size_t             weights;
    size_t             cells;
    size_t             compute;
    bool               is_plain; /* as files are mapped into */
} plr_memory_part;

/*
 * Fill *parts*, at most n_max. Their number, or PLR_EXCEPTION. Right for a model that was loaded
 * with no_alloc, too.
 */
int32_t plr_memory_parts(const struct llama_context * ctx, int32_t n_max, plr_memory_part * parts);

/*
 * Nodes that each graph of ctx has room for, or PLR_EXCEPTION. Reserves the graph of one token
 * a sequence in place of what was reserved, so nothing may be computed afterwards.
 */
int64_t plr_graph_nodes(struct llama_context * ctx);
