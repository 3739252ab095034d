/*
 * Copies of pieces of KV, compiled once per instruction set (vectors.h).
 *
 * Why not memcpy: glibc copies pieces of this size by `rep movsb`, which on AMD processors (Zen 3) takes up to
 * five times as long when the target lies a few bytes behind the source within a page; where a message
 * lies is up to malloc. And a piece that goes to a pool is not read again soon: written past the cache, it
 * neither reads its old lines first nor pushes others out.
 */
#include "moonpool_native.h"
#include "vectors.h"

#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

enum { STEP_BYTES = 4 * MP_VECTOR_BYTES };

MP_EXPORT void MP_JOIN(mp_copy_, MP_ISA)(uint8_t *, const uint8_t *, int64_t);
MP_EXPORT void MP_JOIN(mp_copy_out_, MP_ISA)(uint8_t *, const uint8_t *, int64_t);

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

/* The same past the cache; what must see it waits for mp_copied_out. */
void MP_JOIN(mp_copy_out_, MP_ISA)(uint8_t *to, const uint8_t *from, int64_t num_bytes)
{
#if defined(__AVX2__)
    int64_t at = -(int64_t)((uintptr_t)to % 32) & 31;
    at = at < num_bytes ? at : num_bytes;
    memcpy(to, from, (size_t)at);
    for (; at + 64 <= num_bytes; at += 64) {
        const __m256i first = _mm256_loadu_si256((const __m256i *)(from + at));
        const __m256i second = _mm256_loadu_si256((const __m256i *)(from + at + 32));
        _mm256_stream_si256((__m256i *)(to + at), first);
        _mm256_stream_si256((__m256i *)(to + at + 32), second);
    }
    memcpy(to + at, from + at, (size_t)(num_bytes - at));
#else
    MP_JOIN(mp_copy_, MP_ISA)(to, from, num_bytes);
#endif
}
