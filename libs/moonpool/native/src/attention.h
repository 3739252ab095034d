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
        return widened_halves(at + 2 * element);
    return *(const stored_floats *)(at + 4 * element);
}

typedef float four __attribute__((vector_size(16)));
typedef four stored_four __attribute__((aligned(4), may_alias));

#if MP_VECTOR_BYTES >= 32

typedef float eight __attribute__((vector_size(32)));
typedef int32_t eight_places __attribute__((vector_size(32)));
typedef int32_t four_places __attribute__((vector_size(16)));

#if defined(__clang__)
#define MP_PICK_EIGHT(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define MP_PICK_FOUR(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MP_PICK_EIGHT(a, b, ...) __builtin_shuffle(a, b, (eight_places){__VA_ARGS__})
#define MP_PICK_FOUR(a, b, ...) __builtin_shuffle(a, b, (four_places){__VA_ARGS__})
#endif

MP_INLINE eight in_eight(floats v)
{
#if MP_VECTOR_BYTES == 64
    const union { floats whole; eight halves[2]; } parts = {v};
    return parts.halves[0] + parts.halves[1];
#else
    return v;
#endif
}

/* The sums of the lanes of each of four, in the order of sum_of_lanes. */
MP_INLINE four sums_of_lanes(const floats v[4])
{
    eight in_four[2]; /* four lanes of each of two */
    MP_UNROLL
    for (int i = 0; i < 2; i++) {
        const eight a = in_eight(v[2 * i]), b = in_eight(v[2 * i + 1]);
        in_four[i] = MP_PICK_EIGHT(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
                     MP_PICK_EIGHT(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    }
    const eight a = in_four[0], b = in_four[1];
    const union { eight whole; four halves[2]; } in_two = {
        MP_PICK_EIGHT(a, b, 0, 1, 8, 9, 4, 5, 12, 13) +
        MP_PICK_EIGHT(a, b, 2, 3, 10, 11, 6, 7, 14, 15)};
    const four even = in_two.halves[0], odd = in_two.halves[1];
    return MP_PICK_FOUR(even, odd, 0, 4, 2, 6) + MP_PICK_FOUR(even, odd, 1, 5, 3, 7);
}

#else

MP_INLINE four sums_of_lanes(const floats v[4])
{
    return (four){sum_of_lanes(v[0]), sum_of_lanes(v[1]), sum_of_lanes(v[2]), sum_of_lanes(v[3])};
}

#endif

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
