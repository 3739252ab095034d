/*
 * Vectors as wide as the instruction set that a file is compiled for: linear.c and attention.c are
 * compiled once for each of them, as leaf_digest.c is, with MP_ISA naming the variant.
 *
 * GCC's and Clang's vector extensions, and intrinsics only where GCC does not see the instruction: one source
 * for x86 and ARM. A product that is added to a sum at once is a fused multiply-add where there is one
 * (-ffp-contract=fast in native/build.py).
 */
#ifndef MOONPOOL_VECTORS_H
#define MOONPOOL_VECTORS_H

#include <stdint.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#ifndef MP_ISA
#define MP_ISA baseline
#endif
#define MP_JOIN_(a, b) a##b
#define MP_JOIN(a, b) MP_JOIN_(a, b)

/* Wider vectors than the machine's are taken apart by the compiler: so a variant is tried elsewhere. */
#if defined(MP_VECTOR_BYTES)
#elif defined(__AVX512F__)
#define MP_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define MP_VECTOR_BYTES 32
#else
#define MP_VECTOR_BYTES 16
#endif

enum { LANES = MP_VECTOR_BYTES / 4 };

typedef float floats __attribute__((vector_size(MP_VECTOR_BYTES)));
typedef uint32_t words __attribute__((vector_size(MP_VECTOR_BYTES)));
typedef int32_t integers __attribute__((vector_size(MP_VECTOR_BYTES)));
typedef uint16_t halves __attribute__((vector_size(MP_VECTOR_BYTES / 2)));
typedef int8_t bytes __attribute__((vector_size(MP_VECTOR_BYTES / 4)));

/* The same in memory, at any address. */
typedef floats stored_floats __attribute__((aligned(4), may_alias));
typedef words stored_words __attribute__((aligned(1), may_alias));
typedef halves stored_halves __attribute__((aligned(2), may_alias));
typedef bytes stored_bytes __attribute__((aligned(1), may_alias));

#define MP_INLINE static inline __attribute__((always_inline))

/* Signed bytes as integers. GCC does it lane by lane unless it is told the instruction. */
MP_INLINE integers widened(const uint8_t *at)
{
#if MP_VECTOR_BYTES == 64 && defined(__AVX512F__)
    return (integers)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)at));
#elif MP_VECTOR_BYTES == 32 && defined(__AVX2__)
    return (integers)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)at));
#else
    return __builtin_convertvector(*(const stored_bytes *)at, integers);
#endif
}

/* bfloat16 as floats, whose upper halves they are. */
MP_INLINE floats widened_halves(const uint8_t *at)
{
#if MP_VECTOR_BYTES == 64 && defined(__AVX512F__)
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)at));
    return (floats)_mm512_slli_epi32(wide, 16);
#elif MP_VECTOR_BYTES == 32 && defined(__AVX2__)
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)at));
    return (floats)_mm256_slli_epi32(wide, 16);
#else
    return (floats)(__builtin_convertvector(*(const stored_halves *)at, words) << 16);
#endif
}

/* Lanes of `v` in another order. */
#if defined(__clang__)
#define MP_SHUFFLE(v, ...) __builtin_shufflevector(v, v, __VA_ARGS__)
#else
#define MP_SHUFFLE(v, ...) __builtin_shuffle(v, (integers){__VA_ARGS__})
#endif

/* Before a loop whose bound is a constant once its function is inlined. */
#define MP_UNROLL _Pragma("GCC unroll 16")

MP_INLINE float sum_of_lanes(floats v)
{
#if MP_VECTOR_BYTES == 64
    v += MP_SHUFFLE(v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    v += MP_SHUFFLE(v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    v += MP_SHUFFLE(v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
#elif MP_VECTOR_BYTES == 32
    v += MP_SHUFFLE(v, 4, 5, 6, 7, 0, 1, 2, 3);
    v += MP_SHUFFLE(v, 2, 3, 0, 1, 6, 7, 4, 5);
#else
    v += MP_SHUFFLE(v, 2, 3, 0, 1);
#endif
    return v[0] + v[1];
}

/* Lane by lane; of a NaN and a number either. */
MP_INLINE floats larger(floats a, floats b)
{
#if MP_VECTOR_BYTES == 64 && defined(__AVX512F__)
    return (floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif MP_VECTOR_BYTES == 32 && defined(__AVX2__)
    return (floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
    const integers is_larger = a > b;
    return (floats)(((integers)a & is_larger) | ((integers)b & ~is_larger));
#endif
}

MP_INLINE float largest_of_lanes(floats v)
{
#if MP_VECTOR_BYTES == 64
    v = larger(v, MP_SHUFFLE(v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    v = larger(v, MP_SHUFFLE(v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    v = larger(v, MP_SHUFFLE(v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
#elif MP_VECTOR_BYTES == 32
    v = larger(v, MP_SHUFFLE(v, 4, 5, 6, 7, 0, 1, 2, 3));
    v = larger(v, MP_SHUFFLE(v, 2, 3, 0, 1, 6, 7, 4, 5));
#else
    v = larger(v, MP_SHUFFLE(v, 2, 3, 0, 1));
#endif
    return v[0] > v[1] ? v[0] : v[1];
}

/* exp(x) for x <= 0 within 2 units in the last place (Cephes, expf); 0 below the smallest normal. */
MP_INLINE floats exponential(floats x)
{
    const floats round = (floats){0} + 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    const floats n = (x * 1.44269504088896341f + round) - round;
    const floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    floats p = (floats){0} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const integers exponent = __builtin_convertvector(n, integers) + 127;
    const integers is_normal = (x > -87.0f) | (x != x);
    return (floats)((integers)(p * (floats)(exponent << 23)) & is_normal);
}

#endif
