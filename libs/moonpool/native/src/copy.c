/*
 * Copies of pieces of KV, compiled once per instruction set (vectors.h).
 *
 * Why not memcpy: glibc copies pieces of this size by `rep movsb`, which on AMD processors (Zen 3) takes up to
 * five times as long when the target lies a few bytes behind the source within a page; where a message
 * lies is up to malloc.
 */
#include "moonpool_native.h"
#include "vectors.h"

#include <string.h>

enum { STEP_BYTES = 4 * MP_VECTOR_BYTES };

MP_EXPORT void MP_JOIN(mp_copy_, MP_ISA)(uint8_t *, const uint8_t *, int64_t);

void MP_JOIN(mp_copy_, MP_ISA)(uint8_t *to, const uint8_t *from, int64_t num_bytes)
{
    int64_t at = 0;
    for (; at + STEP_BYTES <= num_bytes; at += STEP_BYTES) {
        words part[4];
        MP_UNROLL
        for (int i = 0; i < 4; i++)
            part[i] = *(const stored_words *)(from + at + i * MP_VECTOR_BYTES);
        MP_UNROLL
        for (int i = 0; i < 4; i++)
            *(stored_words *)(to + at + i * MP_VECTOR_BYTES) = part[i];
        /* Or the compiler sees what this loop does, and calls memcpy. */
        __asm__ volatile("" : : : "memory");
    }
    memcpy(to + at, from + at, (size_t)(num_bytes - at));
}
