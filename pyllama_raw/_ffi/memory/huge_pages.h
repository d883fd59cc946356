// libllama is compiled with this in front of its C files (build_lib.py): the blocks of ggml
// that are large, of KV cells, weights and graphs, begin at a huge page and ask for such.
// They take a few hundred page faults instead of tens of thousands, and fewer walks of the
// page table in every step.
#pragma once

#if defined(__linux__) && !defined(__cplusplus)
#    include <stdlib.h>
#    include <sys/mman.h>

static inline int plr_aligned_block(void ** block, size_t alignment, size_t size) {
    const size_t huge = (size_t) 2 << 20;
    if (size < 2 * huge) {
        return posix_memalign(block, alignment, size);
    }
    const int code = posix_memalign(block, huge, size);
    if (code == 0) {
        madvise(*block, size & ~(huge - 1), MADV_HUGEPAGE);  // a wish: it may go unheard
    }
    return code;
}

#    define posix_memalign plr_aligned_block
#endif
