/*
 * Log lines of llama, ggml and mtmd go into one ring of fixed size; the oldest are dropped.
 * Debug lines are not kept: some are written for every token.
 * plr_log_drain copies as many whole records as fit: one byte ggml_log_level, then the text,
 * then a NUL. Returns the bytes written.
 */
#pragma once

#include <stddef.h>

void   plr_log_install(void);
size_t plr_log_drain(char * buf, size_t size);
/* Buffers that this thread got no memory for: not every caller of ggml looks whether it did. */
int    plr_log_n_unallocated(void);
