/* The bytes of spans of a pool, one after another, in messages of any size: what scatter.c takes apart. */
#include "moonpool_native.h"

/*
 * How many bytes the spans have, at least one each. If one is not inside of the pool, result tells which.
 */
MP_EXPORT int64_t mp_gathering_bytes(const int64_t *spans, int64_t num_spans, int64_t pool_bytes,
                                     mp_result *result)
{
    int64_t total = 0;
    *result = (mp_result){MP_OK, 0, 0};
    for (int64_t i = 0; i < num_spans; i++) {
        const int64_t offset = spans[2 * i], length = spans[2 * i + 1];
        if (offset < 0 || length < 1 || length > pool_bytes || offset > pool_bytes - length ||
            __builtin_add_overflow(total, length, &total)) {
            *result = (mp_result){MP_SPAN_OUT_OF_BOUNDS, i, 0};
            return 0;
        }
    }
    return total;
}

/* Append the next `count` bytes to `out`; the caller asks for no more than are left. */
MP_EXPORT void mp_gather(mp_gathering *g, const uint8_t *pool, uint8_t *out, int64_t count)
{
    while (count > 0) {
        const int64_t *span = &g->spans[2 * g->row];
        const int64_t left = span[1] - g->at;
        const int64_t part = left < count ? left : count;
        mp_copy(out, pool + span[0] + g->at, part);
        out += part;
        count -= part;
        g->at += part;
        if (part == left) {
            g->row++;
            g->at = 0;
        }
    }
}
