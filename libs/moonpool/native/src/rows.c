/*
 * What stands between the products of a layer, row by row: each a pass over its rows that leaves nothing
 * in between. Compiled once per instruction set (vectors.h). A row's result does not depend on the others.
 *
 * Rows are float32, contiguous, of any size: what whole vectors leave over is padded in a register.
 */
#include "moonpool_native.h"
#include "vectors.h"

#include <math.h>
#include <string.h>

MP_INLINE floats load_some(const float *at, int64_t count)
{
    floats v = {0};
    if (count >= LANES)
        return *(const stored_floats *)at;
    memcpy(&v, at, (size_t)count * sizeof(float));
    return v;
}

MP_INLINE void store_some(float *at, floats v, int64_t count)
{
    memcpy(at, &v, (size_t)(count < LANES ? count : LANES) * sizeof(float));
}

MP_EXPORT void MP_JOIN(mp_rms_norm_, MP_ISA)(const float *, const float *, float, int64_t, int64_t,
                                             float *);

/* y = x / sqrt(mean(x^2) + eps) * weight */
void MP_JOIN(mp_rms_norm_, MP_ISA)(const float *x, const float *weight, float eps,
                                   int64_t num_rows, int64_t size, float *y)
{
    for (int64_t row = 0; row < num_rows; row++, x += size, y += size) {
        floats sum[2] = {{0}, {0}};
        for (int64_t i = 0; i < size; i += 2 * LANES) {
            const floats one = load_some(x + i, size - i);
            sum[0] += one * one;
            if (i + LANES < size) {
                const floats other = load_some(x + i + LANES, size - i - LANES);
                sum[1] += other * other;
            }
        }
        const float mean = sum_of_lanes(sum[0] + sum[1]) / (float)size;
        const float scale = 1.0f / sqrtf(mean + eps);
        for (int64_t i = 0; i < size; i += LANES)
            store_some(y + i, load_some(x + i, size - i) * scale * load_some(weight + i, size - i),
                       size - i);
    }
}

MP_EXPORT void MP_JOIN(mp_silu_mul_, MP_ISA)(const float *, int64_t, int64_t, float *);

/* y[row] = silu(x[row, :size]) * x[row, size:], silu(g) = g / (1 + exp(-g)) */
void MP_JOIN(mp_silu_mul_, MP_ISA)(const float *x, int64_t num_rows, int64_t size, float *y)
{
    for (int64_t row = 0; row < num_rows; row++, x += 2 * size, y += size) {
        for (int64_t i = 0; i < size; i += LANES) {
            const floats gate = load_some(x + i, size - i);
            const integers is_positive = gate > 0.0f;
            /* exp(-|gate|) does not overflow. */
            const floats e = exponential((floats)((integers)gate | (int32_t)0x80000000u));
            const floats above =
                (floats)((is_positive & (integers)((floats){0} + 1.0f)) | (~is_positive & (integers)e));
            store_some(y + i, gate * (above / (e + 1.0f)) * load_some(x + size + i, size - i),
                       size - i);
        }
    }
}
