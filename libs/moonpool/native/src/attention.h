/*
 * What both kinds of attention over the paged pool do alike: attention.c for one query of a row, by
 * itself, and chunk_attention.c for all of them. Included by both, compiled once per instruction set.
 */
#ifndef MOONPOOL_ATTENTION_H
#define MOONPOOL_ATTENTION_H

#include "moonpool_native.h"
#include "vectors.h"

#include <math.h>

MP_INLINE floats load(const uint8_t *at, int is_bfloat16, int64_t element)
{
    if (is_bfloat16)
        return (floats)(__builtin_convertvector(*(const stored_halves *)(at + 2 * element), words)
                        << 16);
    return *(const stored_floats *)(at + 4 * element);
}

/* Replaces scores by exponentials; returns their sum. The row has room up to whole vectors. */
static inline float soften(float *scores, int64_t length)
{
    const int64_t end = (length + LANES - 1) / LANES * LANES;
    for (int64_t t = length; t < end; t++)
        scores[t] = -INFINITY;
    floats largest = *(const stored_floats *)scores;
    for (int64_t t = LANES; t < end; t += LANES) {
        const floats s = *(const stored_floats *)(scores + t);
        const integers is_larger = s > largest;
        largest = (floats)(((integers)s & is_larger) | ((integers)largest & ~is_larger));
    }
    float top = largest[0];
    for (int lane = 1; lane < LANES; lane++)
        top = largest[lane] > top ? largest[lane] : top;
    floats sum = {0};
    for (int64_t t = 0; t < end; t += LANES) {
        const floats e = exponential(*(const stored_floats *)(scores + t) - top);
        *(stored_floats *)(scores + t) = e;
        sum += e;
    }
    return sum_of_lanes(sum);
}

/* True if every row's tables are whole and inside of the pool. */
static inline int rows_are_valid(const mp_attention *a, int64_t layer, const mp_attention_rows *rows,
                                 mp_result *result)
{
    const mp_geometry *g = &a->geometry;
    *result = (mp_result){MP_OK, 0, 0};
    if (layer < 0 || layer >= g->num_layers) {
        *result = (mp_result){MP_LAYER_OUT_OF_BOUNDS, 0, 0};
        return 0;
    }
    for (int64_t row = 0; row < rows->num_rows; row++) {
        const int64_t begin = rows->indptr[row], end = rows->indptr[row + 1];
        const int64_t length = rows->lengths[row];
        const int64_t num_queries = (int64_t)rows->qo_indptr[row + 1] - rows->qo_indptr[row];
        if (begin < 0 || end < begin || end > rows->num_indices || length < 1 ||
            length > rows->max_length || length > (end - begin) * g->block_size ||
            rows->qo_indptr[row] < 0 || num_queries < 1 || num_queries > length) {
            *result = (mp_result){MP_ROW_OUT_OF_BOUNDS, row, 0};
            return 0;
        }
        for (int64_t i = begin; i < end; i++)
            if (rows->indices[i] < 0 || rows->indices[i] >= g->num_blocks) {
                *result = (mp_result){MP_BLOCK_OUT_OF_BOUNDS, i, 0};
                return 0;
            }
    }
    return 1;
}

#endif
