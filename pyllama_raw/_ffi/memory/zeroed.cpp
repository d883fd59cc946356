// The cells of a new context are zero without being written.
//
// libllama fills them with zeros, and so touches all of its KV memory before any of it is
// used. Here those pages are given back to the system, which hands out zeroed ones when
// they are touched; small ones, since the first tokens would bring in most of the huge ones.
// So a context is made in a third of the time, and holds only what is used.
//
// An extension is searched for symbols before the libraries it was linked with, so the
// calls of libllama arrive here. Where that is not so (macOS) libllama does as ever.
#if defined(__linux__)
#    include "ggml-backend.h"

#    include <dlfcn.h>
#    include <sys/mman.h>
#    include <unistd.h>

#    include <cstdint>
#    include <cstring>

// Only of memory that ggml took from malloc: a system gives other kinds back otherwise.
inline bool zero_by_giving_back(ggml_backend_buffer_t buffer) {
    if (ggml_backend_buffer_get_type(buffer) != ggml_backend_cpu_buffer_type()) {
        return false;
    }
    const auto page  = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto begin = reinterpret_cast<uintptr_t>(ggml_backend_buffer_get_base(buffer));
    const auto end   = begin + ggml_backend_buffer_get_size(buffer);
    const auto first = (begin + page - 1) & ~(page - 1);  // of the whole pages
    const auto last  = end & ~(page - 1);
    if (first >= last) {
        return false;
    }
    auto * pages = reinterpret_cast<void *>(first);
    if (madvise(pages, last - first, MADV_DONTNEED) != 0) {
        return false;
    }
    madvise(pages, last - first, MADV_NOHUGEPAGE);
    std::memset(reinterpret_cast<void *>(begin), 0, first - begin);
    std::memset(reinterpret_cast<void *>(last), 0, end - last);
    return true;
}

extern "C" void ggml_backend_buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    using Clear = void (*)(ggml_backend_buffer_t, uint8_t);
    static const auto of_ggml =
        reinterpret_cast<Clear>(dlsym(RTLD_NEXT, "ggml_backend_buffer_clear"));
    if (value != 0 || !zero_by_giving_back(buffer)) {
        of_ggml(buffer, value);
    }
}
#endif
