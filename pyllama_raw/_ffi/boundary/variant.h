/* Variants of ggml's CPU backend, each a library of its own: see _ffi/__init__.py. */
#pragma once

#include <stdbool.h>

/* The score of the variant in the file *path* on this CPU; 0: it cannot run here; below: no variant. */
int plr_variant_score(const char * path);

/* Register it, so that it computes. False: ggml refuses it; the log says why. */
bool plr_variant_use(const char * path);
