/* Chooses the leaf digest for the machine that the library was loaded on. */
#include "moonpool_native.h"

uint64_t mp_leaf_digest_baseline(const uint8_t *, int64_t, int64_t, int64_t);
#ifdef MP_HAVE_AVX2
uint64_t mp_leaf_digest_avx2(const uint8_t *, int64_t, int64_t, int64_t);
#endif
#ifdef MP_HAVE_AVX512
uint64_t mp_leaf_digest_avx512(const uint8_t *, int64_t, int64_t, int64_t);
#endif

mp_leaf_digest_fn mp_leaf_digest = mp_leaf_digest_baseline;
static const char *chosen_isa = "baseline";

__attribute__((constructor)) static void choose(void)
{
#if defined(MP_HAVE_AVX2) || defined(MP_HAVE_AVX512)
    __builtin_cpu_init();
#endif
#ifdef MP_HAVE_AVX2
    if (__builtin_cpu_supports("avx2")) {
        mp_leaf_digest = mp_leaf_digest_avx2;
        chosen_isa = "avx2";
    }
#endif
#ifdef MP_HAVE_AVX512
    if (__builtin_cpu_supports("avx512f")) {
        mp_leaf_digest = mp_leaf_digest_avx512;
        chosen_isa = "avx512";
    }
#endif
}

MP_EXPORT int64_t mp_abi_version(void) { return MP_ABI_VERSION; }

MP_EXPORT const char *mp_isa(void) { return chosen_isa; }

/* XXH3-64 of one run of bytes. */
MP_EXPORT uint64_t mp_digest(const uint8_t *bytes, int64_t num_bytes)
{
    return mp_leaf_digest(bytes, num_bytes, num_bytes, 1);
}
