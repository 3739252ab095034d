/*
 * The leaf digest, alone and of a leaf that is copied, compiled once per instruction set: native/build.py defines
 * MP_ISA (baseline, avx2, ...) and passes the compiler the matching -m flag. xxhash.h selects its vector
 * code from that.
 */
#define XXH_INLINE_ALL
#define XXH_STATIC_LINKING_ONLY
#include "xxhash.h"

#include "moonpool_native.h"

#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#ifndef MP_ISA
#define MP_ISA baseline
#endif
#define MP_JOIN_(a, b) a##b
#define MP_JOIN(a, b) MP_JOIN_(a, b)

uint64_t MP_JOIN(mp_leaf_digest_, MP_ISA)(const uint8_t *first_plane, int64_t plane_bytes,
                                          int64_t plane_stride, int64_t num_planes);
uint64_t MP_JOIN(mp_copy_leaf_, MP_ISA)(uint8_t *, const uint8_t *, int64_t);

uint64_t MP_JOIN(mp_leaf_digest_, MP_ISA)(const uint8_t *first_plane, int64_t plane_bytes,
                                          int64_t plane_stride, int64_t num_planes)
{
    if (num_planes == 1 || plane_stride == plane_bytes)
        return XXH3_64bits(first_plane, (size_t)(plane_bytes * num_planes));
    XXH3_state_t state;
    XXH3_64bits_reset(&state);
    for (int64_t plane = 0; plane < num_planes; plane++)
        XXH3_64bits_update(&state, first_plane + plane * plane_stride, (size_t)plane_bytes);
    return XXH3_64bits_digest(&state);
}

#if defined(__AVX2__)
enum { PIECE_BYTES = 4096, STEP_BYTES = 128 };

/* To two places, the first of them past the cache. `out` and `piece` are aligned to 32. */
static inline void copy_piece(uint8_t *out, uint8_t *piece, const uint8_t *from, int64_t num_bytes)
{
    int64_t at = 0;
    for (; at + STEP_BYTES <= num_bytes; at += STEP_BYTES) {
        __m256i part[4];
        for (int i = 0; i < 4; i++)
            part[i] = _mm256_loadu_si256((const __m256i *)(from + at) + i);
        for (int i = 0; i < 4; i++)
            _mm256_stream_si256((__m256i *)(out + at) + i, part[i]);
        for (int i = 0; i < 4; i++)
            _mm256_store_si256((__m256i *)(piece + at) + i, part[i]);
    }
    memcpy(piece + at, from + at, (size_t)(num_bytes - at));
    memcpy(out + at, piece + at, (size_t)(num_bytes - at));
}
#endif

/*
 * Copy a leaf that is one run, and return the digest of what was written. Where it can, past the cache, and
 * each byte is loaded once: a piece lies in the first cache while it is digested, and its target is not read
 * before it is overwritten. What must see the copy waits for mp_copied_out.
 */
uint64_t MP_JOIN(mp_copy_leaf_, MP_ISA)(uint8_t *to, const uint8_t *from, int64_t num_bytes)
{
#if defined(__AVX2__)
    if ((uintptr_t)to % 32 == 0) {
        _Alignas(32) uint8_t piece[PIECE_BYTES];
        XXH3_state_t state;
        XXH3_64bits_reset(&state);
        for (int64_t at = 0; at < num_bytes; at += PIECE_BYTES) {
            const int64_t left = num_bytes - at, size = left < PIECE_BYTES ? left : PIECE_BYTES;
            copy_piece(to + at, piece, from + at, size);
            XXH3_64bits_update(&state, piece, (size_t)size);
        }
        return XXH3_64bits_digest(&state);
    }
#endif
    mp_copy(to, from, num_bytes);
    return XXH3_64bits(to, (size_t)num_bytes);
}
