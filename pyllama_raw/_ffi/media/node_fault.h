// What kernels of ggml assert of a node, and a projector file can get wrong.
//
// ggml compares shapes while it builds a graph, in the calling thread; but types, indices of
// rows and the numbers of a rotation in each thread that computes, where nothing catches an
// assertion. So they are looked at before the node is computed.
#pragma once

#include <cstdint>

#include "boundary/views.h"
#include "ggml-backend.h"
#include "ggml.h"

inline bool is_float(const ggml_tensor * t) {
    return t->type == GGML_TYPE_F32 || t->type == GGML_TYPE_F16 || t->type == GGML_TYPE_BF16;
}

inline bool is_f32(const ggml_tensor * t) {
    return t->type == GGML_TYPE_F32;
}

// Whether the rows that *node* looks up are there, if their indices are known already.
inline bool has_rows(const ggml_tensor * node) {
    const ggml_tensor * indices = node->src[1];
    if (indices->type != GGML_TYPE_I32 || indices->op != GGML_OP_NONE) {
        return indices->type == GGML_TYPE_I32;
    }
    const auto * index = static_cast<const int32_t *>(indices->data);
    for (int64_t i = 0; i < ggml_nelements(indices); ++i) {
        if (index[i] < 0 || index[i] >= node->src[0]->ne[1]) {
            return false;
        }
    }
    return true;
}

// op_params: the number of dimensions is the second, the mode the third, then eight others.
inline bool can_rotate(const ggml_tensor * node) {
    const int32_t * params  = node->op_params;
    const int32_t   n_dims  = params[1];
    const bool      is_many = params[2] & GGML_ROPE_TYPE_MROPE;
    const int32_t * parts   = params + 11;
    const bool      is_image = params[2] == GGML_ROPE_TYPE_VISION;
    return n_dims % 2 == 0 && n_dims <= node->ne[0] &&
           (!is_many || parts[0] > 0 || parts[1] > 0 || parts[2] > 0) &&
           (!is_image || n_dims == node->ne[0] / 2);
}

// Whether the types, numbers and indices of *node* are such that each kernel takes them.
inline bool can_compute(const ggml_tensor * node) {
    if (is_view(node)) {
        return true;
    }
    const ggml_tensor * first = node->src[0], *second = node->src[1];
    switch (node->op) {
        case GGML_OP_MUL_MAT:
        case GGML_OP_MUL_MAT_ID:
            return is_f32(second) || (second->type == first->type && is_float(first));
        case GGML_OP_GET_ROWS:
            return has_rows(node);
        case GGML_OP_ADD:
        case GGML_OP_SUB:
        case GGML_OP_MUL:
        case GGML_OP_DIV:
            return is_float(first) && (is_f32(second) || second->type == first->type);
        case GGML_OP_CONT:
        case GGML_OP_CPY:
        case GGML_OP_DUP:
            return is_float(first) || first->type == GGML_TYPE_I32 ||
                   (ggml_is_contiguous(first) && node->type != GGML_TYPE_I32);
        case GGML_OP_CONV_2D:
        case GGML_OP_CONV_2D_DW:
        case GGML_OP_IM2COL:
            return (is_f32(first) || first->type == GGML_TYPE_F16) && is_f32(second);
        case GGML_OP_ROPE:
            return is_f32(first) && can_rotate(node);
        case GGML_OP_CONCAT:
        case GGML_OP_FLASH_ATTN_EXT:
        case GGML_OP_REPEAT:
        case GGML_OP_UNARY:
            return is_float(first) || first->type == GGML_TYPE_I32;
        default:
            for (const ggml_tensor * source : node->src) {
                if (source != nullptr && !is_f32(source) && source->type != GGML_TYPE_I32) {
                    return false;
                }
            }
            return true;
    }
}
