#include "variant.h"

#include <dlfcn.h>

#include "exceptions.h"
#include "ggml-backend.h"

// It is closed again, so that only the one that computes stays.
int plr_variant_score(const char * path) {
    void * file = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
    if (file == nullptr) {
        remember(dlerror());
        return -1;
    }
    using Score = int (*)();
    const auto score = reinterpret_cast<Score>(dlsym(file, "ggml_backend_score"));
    const int value = score != nullptr ? score() : -1;
    dlclose(file);
    return value;
}

bool plr_variant_use(const char * path) {
    return guarded<bool>(false, [&] { return ggml_backend_load(path) != nullptr; });
}
