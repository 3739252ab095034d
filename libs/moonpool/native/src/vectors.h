/*
 * Vectors as wide as the instruction set that a file is compiled for: linear.c and attention.c are
 * compiled once for each of them, as leaf_digest.c is, with MP_ISA naming the variant.
 *
 * GCC's and Clang's vector extensions, no intrinsics: one source for x86 and ARM. A product that is added
 * to a sum at once is a fused multiply-add where there is one (-ffp-contract=fast in native/build.py).
 */
#ifndef MOONPOOL_VECTORS_H
#define MOONPOOL_VECTORS_H

#include <stdint.h>

#ifndef MP_ISA
#define MP_ISA baseline
#endif
#define MP_JOIN_(a, b) a##b
#define MP_JOIN(a, b) MP_JOIN_(a, b)

#if defined(__AVX512F__)
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

/* The same in memory, at any address. */
typedef floats stored_floats __attribute__((aligned(4), may_alias));
typedef words stored_words __attribute__((aligned(4), may_alias));
typedef halves stored_halves __attribute__((aligned(2), may_alias));

#define MP_INLINE static inline __attribute__((always_inline))
/* Lanes of `v` in another order. */
#if defined(__clang__)
#define MP_SHUFFLE(v, ...) __builtin_shufflevector(v, v, __VA_ARGS__)
#else
#define MP_SHUFFLE(v, ...) __builtin_shuffle(v, (integers){__VA_ARGS__})
#endif

/* Before a loop whose bound is a constant once its function is inlined. */
#define MP_UNROLL _Pragma("GCC unroll 16")

#endif
