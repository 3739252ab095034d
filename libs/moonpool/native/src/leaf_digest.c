/*
 * The leaf digest, compiled once per instruction set: native/build.py defines MP_ISA (baseline, avx2,
 * avx512) and passes the compiler the matching -m flag. xxhash.h selects its vector code from that.
 */
#define XXH_INLINE_ALL
#define XXH_STATIC_LINKING_ONLY
#include "xxhash.h"

#include "moonpool_native.h"

#ifndef MP_ISA
#define MP_ISA baseline
#endif
#define MP_JOIN_(a, b) a##b
#define MP_JOIN(a, b) MP_JOIN_(a, b)

uint64_t MP_JOIN(mp_leaf_digest_, MP_ISA)(const uint8_t *first_plane, int64_t plane_bytes,
                                          int64_t plane_stride, int64_t num_planes);

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
