/* Chooses each kernel's variant for the machine that the library was loaded on. */
#include "moonpool_native.h"

#define DECLARE(isa)                                                                        \
    uint64_t mp_leaf_digest_##isa(const uint8_t *, int64_t, int64_t, int64_t);              \
    uint64_t mp_copy_leaf_##isa(uint8_t *, const uint8_t *, int64_t);                       \
    void mp_copy_##isa(uint8_t *, const uint8_t *, int64_t);                                \
    void mp_multiply_##isa(const mp_linear *, const float *, int64_t, float *, float *);    \
    void mp_attend_##isa(const mp_attention *, int64_t, const mp_attention_rows *,          \
                         const float *, int64_t, float *, mp_result *);                     \
    void mp_attend_chunks_##isa(const mp_attention *, int64_t, const mp_attention_rows *,   \
                                const float *, int64_t, float *, mp_result *);              \
    void mp_rms_norm_##isa(const float *, const float *, float, int64_t, int64_t, float *); \
    void mp_silu_mul_##isa(const float *, int64_t, int64_t, float *);                       \
    void mp_sample_##isa(const float *, const float *, int64_t, int64_t, const mp_draw *,   \
                         uint64_t *, int64_t *);

#define CHOOSE(isa)                              \
    do {                                         \
        mp_leaf_digest = mp_leaf_digest_##isa;   \
        mp_copy_leaf = mp_copy_leaf_##isa;       \
        mp_copy = mp_copy_##isa;                 \
        multiply = mp_multiply_##isa;            \
        attend = mp_attend_##isa;                \
        attend_chunks = mp_attend_chunks_##isa;  \
        rms_norm = mp_rms_norm_##isa;            \
        silu_mul = mp_silu_mul_##isa;            \
        sample = mp_sample_##isa;                \
        chosen_isa = #isa;                       \
    } while (0)

DECLARE(baseline)
#ifdef MP_HAVE_AVX2
DECLARE(avx2)
#endif
#ifdef MP_HAVE_AVX512
DECLARE(avx512)
#endif
#ifdef MP_HAVE_AVX512_BF16
DECLARE(avx512_bf16)
void mp_multiply_bfloat16_avx512_bf16(const mp_linear *, const float *, int64_t, float *, float *);
#endif

mp_leaf_digest_fn mp_leaf_digest = mp_leaf_digest_baseline;
mp_copy_leaf_fn mp_copy_leaf = mp_copy_leaf_baseline;
mp_copy_fn mp_copy = mp_copy_baseline;
static mp_multiply_fn multiply = mp_multiply_baseline;
static mp_multiply_fn multiply_bfloat16;
static mp_attend_fn attend = mp_attend_baseline;
static mp_attend_fn attend_chunks = mp_attend_chunks_baseline;
static mp_rms_norm_fn rms_norm = mp_rms_norm_baseline;
static mp_silu_mul_fn silu_mul = mp_silu_mul_baseline;
static mp_sample_fn sample = mp_sample_baseline;
static const char *chosen_isa = "baseline";

__attribute__((constructor)) static void choose(void)
{
#if defined(MP_HAVE_AVX2) || defined(MP_HAVE_AVX512) || defined(MP_HAVE_AVX512_BF16)
    __builtin_cpu_init();
#endif
#ifdef MP_HAVE_AVX2
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        CHOOSE(avx2);
#endif
#ifdef MP_HAVE_AVX512
    if (__builtin_cpu_supports("avx512f"))
        CHOOSE(avx512);
#endif
#ifdef MP_HAVE_AVX512_BF16
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bf16")) {
        CHOOSE(avx512_bf16);
        multiply_bfloat16 = mp_multiply_bfloat16_avx512_bf16;
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

MP_EXPORT void mp_multiply(const mp_linear *linear, const float *x, int64_t num_rows, float *y,
                           float *largest)
{
    multiply(linear, x, num_rows, y, largest);
}

MP_EXPORT int64_t mp_has_bfloat16_products(void) { return multiply_bfloat16 != NULL; }

/* Only where there are such products. */
MP_EXPORT void mp_multiply_bfloat16(const mp_linear *linear, const float *x, int64_t num_rows,
                                    float *y, float *largest)
{
    multiply_bfloat16(linear, x, num_rows, y, largest);
}

MP_EXPORT void mp_attend(const mp_attention *attention, int64_t layer,
                         const mp_attention_rows *rows, const float *query, int64_t query_stride,
                         float *out, mp_result *result)
{
    attend(attention, layer, rows, query, query_stride, out, result);
}

MP_EXPORT void mp_attend_chunks(const mp_attention *attention, int64_t layer,
                                const mp_attention_rows *rows, const float *query,
                                int64_t query_stride, float *out, mp_result *result)
{
    attend_chunks(attention, layer, rows, query, query_stride, out, result);
}

MP_EXPORT int64_t mp_attend_work(const mp_attention *attention, int64_t max_length)
{
    (void)attention;
    return MP_ATTEND_QUERIES * max_length;
}

MP_EXPORT int64_t mp_attend_chunks_work(const mp_attention *attention, int64_t max_length)
{
    return mp_chunks_work(attention, max_length);
}

MP_EXPORT void mp_rms_norm(const float *x, const float *weight, float eps, int64_t num_rows,
                           int64_t size, float *y)
{
    rms_norm(x, weight, eps, num_rows, size, y);
}

MP_EXPORT void mp_silu_mul(const float *x, int64_t num_rows, int64_t size, float *y)
{
    silu_mul(x, num_rows, size, y);
}

MP_EXPORT void mp_sample(const float *logits, const float *largest, int64_t num_rows, int64_t size,
                         const mp_draw *draws, uint64_t *work, int64_t *tokens)
{
    sample(logits, largest, num_rows, size, draws, work, tokens);
}
