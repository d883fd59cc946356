// The kernels that we have: what each computes, and which CPUs it needs.
#pragma once

#include "ggml-backend.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include "attention.h"
#include "column_product.h"
#include "elementwise.h"
#include "float_product.h"
#include "short_tile.h"
#include "text_attention.h"
#include "woven_product.h"

namespace kernels {

constexpr const char * kAvx512 = "AVX-512 F, BW, DQ, VL and VNNI";
constexpr const char * kAvx2   = "AVX2, FMA and F16C";
constexpr const char * kNoMore = "AVX2, FMA and F16C at most";

enum Index {
    ATTENTION_AVX512, ATTENTION_AVX2, COLUMNS, F32, F16, GELU, NORM, HALVES,
    WOVEN, N_ROWS = WOVEN + WovenProduct::kKinds  // in the order of its kinds
};

struct Row {
    const char * computes;
    const char * needs;
    bool (*is_usable)();
};

constexpr Row kTable[WOVEN] = {  // of one kind the first usable row computes
    {"attention", kAvx512, has_avx512},
    {"attention", kAvx2, has_avx2},
    {"columns", "x86-64", ColumnProduct::is_usable},  // only if deterministic
    {"f32", kNoMore, multiplies_floats},  // these five only where vectors are made of texts
    {"f16", kNoMore, multiplies_floats},
    {"gelu", kAvx2, has_avx2},
    {"norm", kAvx2, has_avx2},
    {"halves", kAvx2, has_avx2},
};

// Those of woven weights follow, which need what the level needs that is chosen.
inline Row row(int index) {
    if (index < WOVEN) {
        return kTable[index];
    }
    const woven::Level * level = woven::level();
    return {ggml_type_name(woven::kKinds[index - WOVEN].type),
            level != nullptr ? level->needs : "AVX2", WovenProduct::is_usable};
}

// No other device knows a custom operation.
inline bool has_only_cpus() {
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        if (ggml_backend_dev_type(ggml_backend_dev_get(i)) != GGML_BACKEND_DEVICE_TYPE_CPU) {
            return false;
        }
    }
    return true;
}

inline bool is_usable(int index) {
    static const bool only_cpus = has_only_cpus();
    return only_cpus && row(index).is_usable();
}

inline Index attention_row() {
    return Attention::unit() == &attention::avx512::kUnit ? ATTENTION_AVX512 : ATTENTION_AVX2;
}

}  // namespace kernels

#endif
