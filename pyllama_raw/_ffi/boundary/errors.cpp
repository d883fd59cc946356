#include "errors.h"

#include <cstdio>
#include <stdexcept>

#include "ggml.h"
#include "exceptions.h"

const char * plr_last_error(void) {
    return last_error;
}

static void on_ggml_abort(const char * message) {
    // Unwinding crosses C frames of ggml: they hold nothing that needs a destructor.
    if (n_guards > 0) {
        throw std::runtime_error(message);
    }
    std::fprintf(stderr, "%s\n", message);
}

void plr_abort_install(void) {
    ggml_set_abort_callback(on_ggml_abort);
}
