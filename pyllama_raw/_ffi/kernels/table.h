// The kernels that we have: what each computes, and which CPUs it needs.
#pragma once

#include "ggml-backend.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include "attention.h"
#include "column_product.h"
#include "float_product.h"
#include "gelu.h"
#include "halves.h"
#include "norm.h"
#include "product.h"
#include "short_tile.h"
#include "text_attention.h"
#include "woven_product.h"

namespace kernels {

constexpr const char * kAvx512 = "AVX-512 F, BW, DQ, VL and VNNI";
constexpr const char * kAvx2   = "AVX2, FMA and F16C";

enum Index {
    ATTENTION_AVX512, ATTENTION_AVX2, Q4_1, Q8_0, COLUMNS, F32, F16, GELU, NORM, HALVES,
    WOVEN, N_ROWS = WOVEN + WovenProduct::kKinds  // in the order of its kinds
};

struct Row {
    const char * computes;
    const char * needs;  // nullptr: see needs()
    bool (*is_usable)();
};

constexpr Row kTable[N_ROWS] = {  // of one kind the first usable row computes
    {"attention", kAvx512, has_avx512},
    {"attention", kAvx2, has_avx2},
    {"q4_1", kAvx512, Product<product::Q4_1>::is_usable},
    {"q8_0", kAvx512, Product<product::Q8_0>::is_usable},
    {"columns", "x86-64", ColumnProduct::is_usable},  // only if deterministic
    {"f32", kAvx2, multiplies_floats},  // these five only where vectors are made of texts
    {"f16", kAvx2, multiplies_floats},
    {"gelu", kAvx2, has_avx2},
    {"norm", kAvx2, has_avx2},
    {"halves", kAvx2, has_avx2},
    // Of woven weights; they need what the level needs that is chosen.
    {"q4_0", nullptr, WovenProduct::is_usable},
    {"q4_1", nullptr, WovenProduct::is_usable},
    {"q5_0", nullptr, WovenProduct::is_usable},
    {"q5_1", nullptr, WovenProduct::is_usable},
    {"q8_0", nullptr, WovenProduct::is_usable},
    {"q4_k", nullptr, WovenProduct::is_usable},
    {"q5_k", nullptr, WovenProduct::is_usable},
    {"q6_k", nullptr, WovenProduct::is_usable},
    {"q2_k", nullptr, WovenProduct::is_usable},
    {"q3_k", nullptr, WovenProduct::is_usable},
    {"iq4_nl", nullptr, WovenProduct::is_usable},
    {"iq4_xs", nullptr, WovenProduct::is_usable},
    {"mxfp4", nullptr, WovenProduct::is_usable},
};

// No other device knows a custom operation.
inline bool has_only_cpus() {
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        if (ggml_backend_dev_type(ggml_backend_dev_get(i)) != GGML_BACKEND_DEVICE_TYPE_CPU) {
            return false;
        }
    }
    return true;
}

inline bool is_usable(int row) {
    static const bool only_cpus = has_only_cpus();
    const bool gives_way = (row == Q4_1 || row == Q8_0) && WovenProduct::is_usable();
    return only_cpus && !gives_way && kTable[row].is_usable();
}

inline const char * needs(int row) {
    if (kTable[row].needs != nullptr) {
        return kTable[row].needs;
    }
    const woven::Level * level = woven::level();
    return level != nullptr ? level->needs : "AVX2, without AVX-512 VNNI";
}

inline Index attention_row() {
    return Attention::unit() == &attention::avx512::kUnit ? ATTENTION_AVX512 : ATTENTION_AVX2;
}

}  // namespace kernels

#endif
