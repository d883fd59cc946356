/*
 * What plain llama.h cannot give Python safely or cheaply. Three reasons only: C++ exceptions
 * must not cross C; one call a step; callbacks that never enter Python.
 *
 * Every int result is a libllama code, or PLR_EXCEPTION with plr_last_error() set.
 */
#pragma once

#define PLR_EXCEPTION (-1000)

/* Message of the last failure on this thread; valid until the next one. */
const char * plr_last_error(void);

/*
 * Make a failed GGML_ASSERT inside a plr_ function throw on its thread, so that it comes
 * back as PLR_EXCEPTION instead of ending the process. A net under the checks of native/,
 * not a replacement: what it hit (a context, never a model) must be thrown away.
 */
void plr_abort_install(void);
